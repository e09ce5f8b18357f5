"""`hyv4-kvdequant bench`: what backends cost on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hyv4_kvdequant.cli.backends import BackendsOption, looking_at
from hyv4_kvdequant.cli.bench_prefill import HELP_END as PREFILL_HELP_END
from hyv4_kvdequant.cli.bench_prefill import bench_prefill
from hyv4_kvdequant.cli.console import (
    DEFAULT_TIMEOUT,
    DeviceOption,
    JsonOption,
    TimeoutOption,
    default_device,
    describe_run,
    device_name,
    err,
    help_end,
    out,
    print_json,
)
from hyv4_kvdequant.contract.errors import ConfigurationError
from hyv4_kvdequant.defaults import BENCH_RUNS

if TYPE_CHECKING:
    import torch

    from hyv4_kvdequant.bench.gather import GatherShape, Measurement
    from hyv4_kvdequant.contract import GatherDequantBackend, Target
    from hyv4_kvdequant.probe import Prober

_STATUS = "0 it was measured; 2 a backend, the device or an option cannot be used."
HELP_END = help_end(
    "bench",
    "bench --tokens 1,64 --backend triton --backend mychip --device cuda",
    "bench --width 4 --runs 200 --json",
    status=_STATUS,
)
app = typer.Typer(invoke_without_command=True)
app.command("prefill", epilog=PREFILL_HELP_END)(bench_prefill)


@app.callback(epilog=HELP_END)
def bench(
    context: typer.Context,
    *,
    tokens: Annotated[str, typer.Option(help="Query token counts, comma-separated.")] = "1,4,16,64,256",
    topk: Annotated[int, typer.Option(help="Selected slots a query token.")] = 2048,
    context_slots: Annotated[int, typer.Option("--context", help="Slots that the selected ones come from.")] = 131072,
    cache_slots: Annotated[int, typer.Option(help="Slots of the cache.")] = 2**20,
    width: Annotated[int, typer.Option(help="Request width; rows of a request share 7/8 of their slots.")] = 1,
    backend: BackendsOption = None,
    device: DeviceOption = None,
    runs: Annotated[int, typer.Option(help="Runs of each measurement; fewer where they take over 3 seconds.")] = (
        BENCH_RUNS
    ),
    plot: Annotated[Path | None, typer.Option(help="Also draw time against tokens into this file.")] = None,
    timeout: TimeoutOption = DEFAULT_TIMEOUT,
    as_json: JsonOption = False,
) -> None:
    """Times gather + dequantize with cold caches, beside a device copy of the same bytes (the floor).

    Without --backend it measures all that serve the device.
    """
    if context.invoked_subcommand is not None:
        return
    with looking_at(backend, timeout) as prober:
        from hyv4_kvdequant.bench.gather import GatherShape
        from hyv4_kvdequant.contract import Target
        from hyv4_kvdequant.versions import describe_versions

        where = default_device(device)
        shapes = [GatherShape(count, topk, context_slots, cache_slots, width) for count in _counts(tokens)]
        backends = _backends(backend, Target.detect(where, block_size=64, topk=topk, packed=True), prober)
    measurements = _measure(backends, shapes, where, runs)
    if plot is not None:
        from hyv4_kvdequant.bench.plot import plot_gather

        plot_gather(measurements, plot, f"gather + dequantize on {device_name(where)}\n{_describe(shapes[0])}")
    if as_json:
        print_json(_as_dict(measurements, shapes[0], where))
        return
    for mode, title in _TITLES.items():
        if rows := [one for one in measurements if one.mode == mode]:
            out.print(_table(rows, title))
    first = [f"{one.backend} {one.timing.median_us / 1e6:.2f} s" for one in measurements if one.mode == "first"]
    out.print(f"First call, compilation included if nothing was cached: {', '.join(first)}")
    out.print(f"Device: {device_name(where)}; {_describe(shapes[0])}")
    out.print(f"Versions: {describe_versions()}")


_TITLES = {
    "graph": "replay of a graph that holds the call",
    "eager": "eager call on an idle device, its launch included",
}


def _counts(tokens: str) -> list[int]:
    try:
        return [int(count) for count in tokens.split(",")]
    except ValueError as error:
        raise ConfigurationError(f"--tokens {tokens}: expected whole numbers and commas, such as 1,4,16.") from error


def _backends(names: list[str] | None, target: Target, prober: Prober) -> list[GatherDequantBackend]:
    from hyv4_kvdequant.selector import get_backend

    if names:
        prober.check(dict.fromkeys(names, "--backend"), target)
    else:
        names = [probe.name for probe in prober.probe_all(target) if probe.available]
    if not names:
        raise ConfigurationError(f"No backend serves {target.device}; `hyv4-kvdequant list` shows why.")
    return [get_backend(name, target, "--backend") for name in names]


def _measure(
    backends: list[GatherDequantBackend], shapes: list[GatherShape], device: torch.device, runs: int
) -> list[Measurement]:
    from rich.progress import Progress

    from hyv4_kvdequant.bench.gather import count_measurements, measure_gather

    measurements = []
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("measuring", total=count_measurements(backends, shapes, device))
        for one in measure_gather(backends, shapes, device, runs):
            measurements.append(one)
            progress.update(task, advance=1, description=f"{one.backend}, {one.num_tokens} tokens, {one.mode}")
    return measurements


def _table(measurements: list[Measurement], title: str) -> Table:
    from hyv4_kvdequant.bench.gather import FLOOR

    table = Table(title=title, title_justify="left")
    table.add_column("backend")
    for column in ("tokens", "median µs", "10-90 %", "GB/s", "of copy", "runs"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in measurements:
        time = one.timing
        table.add_row(
            f"{FLOOR} (floor)" if one.backend == FLOOR else one.backend,
            str(one.num_tokens),
            f"{time.median_us:.1f}",
            f"{time.p10_us:.1f}-{time.p90_us:.1f}",
            f"{one.gb_per_s:.1f}",
            f"{one.of_floor:.2f}",
            str(time.runs),
        )
    return table


def _as_dict(measurements: list[Measurement], shape: GatherShape, device: torch.device) -> dict[str, Any]:
    rows = []
    for one in measurements:
        row = {key: value for key, value in asdict(one).items() if key != "timing"}
        rows.append({**row, **one.timing._asdict()})
    return {**describe_run(device, _describe(shape)), "measurements": rows}


def _describe(shape: GatherShape) -> str:
    return (
        f"record {shape.layout.name}, topk {shape.topk}, context {shape.context} of {shape.num_slots} slots, "
        f"request width {shape.tokens_per_request}, caches cold"
    )
