"""`hyv4-kvdequant run STEP`: the main job on a recorded step: gather, dequantize, attend, compare."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.table import Table
from rich.text import Text

from hyv4_kvdequant.cli.backends import BackendsOption, looking_at
from hyv4_kvdequant.cli.console import (
    DEFAULT_TIMEOUT,
    NOT_RIGHT,
    DeviceOption,
    JsonOption,
    TimeoutOption,
    default_device,
    help_end,
    out,
    print_json,
)

if TYPE_CHECKING:
    import torch

    from hyv4_kvdequant.contract import GatherDequantBackend
    from hyv4_kvdequant.gather import GatherResult
    from hyv4_kvdequant.reference import AttentionResult
    from hyv4_kvdequant.steps import Step

T = TypeVar("T")

HELP_END = help_end(
    "run tests/data/hyv4_step.safetensors --all",
    "run STEP.safetensors --backend torch --device cpu",
    "run STEP.safetensors --backend triton --backend mychip --json",
    status="0 every result is right; 1 one is not; 2 the step file, a backend or the device cannot be used.",
)

OUTPUT_TOLERANCE = 2e-3  # relative Frobenius error; bf16 itself allows about 2e-3
LSE_TOLERANCE = 1e-3  # absolute


@dataclass
class RunReport:
    """What one backend made of a step. `errors` maps a recorded result to our distance from it."""

    backend: str
    gather_ms: float = 0.0
    rows: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    rows_exact: int = 0
    attention_ms: float | None = None
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        within = all(
            error <= (LSE_TOLERANCE if name.endswith("lse") else OUTPUT_TOLERANCE)
            for name, error in self.errors.items()
        )
        return self.rows_exact == self.rows and within


def run(
    step_file: Annotated[Path, typer.Argument(metavar="STEP.safetensors", help="A recorded step.")],
    *,
    backend: BackendsOption = None,
    all_backends: Annotated[bool, typer.Option("--all", help="Every backend available on the device.")] = False,
    device: DeviceOption = None,
    timeout: TimeoutOption = DEFAULT_TIMEOUT,
    as_json: JsonOption = False,
) -> None:
    """Gathers, dequantizes and attends over a step; exit status 1 when a result is not what the file holds.

    Without --backend or --all it runs the backend that the settings choose.
    """
    with looking_at(None if all_backends else backend, timeout) as prober:
        from hyv4_kvdequant.contract import Target
        from hyv4_kvdequant.selector import choose_name, get_backend
        from hyv4_kvdequant.settings import load_settings
        from hyv4_kvdequant.steps import load_step

        step = load_step(step_file)
        target = Target.detect(default_device(device), step.layout, block_size=step.kv_cache.shape[1])
        probes = prober.probe_all(target) if all_backends else []
        origin = "the command line"
        names = [probe.name for probe in probes if probe.available] if all_backends else backend
        if not names:
            name, origin = choose_name(load_settings(), target)
            names = [name]
        if not probes:
            prober.check(dict.fromkeys(names, origin), target)
    reports = [run_step(step, get_backend(name, target, origin), target.device) for name in names]
    if as_json:
        print_json({"step": str(step_file), "device": str(target.device), "runs": [_as_dict(r) for r in reports]})
    else:
        out.print(_table(reports, f"{step_file.name} on {target.device}"))
        for probe in probes:
            if not probe.available:
                out.print(f"not run: {probe.name}: {probe.problem or ' '.join(probe.reasons)}")
    if not all(report.ok for report in reports):
        raise typer.Exit(NOT_RIGHT)


def run_step(step: Step, backend: GatherDequantBackend, device: torch.device) -> RunReport:
    """The main job on one step with one backend. Times are of one call after a first that compiles."""
    from hyv4_kvdequant.contract import InvalidCallError
    from hyv4_kvdequant.gather import gather_dequantize
    from hyv4_kvdequant.reference import sparse_attention
    from hyv4_kvdequant.steps import cache_on

    kv_cache, slots = cache_on(step, device), step.topk_indices.to(device)

    def gather() -> GatherResult:
        width = step.tokens_per_request
        return gather_dequantize(kv_cache, slots, backend=backend, layout=step.layout, tokens_per_request=width)

    gather()
    result, gather_ms = _timed(gather, device)
    report = RunReport(backend.name, gather_ms)
    _compare_rows(report, step, result)
    if "query" in step.tensors:
        query, sink = step.tensors["query"].to(device), step.tensors.get("attn_sink")
        scale = step.softmax_scale
        if scale is None:
            raise InvalidCallError(
                "The step has a query but no softmax_scale in its metadata, so it cannot be attended."
            )
        sink = None if sink is None else sink.to(device)
        attention, report.attention_ms = _timed(lambda: sparse_attention(query, *result, scale, sink), device)
        _compare_attention(report, step, attention)
    return report


def _timed(function: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """The function's result and its wall time in milliseconds, device work included."""
    _synchronize(device)
    start = time.perf_counter()
    result = function()
    _synchronize(device)
    return result, (time.perf_counter() - start) * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _compare_rows(report: RunReport, step: Step, result: GatherResult) -> None:
    import torch

    from hyv4_kvdequant.testing import expected_rows, rows_equal

    layout, slots = step.layout, step.topk_indices
    num_slots = step.kv_cache.shape[0] * step.kv_cache.shape[1]
    filled = (slots >= 0) & (slots < num_slots)
    chosen = slots[filled].long()
    got = result.compact_kv.view(torch.int16).cpu()[result.compact_indices.cpu()[filled].long()]
    if "rows" in step.tensors:
        expected = step.tensors["rows"].view(torch.int16)[chosen]
    else:
        block_size = step.kv_cache.shape[1]
        expected = expected_rows(step.kv_cache[chosen // block_size, chosen % block_size], layout)
    report.rows = int(filled.sum())
    report.rows_exact = int(rows_equal(got, expected, layout).all(1).sum())
    report.bytes_read = report.rows * layout.row_bytes + slots.numel() * slots.element_size()
    report.bytes_written = sum(tensor.numel() * tensor.element_size() for tensor in result)


def _compare_attention(report: RunReport, step: Step, attention: AttentionResult) -> None:
    import torch

    for kernel in ("fp8", "bf16"):
        if f"{kernel}_out" in step.tensors:
            recorded = step.tensors[f"{kernel}_out"].double()
            difference = attention.out.cpu().double() - recorded
            report.errors[f"{kernel}_out"] = float(difference.norm() / recorded.norm())
        if f"{kernel}_lse" in step.tensors:
            ours, recorded = attention.lse.cpu(), step.tensors[f"{kernel}_lse"]
            same = ours == recorded  # covers +inf against +inf
            report.errors[f"{kernel}_lse"] = float(torch.where(same, 0.0, (ours - recorded).abs()).max())


def _as_dict(report: RunReport) -> dict[str, object]:
    return {**asdict(report), "ok": report.ok}


def _table(reports: list[RunReport], title: str) -> Table:
    """One column a backend, so that the table fits a terminal however many results are compared."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for report in reports:
        table.add_column(report.backend, justify="right")

    def add(label: str, show: Callable[[RunReport], str | Text]) -> None:
        table.add_row(label, *map(show, reports))

    add("gather + dequantize, ms", lambda report: f"{report.gather_ms:.2f}")
    add("MB read / written", lambda report: f"{report.bytes_read / 1e6:.2f} / {report.bytes_written / 1e6:.2f}")
    add("rows bit-identical", lambda report: f"{report.rows_exact} of {report.rows}")
    if reports[0].attention_ms is not None:
        add("reference attention, ms", lambda report: f"{report.attention_ms:.2f}")
    for name in reports[0].errors:
        kind = "absolute" if name.endswith("lse") else "relative"
        add(f"{kind} error against {name}", lambda report, name=name: f"{report.errors[name]:.1e}")  # type: ignore[misc]
    add("verdict", lambda report: Text("right", "green") if report.ok else Text("wrong", "red"))
    return table
