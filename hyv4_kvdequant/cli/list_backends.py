"""`hyv4-kvdequant list`: every registered backend, and whether it can serve this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.text import Text

from hyv4_kvdequant.cli.backends import looking_at
from hyv4_kvdequant.cli.console import (
    DEFAULT_TIMEOUT,
    DeviceOption,
    JsonOption,
    TimeoutOption,
    default_device,
    help_end,
    out,
    print_block,
    print_json,
    printable,
)

if TYPE_CHECKING:
    from hyv4_kvdequant.probe import Probe

HELP_END = help_end(
    "list",
    "list --device cpu --json",
    "list --timeout 60",
    status="0 also when backends are unavailable or broken; 2 the device cannot be used.",
)


def list_command(
    device: DeviceOption = None, timeout: TimeoutOption = DEFAULT_TIMEOUT, as_json: JsonOption = False
) -> None:
    """Every registered backend: distribution, version, features, available or not and all reasons."""
    with looking_at(None, timeout) as prober:
        from hyv4_kvdequant.contract import Target
        from hyv4_kvdequant.versions import describe_versions, installed_versions

        target = Target.detect(default_device(device))
        probes = prober.probe_all(target)
    if as_json:
        backends = [probe.as_dict() for probe in probes]
        print_json({"device": str(target.device), "versions": installed_versions(), "backends": backends})
        return
    out.print(f"Backends for {target.device} ({target.platform})\n")
    for probe in probes:
        _print(probe)
    out.print(f"Versions: {describe_versions()}")


def _print(probe: Probe) -> None:
    """One block a backend: whether it can serve, where it is from, what it can do, and what is in the way."""
    heading = Text(printable(probe.name), style="bold")
    heading.append("  ")
    if probe.available:
        heading.append("available", style="not bold green")
    else:
        heading.append("broken" if probe.problem else "unavailable", style="not bold red")
    features = [name for name, on in asdict(probe.features).items() if on] if probe.features else []
    lines = [f"{probe.distribution} {probe.version}"]
    if features:
        lines.append(f"features: {', '.join(features)}")
    lines += [probe.problem] if probe.problem else [f"- {reason}" for reason in probe.reasons]
    print_block(heading, lines)
    out.print()
