"""`hyv4-kvdequant version`: what a bug report has to say about a machine."""

from __future__ import annotations

import platform
import sys
from typing import Any

import typer

from hyv4_kvdequant.cli.console import JsonOption, help_end, out, print_json

HELP_END = help_end("version", "version --json", status="0, always.")


def show(wanted: bool) -> None:
    """`--version`: one line, and out."""
    if wanted:
        from hyv4_kvdequant import __version__

        out.print(f"hyv4-kvdequant {__version__}")
        raise typer.Exit


def version(as_json: JsonOption = False) -> None:
    """Versions, platform and GPU, in the form that a bug report asks for."""
    from hyv4_kvdequant.registry import registered_backends
    from hyv4_kvdequant.versions import installed_versions

    claims = [str(claim) for claims in registered_backends().values() for claim in claims]
    about: dict[str, Any] = {
        **installed_versions(),
        "python": f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        **_devices(),
        "backends": claims,
    }
    if as_json:
        print_json(about)
        return
    width = max(map(len, about))
    for name, value in about.items():
        lines = value if isinstance(value, list) else [value]
        for line in lines or ["none"]:
            out.print(f"{name:{width}}  {'not installed' if line is None else line}", soft_wrap=True)
            name = ""  # noqa: PLW2901 - further lines of one entry stand below the first


def _devices() -> dict[str, Any]:
    """What PyTorch was built for, and every GPU it sees; a PyTorch that does not import is told, not raised."""
    try:
        import torch

        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
        if torch.version.hip:
            build = f"HIP {torch.version.hip}"
        gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    except Exception as error:
        return {"torch build": f"{type(error).__name__}: {error}", "GPU": []}
    return {"torch build": build, "GPU": gpus}


def _gpu(index: int) -> str:
    import torch

    from hyv4_kvdequant.contract import Target

    target = Target.detect(f"cuda:{index}")
    memory = torch.cuda.get_device_properties(index).total_memory / 2**30
    return f"{torch.cuda.get_device_name(index)}, {target.platform} {target.arch}, {memory:.0f} GiB"
