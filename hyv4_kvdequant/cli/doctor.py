"""`hyv4-kvdequant doctor`: would a start-up work here and now, and with what."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import typer
from rich.table import Table

from hyv4_kvdequant import selector
from hyv4_kvdequant.cli.console import NOT_RIGHT, DeviceOption, JsonOption, default_device, err, out, print_json
from hyv4_kvdequant.contract import KVDequantError, Target
from hyv4_kvdequant.registry import find_registration
from hyv4_kvdequant.settings import GATE, Settings, load_settings, variable_name
from hyv4_kvdequant.versions import describe_versions, installed_versions

PLUGIN_NAME = "hyv4_kvdequant"


@dataclass
class Diagnosis:
    """What `doctor` found. `problems` are what would stop a start-up; `notes` are worth knowing."""

    settings: Settings | None = None
    chosen: dict[str, str] | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def diagnose(target: Target) -> Diagnosis:
    """Does what a start-up would do, and collects what would stop it."""
    found = Diagnosis()
    try:
        found.settings = load_settings()
    except KVDequantError as error:
        found.problems.append(str(error))
        return found
    # With the gate off nothing would be intercepted, so what cannot be had then stops nobody.
    complaints = found.problems if found.settings.enabled else found.notes
    if not found.settings.enabled:
        found.notes.append(f"The gate is off: vLLM runs its own fp8 kernel. Set {GATE}=1 to switch the intercept on.")
    try:
        name, origin = selector.choose_name(found.settings, target)
        selector.get_backend(name, target, origin)
        found.chosen = {"backend": name, "because": origin, "registered_by": str(find_registration(name, origin))}
    except KVDequantError as error:
        complaints.append(str(error))
    complaints.extend(plugin_problems())
    return found


def plugin_problems() -> list[str]:
    """Whether `VLLM_PLUGINS` would keep vLLM from loading the intercept; nothing at run time could tell."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN_NAME in [name.strip() for name in allowed.split(",")]:
        return []
    return [
        f"VLLM_PLUGINS is {allowed!r} and leaves out {PLUGIN_NAME!r}, so vLLM would not load the intercept and would "
        f"run its own fp8 kernel in silence. What to do: add {PLUGIN_NAME} to VLLM_PLUGINS, or unset it."
    ]


def doctor(device: DeviceOption = None, as_json: JsonOption = False) -> None:
    """What would be chosen here and now and why; exit status 1 when a start-up would fail."""
    target = Target.detect(default_device(device))
    found = diagnose(target)
    if as_json:
        print_json(_as_dict(found, target))
    else:
        _print(found, target)
    if found.problems:
        raise typer.Exit(NOT_RIGHT)


def _setting_rows(settings: Settings) -> list[dict[str, Any]]:
    return [
        {"variable": variable_name(field), "value": getattr(settings, field), "source": settings.source(field)}
        for field in Settings.model_fields
    ]


def _as_dict(found: Diagnosis, target: Target) -> dict[str, Any]:
    return {
        "ok": not found.problems,
        "device": str(target.device),
        "platform": target.platform,
        "chosen": found.chosen,
        "settings": _setting_rows(found.settings) if found.settings else None,
        "versions": installed_versions(),
        "problems": found.problems,
        "notes": found.notes,
    }


def _print(found: Diagnosis, target: Target) -> None:
    if found.settings:
        table = Table(title="Settings", title_justify="left")
        for column in ("variable", "value", "from"):
            table.add_column(column, overflow="fold")
        for row in _setting_rows(found.settings):
            table.add_row(row["variable"], str(row["value"]), row["source"])
        out.print(table)
    out.print(f"Versions: {describe_versions()}", highlight=False)
    out.print(f"Device: {selector.describe_target(target)}", highlight=False)
    if found.chosen:
        out.print(f"Backend: {found.chosen['registered_by']}, chosen by {found.chosen['because']}", highlight=False)
    for note in found.notes:
        out.print(f"note: {note}", highlight=False, markup=False)
    for problem in found.problems:
        err.print(f"A start-up would fail:\n{problem}", highlight=False, markup=False)
    if not found.problems:
        out.print("[green]A start-up would work.[/]")
