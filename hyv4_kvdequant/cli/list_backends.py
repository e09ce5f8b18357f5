"""`hyv4-kvdequant list`: every registered backend, and whether it can serve this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from hyv4_kvdequant.cli.console import DeviceOption, JsonOption, default_device, out, print_json
from hyv4_kvdequant.contract import Target
from hyv4_kvdequant.probe import IMPORT_TIMEOUT_S, Probe, probe_backends
from hyv4_kvdequant.versions import describe_versions, installed_versions


def list_command(
    device: DeviceOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one backend's import may take.")] = IMPORT_TIMEOUT_S,
    as_json: JsonOption = False,
) -> None:
    """Every registered backend: distribution, version, features, available or not and all reasons."""
    target = Target.detect(default_device(device))
    probes = probe_backends(target, timeout)
    if as_json:
        backends = [probe.as_dict() for probe in probes]
        print_json({"device": str(target.device), "versions": installed_versions(), "backends": backends})
        return
    out.print(backends_table(probes, f"Backends for {target.device} ({target.platform})"))
    out.print(f"Versions: {describe_versions()}", highlight=False)


def backends_table(probes: list[Probe], title: str) -> Table:
    """The table of `list` and `doctor`."""
    table = Table(title=title, title_justify="left", show_lines=True)
    for column in ("backend", "distribution", "features", "available", "why not"):
        table.add_column(column, overflow="fold")
    for probe in probes:
        features = [name for name, on in asdict(probe.features).items() if on] if probe.features else []
        why = [probe.problem] if probe.problem else probe.reasons
        table.add_row(
            probe.name,
            f"{probe.distribution} {probe.version}",
            ", ".join(features),
            "[green]yes[/]" if probe.available else "[red]no[/]",
            "\n".join(why).replace("[", "\\["),
        )
    return table
