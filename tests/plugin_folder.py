"""Tiny real distributions for tests: found by the same metadata as any installed plugin."""

from __future__ import annotations

from pathlib import Path


class PluginFolder:
    """Installs tiny real distributions (module, METADATA, entry points) into a folder on the import path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, distribution: str, module: str, source: str, name: str, attribute: str = "Backend") -> None:
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{distribution.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[hyv4_kvdequant.backends]\n{name} = {module}:{attribute}\n")


BACKEND_SOURCE = """
from hyv4_kvdequant import Features, GatherDequantBackend

class Backend(GatherDequantBackend):
    api_version = {api_version}
    name = {name!r}
    features = Features()

    @classmethod
    def unavailable_reasons(cls, target):
        return {reasons!r}

    def gather_dequant(self, call):
        call.compact_kv.zero_()
        call.compact_indices.fill_(-1)
"""


def backend_source(name: str, api_version: int = 1, reasons: tuple[str, ...] = ()) -> str:
    """A minimal backend module; it is found and chosen, not right."""
    return BACKEND_SOURCE.format(name=name, api_version=api_version, reasons=list(reasons))
