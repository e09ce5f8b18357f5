"""The step benchmark: one layer's intercept on a batch, with the plan it chooses and with the per-slot plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from hyv4_kvdequant.bench import peers
from hyv4_kvdequant.bench.gather import FLOOR, make_cache
from hyv4_kvdequant.contract import FP8_DS_MLA, ConfigurationError, GatherCall, RecordLayout
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.hosts.intercept import AttentionCall, AttentionPart, Batch, HostFacts, Intercept
from hyv4_kvdequant.plans.choice import BatchSizes, Segment, moved_bytes
from hyv4_kvdequant.plans.remap import remap_slots
from hyv4_kvdequant.settings import load_settings
from hyv4_kvdequant.timing import RUNS, Timing, time_queued

_BLOCK_SIZE = 64
_DRAWN_AT_ONCE = 2**26  # random numbers


@dataclass(frozen=True)
class BatchShape:
    """A batch of equal requests.

    Attributes:
        new_tokens: query tokens of each request, the last ones of its context.
        context: tokens in each request's context, the new ones included.
        requests: requests in the batch.
        topk: selected slots a query token; tokens that see fewer select all.
        num_slots: slots of the cache. Requests share blocks where it does not hold all contexts.
        heads: query heads, for the attention kernel.
        workspace_mb: bound of the workspace, MiB.
    """

    new_tokens: int
    context: int
    requests: int = 1
    topk: int = 2048
    num_slots: int = 2**20
    heads: int = 8
    workspace_mb: int = 1024
    layout: RecordLayout = FP8_DS_MLA

    def __post_init__(self) -> None:
        """Raises ConfigurationError where a batch of this shape cannot be made."""
        problems = [
            (min(self.new_tokens, self.requests, self.topk, self.heads) < 1, "counts must be at least 1"),
            (self.new_tokens > self.context, f"{self.new_tokens} new tokens are more than the context {self.context}"),
            (self.context > self.num_slots, f"context {self.context} is more than the cache's {self.num_slots} slots"),
            (self.num_slots % _BLOCK_SIZE, f"the cache's slots must be a multiple of {_BLOCK_SIZE}"),
        ]
        for wrong, problem in problems:
            if wrong:
                raise ConfigurationError(f"The benchmark cannot be run: {problem}.")

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return self.requests * self.new_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks of one context."""
        return -(-self.context // _BLOCK_SIZE)

    @property
    def context_rows(self) -> int:
        """Rows that the batch's contexts span, in whole blocks."""
        return self.requests * self.num_blocks * _BLOCK_SIZE


@dataclass(frozen=True)
class Part:
    """One timed part of a step; `rows` are the cache records it moves, None where that says nothing."""

    name: str
    timing: Timing
    rows: int | None = None


def measure_step(backend: str, shape: BatchShape, device: torch.device, runs: int = RUNS) -> Iterator[Part]:
    """Times the parts of one layer's step, the copy of the contexts' bytes first.

    `per slot` and `chosen: ...` are everything the intercept does before attention. Tables are made once a step and
    are not in it; they, the gather and the remap of a context plan follow apart. Where vLLM is installed, its own
    upconvert op and the BF16 sparse kernel follow too.
    """
    bench = _Bench(backend, shape, device)
    time = partial(time_queued, device=device, runs=runs)
    source = torch.ones(shape.context_rows * moved_bytes(shape.layout) // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield Part(FLOOR, time(partial(target.copy_, source)), shape.context_rows)
    del source, target
    yield Part("per slot", time(partial(bench.attend, None)), shape.num_tokens * shape.topk)
    yield Part(f"chosen: {bench.chosen}", time(partial(bench.attend, bench.batch)))
    if bench.chosen == "context":
        yield Part("  tables, once a step", time(bench.make_tables))
        yield Part("  gather", time(bench.gather_contexts), shape.context_rows)
        yield Part("  remap", time(bench.remap))
    upconvert = peers.vllm_upconvert(bench.kv_cache, bench.block_table, bench.rows[: shape.context_rows])
    if upconvert is not None:
        yield Part("vLLM's upconvert op", time(upconvert), shape.context_rows)
    attention = peers.flashmla_attention(bench.query, bench.rows, bench.row_indices)
    if attention is not None:
        yield Part("BF16 sparse kernel", time(attention))


class _Bench:
    """A batch on a random cache, and an intercept that serves it without attention."""

    def __init__(self, backend: str, shape: BatchShape, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.kv_cache = make_cache(shape.num_slots, shape.layout, device, generator)
        pages = shape.num_slots // _BLOCK_SIZE
        draws = [torch.randperm(pages, device=device, generator=generator) for _ in range(shape.requests)]
        self.block_table = torch.stack([draw[: shape.num_blocks] for draw in draws]).int()
        self.slots = torch.cat([_select(shape, table, generator) for table in self.block_table])
        size = (shape.num_tokens, shape.heads, shape.layout.row_dim)
        self.query = torch.randn(size, device=device, generator=generator).bfloat16()
        facts = HostFacts(device, shape.topk, _BLOCK_SIZE, shape.num_tokens, layout=shape.layout)
        asked = {"backend": backend, "workspace_mb": shape.workspace_mb, "shadow": None, "trace": 0}
        settings = load_settings().model_copy(update=asked)  # what is asked for here wins over the environment
        self.intercept = Intercept(settings, facts)
        rows = shape.num_blocks * _BLOCK_SIZE
        sizes = BatchSizes((shape.new_tokens,) * shape.requests, (rows,) * shape.requests)
        self.batch = Batch(sizes, self.block_table, _BLOCK_SIZE, _BLOCK_SIZE)
        self.memory = torch.empty(self.intercept.workspace_bytes, dtype=torch.uint8, device=device)
        self.rows, self.row_indices = self._context_buffers(shape, device)
        self.chosen = self._choice()

    def _context_buffers(self, shape: BatchShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows for all contexts, finite, and an index array into them for attention: each token's own request."""
        rows = torch.zeros((shape.context_rows, shape.layout.row_dim), dtype=torch.bfloat16, device=device)
        size = (shape.num_tokens, shape.topk)
        seen = shape.context - shape.new_tokens + 1
        indices = torch.randint(0, seen, size, dtype=torch.int32, device=device)
        request = torch.arange(shape.requests, device=device, dtype=torch.int32).repeat_interleave(shape.new_tokens)
        return rows, indices + request.unsqueeze(1) * (shape.num_blocks * _BLOCK_SIZE)

    def _choice(self) -> str:
        before = self.intercept.plans_taken.copy()
        self.attend(self.batch)
        return " + ".join(sorted(self.intercept.plans_taken - before))

    def attend(self, batch: Batch | None) -> None:
        """Everything that the intercept does for a layer, except attention."""
        call = AttentionCall(self.query, self.kv_cache, self.slots, 1, "bench", step=self, batch=batch)
        self.intercept.attend(call, self._no_attention, lambda nbytes: self.memory[:nbytes])

    def _no_attention(self, query: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor) -> AttentionPart:
        return query[:, :0, :0], None  # nothing to be copied where the intercept puts chunks together

    @property
    def _segment(self) -> Segment:
        return Segment("context", 0, len(self.batch.sizes.query_lens), 0, self.slots.shape[0])

    def _call(self, step: object) -> AttentionCall:
        return AttentionCall(self.query, self.kv_cache, self.slots, 1, "bench", step=step, batch=self.batch)

    def make_tables(self) -> None:
        """The tables of a new step."""
        self.intercept.tables(self._call(None), self._segment)

    def gather_contexts(self) -> None:
        """The context plan's gather."""
        slots = self.intercept.tables(self._call(self), self._segment).slots
        rows = self.rows[: slots.numel()]
        run_call(self.intercept.backend, GatherCall(self.kv_cache, slots, rows, torch.empty_like(slots)))

    def remap(self) -> None:
        """The context plan's remap of all tokens."""
        tables = self.intercept.tables(self._call(self), self._segment)
        remap_slots(self.slots, tables, torch.empty_like(self.slots), self.intercept.lost_counter("bench"))


def _select(shape: BatchShape, table: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Distinct slots for each new token of a request, among those its position sees: (new_tokens, topk) int32."""
    device = table.device
    positions = torch.arange(shape.context, device=device)
    slots = table[positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    chosen = min(shape.topk, shape.context)
    selected = torch.full((shape.new_tokens, shape.topk), -1, dtype=torch.int32, device=device)
    at_once = max(_DRAWN_AT_ONCE // shape.context, 1)
    for start in range(0, shape.new_tokens, at_once):
        stop = min(start + at_once, shape.new_tokens)
        seen = torch.arange(start, stop, device=device).unsqueeze(1) + shape.context - shape.new_tokens + 1
        keys = torch.rand((stop - start, shape.context), device=device, generator=generator)
        order = keys.masked_fill_(positions >= seen, -1.0).topk(chosen).indices
        selected[start:stop, :chosen] = torch.where(order < seen, slots[order], -1).int()
    return selected
