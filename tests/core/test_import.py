"""What importing the package costs, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_loads_nothing_heavy() -> None:
    modules = _run(
        "import sys, torch; before = set(sys.modules); import hyv4_kvdequant; print(set(sys.modules)-before)"
    )
    for name in ("triton", "vllm", "lightop", "stevedore", "pydantic", "typer", "hyv4_kvdequant_torch"):
        assert f"'{name}" not in modules


def test_import_touches_no_device() -> None:
    assert _run("import hyv4_kvdequant, torch; print(torch.cuda.is_initialized())").strip() == "False"


def test_every_public_name_exists() -> None:
    code = "import hyv4_kvdequant as h; print(all(getattr(h, name) is not None for name in h.__all__))"
    assert _run(code).strip() == "True"
