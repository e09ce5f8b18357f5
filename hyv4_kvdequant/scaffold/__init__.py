"""`create_backend_project`: a complete distribution with one backend, to start a new one from."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from string import Template

from hyv4_kvdequant.contract import ConfigurationError
from hyv4_kvdequant.registry import check_name, registered_backends
from hyv4_kvdequant.versions import installed_version

# File of the new project, from the template of that name beside this module. `$package` is filled in like the rest.
_FILES = {
    "pyproject.toml": "pyproject.toml.tmpl",
    "README.md": "README.md.tmpl",
    ".gitignore": "gitignore.tmpl",
    "src/$package/__init__.py": "backend.py.tmpl",
    "src/$package/py.typed": "py.typed.tmpl",
    "tests/test_contract.py": "test_contract.py.tmpl",
}


def create_backend_project(name: str, folder: Path | None = None) -> list[Path]:
    """Writes a distribution that registers the backend `name`; it passes its contract tests as it is.

    Args:
        name: the backend's name, by `defaults.NAME_RULE`.
        folder: the project's folder, which must not exist. Default: the distribution's name, in the current folder.

    Returns:
        The files written.

    Raises:
        ConfigurationError: the name breaks the rule or is taken, or the folder exists or cannot be written; then
            nothing is left behind.
    """
    check_name(name, "the argument NAME")
    taken = registered_backends().get(name)
    if taken:
        owner = f"{taken[0].distribution} {taken[0].version}".strip()
        raise ConfigurationError(
            f"The backend name {name!r} is taken by {owner}, which is installed here; two backends of one name cannot "
            "be used side by side. What to do: choose another name."
        )
    words = _words(name)
    folder = folder or Path(words["distribution"])
    try:
        with _new_folder(folder):
            return [_write(folder, path, template, words) for path, template in _FILES.items()]
    except FileExistsError:
        raise ConfigurationError(
            f"{folder} exists; nothing was written. What to do: name a folder that does not, with --dir."
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"{folder} cannot be made: {error}. Nothing was left behind. What to do: name another folder, with --dir, "
            "or choose a shorter name."
        ) from error


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Makes a folder, and takes it away again, with the parents made for it, when what is done inside fails."""
    # Not Path.exists: it follows a dangling link, and raises for a name that the file system does not take.
    missing = [parent for parent in folder.parents if not os.path.lexists(parent)]
    made = False
    try:
        folder.mkdir(parents=True)
        made = True
        yield
    except BaseException:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()  # unless somebody has put something there
        raise


def _words(name: str) -> dict[str, str]:
    parts = [part for part in re.split("[-_]+", name) if part]
    return {
        "name": name,
        "distribution": "-".join(["hyv4-kvdequant", *parts]),
        "package": "_".join(["hyv4_kvdequant", *parts]),
        "class_name": "".join(part.capitalize() for part in parts) + "Backend",
        "core_version": installed_version("hyv4-kvdequant") or "0.1.0",
    }


def _write(folder: Path, path: str, template: str, words: dict[str, str]) -> Path:
    written = folder / Template(path).substitute(words)
    written.parent.mkdir(parents=True, exist_ok=True)
    text = (files(__name__) / "template" / template).read_text(encoding="utf-8")
    written.write_text(Template(text).substitute(words), encoding="utf-8")
    return written
