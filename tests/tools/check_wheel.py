"""Builds the wheel, installs it into an environment of its own, and uses it from another folder."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN_STEP = ROOT / "tests" / "data" / "hyv4_step.safetensors"


def run(*command: str, cwd: Path) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT), cwd=folder)
        (wheel,) = folder.glob("*.whl")
        packages = {path.split("/")[0] for path in zipfile.ZipFile(wheel).namelist()}
        missing = {path.name for path in (ROOT / "backends").iterdir() if path.is_dir()} - packages
        if missing:
            sys.exit(f"the wheel lacks {sorted(missing)}; it has {sorted(packages)}")
        python = folder / "env" / "bin" / "python"
        run(sys.executable, "-m", "venv", str(folder / "env"), cwd=folder)
        constraints = str(ROOT / "constraints.txt")
        run(str(python), "-m", "pip", "install", "-q", "-c", constraints, str(wheel), cwd=folder)
        command = str(python.with_name("hyv4-kvdequant"))
        listed = json.loads(run(command, "list", "--json", cwd=folder))
        owners = {row["name"]: row["distribution"] for row in listed["backends"]}
        if owners.get("torch") != "hyv4-kvdequant":
            sys.exit(f"list does not show torch with its distribution: {listed}")
        run(command, "run", str(GOLDEN_STEP), "--backend", "torch", cwd=folder)
        print(f"{wheel.name}: installed in a clean environment, backends {owners}, golden step runs")


if __name__ == "__main__":
    main()
