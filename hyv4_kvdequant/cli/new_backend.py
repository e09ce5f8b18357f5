"""`hyv4-kvdequant new-backend NAME`: start a third-party backend."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hyv4_kvdequant.cli.console import help_end, out
from hyv4_kvdequant.defaults import NAME_RULE

HELP_END = help_end(
    "new-backend mychip",
    "new-backend mychip --dir ~/src/mychip",
    status="0 the project was written; 2 the name or the folder cannot be used, and nothing was left behind.",
)


def new_backend(
    name: Annotated[str, typer.Argument(help=f"The backend's name: {NAME_RULE}.")],
    *,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="The project's folder, which must not exist. Default: hyv4-kvdequant-NAME, here."),
    ] = None,
) -> None:
    """Writes a complete distribution with a backend that passes its contract tests as it is."""
    from hyv4_kvdequant.scaffold import create_backend_project

    written = create_backend_project(name, folder)
    project = next(path for path in written if path.name == "pyproject.toml").parent
    for path in written:
        out.print(f"  {path}", soft_wrap=True)
    out.print("Next steps:")
    for command in (f"cd {project}", "pip install -e .", f"hyv4-kvdequant verify {name}"):
        out.print(f"  {command}", soft_wrap=True)
    out.print("README.md there says what comes after.")
