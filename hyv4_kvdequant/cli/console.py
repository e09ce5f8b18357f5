"""What the commands share: consoles, JSON output, options, and the default device."""

from __future__ import annotations

import json
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from hyv4_kvdequant.contract import ConfigurationError
from hyv4_kvdequant.versions import installed_versions

out = Console()
err = Console(stderr=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on standard output.")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="PyTorch device. Default: cuda where PyTorch sees one, else cpu.")
]

NOT_RIGHT = 1


def print_json(value: Any) -> None:
    """Writes `value` as indented JSON to standard output."""
    print(json.dumps(value, indent=2, default=str))


def default_device(device: str | None) -> torch.device:
    """The device a command works on.

    Raises:
        ConfigurationError: PyTorch has no such device.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"--device {device}: PyTorch cannot use it here ({error}). Try cpu.") from error
    return chosen


def device_name(device: torch.device) -> str:
    """What a benchmark's numbers belong to."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def describe_run(device: torch.device, measured: str) -> dict[str, Any]:
    """What a benchmark's JSON says beside its numbers."""
    return {
        "device": str(device),
        "device_name": device_name(device),
        "versions": installed_versions(),
        "measured": measured,
    }
