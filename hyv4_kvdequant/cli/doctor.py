"""`hyv4-kvdequant doctor`: would a start-up work here and now, and with what."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from hyv4_kvdequant.cli.backends import looking_at
from hyv4_kvdequant.cli.console import (
    DEFAULT_TIMEOUT,
    NOT_RIGHT,
    DeviceOption,
    JsonOption,
    TimeoutOption,
    default_device,
    err,
    help_end,
    out,
    print_block,
    print_json,
)

if TYPE_CHECKING:
    from hyv4_kvdequant.contract import Target
    from hyv4_kvdequant.probe import Prober
    from hyv4_kvdequant.settings import Settings

HELP_END = help_end(
    "doctor",
    "VLLM_HCU_HYV4_FP8_KV_DEQUANT=1 hyv4-kvdequant doctor",
    "doctor --device cpu --json",
    status="0 a start-up would work; 1 it would fail; 2 the device cannot be used.",
).replace("hyv4-kvdequant VLLM", "VLLM")

PLUGIN_NAME = "hyv4_kvdequant"


@dataclass
class Diagnosis:
    """What `doctor` found. `problems` are what would stop a start-up; `notes` are worth knowing."""

    settings: Settings | None = None
    chosen: dict[str, str] | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def diagnose(target: Target, prober: Prober) -> Diagnosis:
    """Does what a start-up would do, and collects what would stop it."""
    from hyv4_kvdequant.contract import KVDequantError
    from hyv4_kvdequant.registry import find_registration
    from hyv4_kvdequant.selector import choose_name
    from hyv4_kvdequant.settings import GATE, load_settings

    found = Diagnosis()
    try:
        found.settings = load_settings()
    except KVDequantError as error:
        found.problems.append(str(error))
        return found
    _look_at_vllm(found)
    # With the gate off nothing would be intercepted, so what cannot be had then stops nobody.
    complaints = found.problems if found.settings.enabled else found.notes
    if not found.settings.enabled:
        found.notes.append(f"The gate is off: vLLM runs its own fp8 kernel. Set {GATE}=1 to switch the intercept on.")
    try:
        name, origin = choose_name(found.settings, target)
        prober.get_backends({name: origin}, target)
        found.chosen = {"backend": name, "because": origin, "registered_by": str(find_registration(name, origin))}
    except KVDequantError as error:
        complaints.append(str(error))
    complaints.extend(plugin_problems())
    return found


def _look_at_vllm(found: Diagnosis) -> None:
    """Says which known revision the installed vLLM is; one that is not known would stop a start-up."""
    from hyv4_kvdequant.contract.errors import HostError
    from hyv4_kvdequant.hosts.vllm_revisions import recognise_installed
    from hyv4_kvdequant.versions import installed_version

    version = installed_version("vllm")
    if version is None:
        return
    try:
        found.notes.append(
            f"vLLM {version} is installed; its attention class is the revision of {recognise_installed()}."
        )
    except HostError as error:
        (found.problems if found.settings and found.settings.enabled else found.notes).append(str(error))


def plugin_problems() -> list[str]:
    """Whether `VLLM_PLUGINS` would keep vLLM from loading the intercept; nothing at run time could tell."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN_NAME in [name.strip() for name in allowed.split(",")]:
        return []
    return [
        f"VLLM_PLUGINS is {allowed!r} and leaves out {PLUGIN_NAME!r}, so vLLM would not load the intercept and would "
        f"run its own fp8 kernel in silence. What to do: add {PLUGIN_NAME} to VLLM_PLUGINS, or unset it."
    ]


def doctor(device: DeviceOption = None, timeout: TimeoutOption = DEFAULT_TIMEOUT, as_json: JsonOption = False) -> None:
    """What would be chosen here and now and why; exit status 1 when a start-up would fail."""
    with looking_at(None, timeout) as prober:
        from hyv4_kvdequant.contract import Target

        target = Target.detect(default_device(device))
        found = diagnose(target, prober)
    if as_json:
        print_json(_as_dict(found, target))
    else:
        _print(found, target)
    if found.problems:
        raise typer.Exit(NOT_RIGHT)


def _setting_rows(settings: Settings) -> list[dict[str, Any]]:
    from hyv4_kvdequant.settings import variable_name

    return [
        {"variable": variable_name(field), "value": getattr(settings, field), "source": settings.source(field)}
        for field in type(settings).model_fields
    ]


def _as_dict(found: Diagnosis, target: Target) -> dict[str, Any]:
    from hyv4_kvdequant.versions import installed_versions

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
    from hyv4_kvdequant.selector import describe_target
    from hyv4_kvdequant.versions import describe_versions

    if found.settings:
        print_block(Text("Settings", "bold"), [_setting(row) for row in _setting_rows(found.settings)])
    out.print(f"Versions: {describe_versions()}")
    out.print(f"Device: {describe_target(target)}")
    if found.chosen:
        out.print(f"Backend: {found.chosen['registered_by']}, chosen by {found.chosen['because']}")
    for note in found.notes:
        out.print(f"note: {note}")
    for problem in found.problems:
        err.print(f"A start-up would fail:\n{problem}")
    if not found.problems:
        out.print("A start-up would work.", style="green")


def _setting(row: dict[str, Any]) -> str:
    source = row["source"]
    if source == f"the environment variable {row['variable']}":
        source = "the environment"
    return f"{row['variable']}: {row['value']} ({source})"
