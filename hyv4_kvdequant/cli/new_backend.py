"""`hyv4-kvdequant new-backend NAME`: start a third-party backend."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyv4_kvdequant.cli.console import out
from hyv4_kvdequant.registry import NAME_RULE
from hyv4_kvdequant.scaffold import create_backend_project


def new_backend(
    name: Annotated[str, typer.Argument(help=f"The backend's name: {NAME_RULE}.")],
    *,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="The project's folder, which must not exist. Default: hyv4-kvdequant-NAME, here."),
    ] = None,
) -> None:
    """Writes a complete distribution with a backend that passes its contract tests as it is."""
    written = create_backend_project(name, folder)
    project = next(path for path in written if path.name == "pyproject.toml").parent
    for path in written:
        out.print(f"  {path}", highlight=False, markup=False, soft_wrap=True)
    out.print("Next steps:", highlight=False)
    for command in (f"cd {project}", "pip install -e .", f"hyv4-kvdequant verify {name}"):
        out.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)
    out.print("README.md there says what comes after.", highlight=False)
