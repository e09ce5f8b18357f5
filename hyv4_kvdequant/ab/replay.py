"""Replaying recorded calls with two backends, in turn: are they equal by the contract, and which is faster?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from hyv4_kvdequant.ab.compare import compare
from hyv4_kvdequant.ab.counters import LayerCounters, fresh_row, read_row
from hyv4_kvdequant.contract import GatherCall, GatherDequantBackend
from hyv4_kvdequant.defaults import REPLAY_RUNS
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.steps import Step, cache_on, load_step
from hyv4_kvdequant.testing import expected_rows
from hyv4_kvdequant.timing import single_runs

RUNS = REPLAY_RUNS
_RESAMPLES = 2000


@dataclass(frozen=True)
class Evidence:
    """The first mismatch of a call beside what is right.

    Attributes:
        record: the record's bytes, hexadecimal.
        a, b, expected: bf16 bits of the element in each result and by the format's definition; for an
            index disagreement the two indices, and None.
    """

    slot: int
    element: int
    record: str
    a: int
    b: int
    expected: int | None


@dataclass(frozen=True)
class ReplayedCall:
    """One recorded call with both backends.

    Attributes:
        trace: the file's name.
        layer: as recorded.
        counters: the comparison by the contract.
        evidence: of the first mismatch, or None.
        times: {mode: (microseconds of A, microseconds of B) of each pair of runs}.
    """

    trace: str
    layer: str
    counters: LayerCounters
    evidence: Evidence | None = None
    times: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def ratio(self, mode: str) -> float:
        """Median of A's time over B's, pair by pair."""
        return float(np.median([a / b for a, b in self.times[mode]]))


@dataclass(frozen=True)
class Ratio:
    """A's time over B's: the median over calls and its bootstrap 95 % interval."""

    median: float
    low: float
    high: float


def bootstrap_ratio(pairs: Sequence[float], seed: int = 0) -> Ratio:
    """Median of ratios and its 95 % interval from resampling; the same seed gives the same interval."""
    values = np.asarray(pairs, float)
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(values, (_RESAMPLES, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Ratio(float(np.median(values)), float(low), float(high))


class _Side:
    """One backend with buffers of its own for a step."""

    def __init__(self, backend: GatherDequantBackend, step: Step, device: torch.device) -> None:
        slots = step.topk_indices.to(device)
        self.backend = backend
        self.call = GatherCall(
            cache_on(step, device),
            slots,
            torch.empty((slots.numel(), step.layout.row_dim), dtype=torch.bfloat16, device=device),
            torch.empty_like(slots),
            step.layout,
            step.tokens_per_request,
        )

    def run(self) -> None:
        run_call(self.backend, self.call)


def replay(
    traces: Sequence[Path], a: GatherDequantBackend, b: GatherDequantBackend, device: torch.device, *, runs: int = RUNS
) -> Iterator[ReplayedCall]:
    """Runs every trace with both backends, interleaved A B A B, eagerly and, on accelerators, in graphs.

    Args:
        traces: step files.
        a, b: the two backends, ready for `device`.
        device: where to run.
        runs: pairs of timed runs a mode; 0 compares only.

    Raises:
        StepFileError: a trace cannot be read; nothing of it is replayed.
    """
    for path in traces:
        step = load_step(path)
        sides = _Side(a, step, device), _Side(b, step, device)
        for side in sides:
            side.run()
        counters = _compare(*sides)
        evidence = _evidence(step, counters)
        yield ReplayedCall(path.name, step.notes.get("layer", ""), counters, evidence, _time(*sides, device, runs))


def _compare(a: _Side, b: _Side) -> LayerCounters:
    row = torch.tensor(fresh_row(), dtype=torch.int64, device=a.call.kv_cache.device)
    if a.call.topk_indices.numel():
        compare(a.call, b.call.compact_kv, b.call.compact_indices, row)
    return read_row(row.tolist())


def _evidence(step: Step, counters: LayerCounters) -> Evidence | None:
    first = counters.first
    if first is None:
        return None
    block_size = step.kv_cache.shape[1]
    inside = 0 <= first.slot < step.kv_cache.shape[0] * block_size
    record = step.kv_cache[first.slot // block_size, first.slot % block_size] if inside else None
    expected = None
    if record is not None and first.element >= 0:
        expected = int(expected_rows(record.unsqueeze(0), step.layout)[0, first.element]) & 0xFFFF
    shown = "" if record is None else bytes(record.tolist()).hex()
    return Evidence(first.slot, first.element, shown, first.primary_bits, first.shadow_bits, expected)


def _time(a: _Side, b: _Side, device: torch.device, runs: int) -> dict[str, list[tuple[float, float]]]:
    times: dict[str, list[tuple[float, float]]] = {}
    graphs = device.type == "cuda" and a.backend.features.graph_safe and b.backend.features.graph_safe
    for mode in ("eager", "graph") if graphs else ("eager",):
        if runs:
            once_a, once_b = (single_runs(side.run, device, graph=mode == "graph") for side in (a, b))
            times[mode] = [(once_a(), once_b()) for _ in range(runs)]
    return times
