"""The gather benchmark: backends over token counts, beside a device copy of the same bytes (the floor)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hyv4_kvdequant.contract import FP8_DS_MLA, ConfigurationError, GatherCall, GatherDequantBackend, RecordLayout
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.plans.choice import moved_bytes
from hyv4_kvdequant.records import put_parts
from hyv4_kvdequant.timing import RUNS, Timing, time_eager, time_graph, time_once

FLOOR = "copy"
"""The name under which the floor stands among the backends."""

TimeInMode = Callable[[Callable[[], object], torch.device, int], Timing]
_BLOCK_SIZE = 64
_SHARED = 7 / 8


@dataclass(frozen=True)
class GatherShape:
    """What one gather call is given.

    Attributes:
        num_tokens, topk: query tokens, and slots selected for each.
        context: slots of the context that the slots are drawn from, whole blocks spread over the cache.
        num_slots: slots of the cache.
        tokens_per_request: request width; the query rows of a request share 7/8 of their slots.
    """

    num_tokens: int
    topk: int = 2048
    context: int = 131072
    num_slots: int = 2**20
    tokens_per_request: int = 1
    layout: RecordLayout = FP8_DS_MLA

    def __post_init__(self) -> None:
        """Raises ConfigurationError where a call of this shape cannot be made."""
        problems = [
            (self.num_tokens < 1 or self.topk < 1, "tokens and topk must be at least 1"),
            (self.num_tokens % self.tokens_per_request, f"width {self.tokens_per_request} must divide the tokens"),
            (self.context > self.num_slots, f"context {self.context} is more than the cache's {self.num_slots} slots"),
            (self.context % _BLOCK_SIZE or self.num_slots % _BLOCK_SIZE, f"sizes must be multiples of {_BLOCK_SIZE}"),
            (self.slots_of_a_request > self.context, f"a request selects more slots than the context {self.context}"),
        ]
        for wrong, problem in problems:
            if wrong:
                raise ConfigurationError(f"The benchmark cannot be run for {self.num_tokens} tokens: {problem}.")

    @property
    def num_shared(self) -> int:
        """Slots that all query rows of a request select."""
        return int(self.topk * _SHARED) if self.tokens_per_request > 1 else 0

    @property
    def slots_of_a_request(self) -> int:
        """Distinct slots that a request selects."""
        return self.num_shared + self.tokens_per_request * (self.topk - self.num_shared)

    @property
    def num_bytes(self) -> int:
        """Bytes that a call without deduplication reads and writes: records, rows and both index arrays."""
        return self.num_tokens * self.topk * moved_bytes(self.layout)


@dataclass(frozen=True)
class Measurement:
    """One timing. `mode` is `graph`, `eager`, or `first` for a backend's first call in this process, compilation
    included; `of_floor` is the median over the floor's median in that mode (in `eager` for a first call).
    """

    backend: str
    num_tokens: int
    mode: str
    timing: Timing
    gb_per_s: float
    of_floor: float


def measure_gather(
    backends: Sequence[GatherDequantBackend], shapes: Sequence[GatherShape], device: torch.device, runs: int = RUNS
) -> Iterator[Measurement]:
    """Times each backend and the floor on each shape; yields them as they are done, the floor first.

    Each is timed eagerly, and on a GPU in a graph too where the backend is `graph_safe`; before that comes one first
    call a backend. Inputs are the same in every run of the benchmark. All shapes have the same cache.
    """
    generator = torch.Generator(device).manual_seed(0)
    kv_cache = make_cache(shapes[0].num_slots, shapes[0].layout, device, generator)
    for shape in shapes:
        call = make_call(shape, kv_cache, generator)
        source = torch.ones(shape.num_bytes // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        floors: dict[str, float] = {}
        for mode, time_in_mode in _modes(device, graph_safe=True):
            timing = time_in_mode(partial(target.copy_, source), device, runs)
            floors[mode] = timing.median_us
            yield _measurement(FLOOR, shape, mode, timing, floors[mode])
        for backend in backends:
            if shape is shapes[0]:
                timing = time_once(partial(run_call, backend, call), device)
                yield _measurement(backend.name, shape, "first", timing, floors["eager"])
            for mode, time_in_mode in _modes(device, backend.features.graph_safe):
                timing = time_in_mode(partial(run_call, backend, call), device, runs)
                yield _measurement(backend.name, shape, mode, timing, floors[mode])


def count_measurements(backends: Sequence[GatherDequantBackend], shapes: Sequence[object], device: torch.device) -> int:
    """How many measurements `measure_gather` will yield."""
    modes = [len(_modes(device, graph_safe=True)), *(len(_modes(device, one.features.graph_safe)) for one in backends)]
    return len(backends) + len(shapes) * sum(modes)


def _modes(device: torch.device, graph_safe: bool) -> list[tuple[str, TimeInMode]]:
    in_graph = [("graph", time_graph)] if device.type == "cuda" and graph_safe else []
    return [*in_graph, ("eager", time_eager)]


def _measurement(backend: str, shape: GatherShape, mode: str, timing: Timing, floor_us: float) -> Measurement:
    rate = shape.num_bytes / timing.median_us / 1e3
    return Measurement(backend, shape.num_tokens, mode, timing, rate, timing.median_us / floor_us)


def make_cache(num_slots: int, layout: RecordLayout, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Random records with scales in [0.5, 1.5): (num_slots / 64, 64, row_bytes) uint8."""
    size = (num_slots, layout.row_bytes)
    records = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
    scales = torch.rand((num_slots, layout.num_tiles), device=device, generator=generator) + 0.5
    put_parts(layout, records, scale=scales.to(layout.scale_dtype))
    return records.view(-1, _BLOCK_SIZE, layout.row_bytes)


def make_call(shape: GatherShape, kv_cache: torch.Tensor, generator: torch.Generator) -> GatherCall:
    """A call of this shape on a cache: slots without repetition in a query row, in random order."""
    device = kv_cache.device

    def shuffled(size: int) -> torch.Tensor:
        return torch.randperm(size, device=device, generator=generator)

    blocks = shuffled(shape.num_slots // _BLOCK_SIZE)[: shape.context // _BLOCK_SIZE]
    context = (blocks.unsqueeze(1) * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE, device=device)).flatten().int()
    shared, width = shape.num_shared, shape.tokens_per_request
    rows = []
    for _ in range(shape.num_tokens // width):
        slots = context[shuffled(shape.context)[: shape.slots_of_a_request]]
        own = slots[shared:].view(width, -1)
        rows += [torch.cat([slots[:shared], own[row]])[shuffled(shape.topk)] for row in range(width)]
    num_rows = shape.num_tokens * shape.topk
    return GatherCall(
        kv_cache=kv_cache,
        topk_indices=torch.stack(rows),
        compact_kv=torch.empty((num_rows, shape.layout.row_dim), dtype=torch.bfloat16, device=device),
        compact_indices=torch.empty((shape.num_tokens, shape.topk), dtype=torch.int32, device=device),
        layout=shape.layout,
        tokens_per_request=width,
    )
