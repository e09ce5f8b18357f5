"""`hyv4-kvdequant bench prefill`: what the choice of plan gains on a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hyv4_kvdequant.cli.backends import complete_backend, looking_at
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
from hyv4_kvdequant.defaults import BENCH_RUNS

if TYPE_CHECKING:
    import torch

    from hyv4_kvdequant.bench.prefill import BatchShape, Part

HELP_END = help_end(
    "bench prefill",
    "bench prefill --new-tokens 2048 --context 65536 --requests 4",
    status="0 it was measured; 2 a backend, the device or an option cannot be used.",
)


def bench_prefill(
    *,
    new_tokens: Annotated[int, typer.Option(help="Query tokens of each request.")] = 8192,
    context: Annotated[int, typer.Option(help="Tokens in each request's context, the new ones included.")] = 32768,
    requests: Annotated[int, typer.Option(help="Requests in the batch.")] = 1,
    topk: Annotated[int, typer.Option(help="Selected slots a query token.")] = 2048,
    cache_slots: Annotated[int, typer.Option(help="Slots of the cache.")] = 2**20,
    heads: Annotated[int, typer.Option(help="Query heads, for the attention kernel.")] = 8,
    workspace_mb: Annotated[int, typer.Option(help="Bound of the workspace, MiB.")] = 1024,
    backend: Annotated[
        str | None,
        typer.Option(help="Backend by name. Default: what would be chosen here.", autocompletion=complete_backend),
    ] = None,
    device: DeviceOption = None,
    runs: Annotated[int, typer.Option(help="Runs of each measurement; fewer where they take over 3 seconds.")] = (
        BENCH_RUNS
    ),
    timeout: TimeoutOption = DEFAULT_TIMEOUT,
    as_json: JsonOption = False,
) -> None:
    """Times one layer's intercept on a batch: the plan it chooses against the per-slot plan, attention apart."""
    with looking_at([backend] if backend else None, timeout) as prober:
        from rich.progress import Progress

        from hyv4_kvdequant.bench.prefill import BatchShape, measure_step
        from hyv4_kvdequant.contract import Target
        from hyv4_kvdequant.selector import choose_name
        from hyv4_kvdequant.settings import load_settings
        from hyv4_kvdequant.versions import describe_versions

        where = default_device(device)
        target = Target.detect(where)
        name, origin = (backend, "--backend") if backend else choose_name(load_settings(), target)
        prober.check({name: origin}, target)
    shape = BatchShape(new_tokens, context, requests, topk, cache_slots, heads, workspace_mb)
    parts = []
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("measuring", total=None)
        for part in measure_step(name, shape, where, runs):
            parts.append(part)
            progress.update(task, description=part.name)
    if as_json:
        print_json(_as_dict(parts, name, shape, where))
        return
    out.print(_table(parts, f"one layer's step, backend {name}"))
    out.print(f"Device: {device_name(where)}; {_describe(shape)}")
    out.print(f"Versions: {describe_versions()}")


def _ratios(part: Part, parts: list[Part]) -> tuple[float | None, float]:
    """Against a copy of as many records, where the part moves records, and against the per-slot plan's time."""
    from hyv4_kvdequant.bench.gather import FLOOR

    median = {one.name: one.timing.median_us for one in parts}
    floor = next(one for one in parts if one.name == FLOOR)
    same_rows = part.rows == floor.rows
    return part.timing.median_us / median[FLOOR] if same_rows else None, part.timing.median_us / median["per slot"]


def _table(parts: list[Part], title: str) -> Table:
    from hyv4_kvdequant.bench.gather import FLOOR

    table = Table(title=title, title_justify="left")
    table.add_column("part", no_wrap=True)
    for column in ("records", "median µs", "10-90 %", "of copy", "of per slot"):
        table.add_column(column, justify="right", no_wrap=True)
    for part in parts:
        of_copy, of_slot = _ratios(part, parts)
        table.add_row(
            f"{FLOOR} (floor)" if part.name == FLOOR else part.name,
            "" if part.rows is None else f"{part.rows:,}",
            f"{part.timing.median_us:.1f}",
            f"{part.timing.p10_us:.1f}-{part.timing.p90_us:.1f}",
            "" if of_copy is None else f"{of_copy:.2f}",
            f"{of_slot:.3g}",
        )
    return table


def _as_dict(parts: list[Part], backend: str, shape: BatchShape, device: torch.device) -> dict[str, Any]:
    rows = []
    for part in parts:
        of_copy, of_slot = _ratios(part, parts)
        row = {"part": part.name.strip(), "rows": part.rows, "of_copy": of_copy, "of_per_slot": of_slot}
        rows.append({**row, **part.timing._asdict()})
    return {"backend": backend, **describe_run(device, _describe(shape)), "parts": rows}


def _describe(shape: BatchShape) -> str:
    return (
        f"record {shape.layout.name}, {shape.requests} request(s) of {shape.new_tokens} new tokens over a context of "
        f"{shape.context}, topk {shape.topk}, cache of {shape.num_slots} slots, workspace {shape.workspace_mb} MiB, "
        "caches cold"
    )
