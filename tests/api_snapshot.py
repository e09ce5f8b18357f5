"""What is public, written down: `tests/data/public_api.json`. Run this file to bring it up to date.

It refuses to where a name came, changed or went and the newest section of CHANGELOG.md does not say so in backticks.
What came with the first release needs no line of its own.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import typer.main

import hyv4_kvdequant
import hyv4_kvdequant.testing
from hyv4_kvdequant import RecordLayout, steps
from hyv4_kvdequant.cli.app import app
from hyv4_kvdequant.registry import ENTRY_POINT_GROUP
from hyv4_kvdequant.settings import Settings, variable_name
from hyv4_kvdequant.testing import strategies

ROOT = Path(__file__).parents[1]
SNAPSHOT = Path(__file__).parent / "data" / "public_api.json"
CHANGELOG = ROOT / "CHANGELOG.md"
FIRST_VERSION = "0.1.0"


def public_api() -> dict[str, str]:
    """Every public name and what a caller may rely on about it, as text."""
    found: dict[str, str] = {}
    for module in (hyv4_kvdequant, hyv4_kvdequant.testing):
        for name in module.__all__:
            _describe(f"{module.__name__}.{name}", getattr(module, name), found)
    for name, value in vars(strategies).items():
        if inspect.isfunction(value) and value.__module__ == strategies.__name__ and not name.startswith("_"):
            found[f"{strategies.__name__}.{name}"] = _signature(value)
    for field, about in Settings.model_fields.items():
        found[variable_name(field)] = f"default {about.default!r}"
    found[ENTRY_POINT_GROUP] = "entry point group"
    found[steps.FORMAT] = f"step file format, version {steps.VERSION}"
    _describe_command("hyv4-kvdequant", typer.main.get_command(app), found)
    return dict(sorted(found.items()))


def _describe(path: str, value: Any, found: dict[str, str]) -> None:
    if not inspect.isclass(value):
        found[path] = _signature(value) if callable(value) else f"constant of type {type(value).__name__}"
        return
    found[path] = f"class({', '.join(base.__name__ for base in value.__bases__)})"
    if issubclass(value, Settings):
        return  # its fields stand as the variables that set them
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        found[path] += _signature(value)
    for name, attribute in vars(value).items():
        member = getattr(attribute, "__func__", attribute)
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, property):
            found[f"{path}.{name}"] = "property"
        elif inspect.isfunction(member) and not (name == "__init__" and dataclasses.is_dataclass(value)):
            found[f"{path}.{name}"] = _signature(member)


def _signature(function: Any) -> str:
    """The signature as it stands in the source, however a library or a Python version would show it."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=_in_source(parameter.annotation), default=_short_default(parameter.default))
        for parameter in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=parameters, return_annotation=_in_source(signature.return_annotation)))
    return text.replace("'", "")


def _in_source(annotation: Any) -> Any:
    annotation = getattr(annotation, "__forward_arg__", annotation)
    return annotation if isinstance(annotation, str) else inspect.Signature.empty


def _short_default(default: Any) -> Any:
    return default.name if isinstance(default, RecordLayout) else default


def _describe_command(path: str, command: Any, found: dict[str, str]) -> None:
    for name, child in sorted(getattr(command, "commands", {}).items()):
        _describe_command(f"{path} {name}", child, found)
    # A group that does something by itself, as `bench` does, is a command too.
    if not hasattr(command, "commands") or command.invoke_without_command:
        params = [param for param in command.params if param.name != "help"]
        found[path] = " ".join(_describe_parameter(param) for param in params)


def _describe_parameter(param: Any) -> str:
    words = "|".join([*param.opts, *param.secondary_opts])
    many = "..." if param.multiple or param.nargs == -1 else ""
    return f"{words}{many}" if param.required else f"[{words}{many}]"


def load_snapshot() -> dict[str, dict[str, str]]:
    """The written-down names: {name: {"is": what it is, or "gone", "since": version of its last change}}."""
    return json.loads(SNAPSHOT.read_text()) if SNAPSHOT.exists() else {}


def differences(snapshot: dict[str, dict[str, str]], current: dict[str, str]) -> dict[str, str]:
    """What came, changed or went: {name: sentence}."""
    found = {}
    for name in sorted(snapshot.keys() | current.keys()):
        before = snapshot.get(name, {}).get("is", "gone")
        after = current.get(name, "gone")
        if before != after:
            found[name] = f"{name} was {before!r} and is {after!r}"
    return found


def unannounced(names: dict[str, str]) -> list[str]:
    """Which of {name: version} the version's section of the changelog does not name in backticks."""
    sections = _sections()
    return [
        f"CHANGELOG.md, section {version}, does not name `{_short(name)}`"
        for name, version in names.items()
        if version != FIRST_VERSION and f"`{_short(name)}`" not in sections.get(version, "")
    ]


def _short(name: str) -> str:
    """`hyv4_kvdequant.testing.Case.records` is announced as `Case.records`; commands and variables as they are."""
    return re.sub(r"^hyv4_kvdequant\.(testing\.)?(strategies\.)?(?!backends$|step$)", "", name)


def _sections() -> dict[str, str]:
    """The changelog's text by version, from its `## 0.2.0` headings."""
    text = CHANGELOG.read_text() if CHANGELOG.exists() else ""
    parts = re.split(r"^## \[?v?(\d[\w.]*)", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def main() -> None:
    snapshot, current = load_snapshot(), public_api()
    version = hyv4_kvdequant.__version__
    changed = differences(snapshot, current)
    missing = unannounced(dict.fromkeys(changed, version))
    if missing:
        sys.exit("\n".join([*changed.values(), *missing]))
    entries = {name: {"is": current.get(name, "gone"), "since": version} for name in changed}
    if version == FIRST_VERSION:
        # Before the first release nothing is missed by anyone, so nothing is remembered as gone.
        snapshot = {name: entry for name, entry in snapshot.items() if name in current}
        entries = {name: entry for name, entry in entries.items() if name in current}
    SNAPSHOT.write_text(json.dumps(dict(sorted({**snapshot, **entries}.items())), indent=1) + "\n")
    print("\n".join(changed.values()) or "nothing changed")


if __name__ == "__main__":
    main()
