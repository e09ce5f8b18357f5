"""What an intercepted attention call does, whatever the host: plan, gather, dequantize, remap, attend, in chunks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hyv4_kvdequant.ab.shadow import make_monitor
from hyv4_kvdequant.ab.trace import Recorder, make_recorder
from hyv4_kvdequant.contract import FP8_DS_MLA, ConfigurationError, GatherCall, InvalidCallError, RecordLayout, Target
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.hosts.workspace import Workspace
from hyv4_kvdequant.memory import outside_memory_pools
from hyv4_kvdequant.plans.choice import BatchSizes, Segment, choose_segments
from hyv4_kvdequant.plans.chunks import chunk_bounds, plan_workspace, sparse_wave
from hyv4_kvdequant.plans.remap import BlockNumbering, ContextTables, build_tables, remap_slots
from hyv4_kvdequant.plans.step_state import StepKey, StepState
from hyv4_kvdequant.probe import load_for_start_up
from hyv4_kvdequant.registry import describe
from hyv4_kvdequant.selector import choose_name, describe_target, get_backend
from hyv4_kvdequant.settings import Settings, variable_name
from hyv4_kvdequant.validation import validate_cache

logger = logging.getLogger(__name__)

# Wider "requests" are short prompts that arrive as one decode; grouping them gains nothing.
MAX_REQUEST_WIDTH = 16

AttentionPart = tuple[torch.Tensor, "torch.Tensor | None"]
SparseAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], AttentionPart]
Scratch = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class HostFacts:
    """What a host knows when its attention layers are built.

    Attributes:
        device: the worker's device.
        topk: selected slots a token.
        block_size: slots in a page of the cache.
        max_tokens: most query tokens in a batch.
        rank, world_size: this worker's rank and how many there are, for reports.
        run_id: names this run in reports, the same on all ranks; None has one made up.
        layout: the cache's record.
    """

    device: torch.device
    topk: int
    block_size: int
    max_tokens: int
    rank: int = 0
    world_size: int = 1
    run_id: str | None = None
    layout: RecordLayout = FP8_DS_MLA


@dataclass(frozen=True, eq=False)
class Batch:
    """What the host knows of a batch on the CPU, and its block table; makes the context plan possible.

    Attributes:
        sizes: query and context lengths.
        block_table: (num_requests, max_blocks) int32 on the device.
        block_rows: slots in a block.
        block_stride_rows: records from one block's start to the next one's in memory; None where it is no whole number.
    """

    sizes: BatchSizes
    block_table: torch.Tensor
    block_rows: int
    block_stride_rows: int | None

    def fits(self, num_tokens: int) -> bool:
        """Whether sizes and block table are those of a batch of `num_tokens` tokens."""
        requests = len(self.sizes.query_lens)
        most = self.block_table.shape[1] * self.block_rows if self.block_table.dim() == 2 else -1
        return (
            sum(self.sizes.query_lens) == num_tokens
            and len(self.sizes.context_rows) == requests <= self.block_table.shape[0]
            and all(0 <= rows <= most and rows % self.block_rows == 0 for rows in self.sizes.context_rows)
        )

    def numbering(self, kv_cache: torch.Tensor) -> BlockNumbering | None:
        """How a call on this cache numbers the slots of blocks, or None where that cannot be told.

        A host hands over its blocks as they are, and a slot's number counts them without gaps; or it hands over all
        memory between the first block and the last as one run of pages, in which gaps are numbered too.
        """
        pages, page_slots, row_bytes = kv_cache.shape
        if page_slots == self.block_rows:
            return BlockNumbering(self.block_rows, self.block_rows, pages * page_slots)
        in_one_run = pages == 1 or kv_cache.stride(0) == page_slots * row_bytes
        if not in_one_run or self.block_stride_rows is None or self.block_stride_rows < self.block_rows:
            return None
        return BlockNumbering(self.block_rows, self.block_stride_rows, pages * page_slots)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One intercepted call, flattened to tokens.

    Attributes:
        query: (num_tokens, num_heads, row_dim) bf16.
        kv_cache: (num_pages, block_size, row_bytes) uint8 or fp8.
        topk_indices: (num_tokens, topk) int32, global slots.
        tokens_per_request: request width; 1 for a ragged batch.
        layer: the layer's name.
        shares_indices: the host says that this layer selects what the layer before it selected.
        step: the host's object for this step, the same for all its layers; None when there is none.
        batch: what is known of the batch; None when nothing is.
    """

    query: torch.Tensor
    kv_cache: torch.Tensor
    topk_indices: torch.Tensor
    tokens_per_request: int
    layer: str
    shares_indices: bool = False
    step: Any = None
    batch: Batch | None = None


class Intercept:
    """Serves every layer of one device: one backend, one workspace, its monitor, and the shadow where there is one."""

    def __init__(self, settings: Settings, facts: HostFacts) -> None:
        """Resolves backend and shadow and sizes the workspace; raises what would be wrong while serving.

        Raises:
            ConfigurationError: a setting contradicts another, or the workspace cannot be.
            BackendError: a backend cannot be had.
        """
        self.settings, self.facts = settings, facts
        self.target = Target.detect(facts.device, facts.layout, block_size=facts.block_size, topk=facts.topk)
        name, origin = choose_name(settings, self.target)
        load_for_start_up({name: origin})
        # What a backend keeps for good may not lie where a host takes memory away while it sleeps.
        self.backend = outside_memory_pools(facts.device, lambda: get_backend(name, self.target, origin))
        self.monitor, self.shadow = make_monitor(
            self.backend, settings, self.target, facts.rank, facts.run_id, world_size=facts.world_size
        )
        self.recorder: Recorder | None = make_recorder(self.backend, settings, facts.rank, self.monitor.run_id)
        copies = 1 if self.shadow is None else 2
        wave = sparse_wave(facts.device)
        self.plan = plan_workspace(
            settings.workspace_mb, facts.topk, facts.max_tokens, wave, facts.layout, copies=copies
        )
        self.workspace = Workspace(self.plan.rows, copies, facts.layout)
        self.plans_taken: Counter[str] = Counter()
        self._mapping: torch.Tensor | None = None
        self._state = StepState()
        self._block_sizes = {facts.block_size}
        self._check_memory()
        self._log_choice(origin)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace, to be reserved while the host plans memory."""
        return self.workspace.nbytes

    def lost_counter(self, layer: str) -> torch.Tensor:
        """(1,) int64 on the device, the same memory at every call: what counts a layer's filled entries that got lost.

        A plan adds to it the entries that are filled in `topk_indices` and unfilled in what the sparse kernel is given.
        """
        return self.monitor.lost_counter(layer)

    def _check_memory(self) -> None:
        if self.facts.device.type != "cuda":
            return
        total = torch.cuda.get_device_properties(self.facts.device).total_memory
        if self.workspace_bytes > total:
            raise ConfigurationError(
                f"{variable_name('workspace_mb')} is {self.settings.workspace_mb}, more than the "
                f"{total // 2**20} MiB of {self.facts.device}. What to do: lower it."
            )

    def _log_choice(self, origin: str) -> None:
        settings = ", ".join(
            f"{field}={getattr(self.settings, field)} ({self.settings.source(field)})"
            for field in type(self.settings).model_fields
        )
        logger.info(
            "HY V4 fp8 KV dequantization is on: backend %s, chosen by %s, for %s; workspace %.0f MiB, "
            "%d tokens of %d slots at a time. Settings: %s",
            describe(self.backend.name),
            origin,
            describe_target(self.target),
            self.workspace_bytes / 2**20,
            self.plan.chunk_tokens,
            self.facts.topk,
            settings,
        )

    def keep_mappings(self) -> None:
        """Makes room for one step's index mapping, so that layers that share an indexer can reuse it.

        Called while layers are built, and only for a model that has such layers: (max_tokens, topk) int32.
        """
        if self._mapping is None:
            shape = (self.facts.max_tokens, self.facts.topk)
            self._mapping = torch.empty(shape, dtype=torch.int32, device=self.facts.device)

    def attend(self, call: AttentionCall, attention: SparseAttention, scratch: Scratch) -> AttentionPart:
        """Dequantizes what `call` selected and attends over it.

        Args:
            call: the intercepted call.
            attention: the host's BF16 sparse kernel: (query, compact_kv, compact_indices) of a chunk to
                (out (tokens, heads, nope_dim) bf16, lse (tokens, heads) fp32 or None).
            scratch: gives `workspace_bytes` bytes of the workspace, (bytes,) uint8, valid for this call.

        Returns:
            Output and LSE of all tokens, as `attention` returns them for a chunk.
        """
        call = replace(call, kv_cache=validate_cache(call.kv_cache, self.facts.layout))
        self._check_call(call)
        segments = self._segments(call)
        work = _Work(self, call, attention, scratch(self.workspace_bytes), self._may_reuse(call, segments))
        for segment in segments:
            self.plans_taken[segment.plan] += 1
            work.attend_segment(segment)
        return work.result()

    def _check_call(self, call: AttentionCall) -> None:
        """Raises InvalidCallError where a call is not what the intercept was built for."""
        slots, query = call.topk_indices, call.query
        if slots.dtype != torch.int32 or slots.dim() != 2 or slots.shape[0] != query.shape[0]:
            raise InvalidCallError(
                f"topk_indices of layer {call.layer} is {slots.dtype} of shape {tuple(slots.shape)}; expected int32, "
                f"({query.shape[0]}, topk), a row for each of the {query.shape[0]} query tokens."
            )
        if slots.shape[1] > self.facts.topk:
            raise InvalidCallError(
                f"topk_indices of layer {call.layer} has {slots.shape[1]} entries a token, but the workspace was "
                f"reserved for {self.facts.topk}, the width of topk_indices_buffer when the layers were built. "
                "What to do: build every layer with a buffer as wide as the widest selection."
            )
        self._check_block_size(call.kv_cache.shape[1])

    def _check_block_size(self, block_size: int) -> None:
        if block_size in self._block_sizes:
            return
        reasons = type(self.backend).unavailable_reasons(replace(self.target, block_size=block_size))
        if reasons:
            raise InvalidCallError(
                f"kv_cache has pages of {block_size} slots, {self.facts.block_size} were announced when the layers "
                f"were built, and the backend {self.backend.name} cannot serve the former: {' '.join(reasons)}"
            )
        self._block_sizes.add(block_size)

    def _segments(self, call: AttentionCall) -> list[Segment]:
        num_tokens = call.query.shape[0]
        everything = [Segment("slot", 0, 1, 0, num_tokens)]
        batch = call.batch
        # A captured graph is replayed on batches whose contexts nobody knows yet.
        if batch is None or _capturing(call.query) or not batch.fits(num_tokens):
            return everything
        if batch.numbering(call.kv_cache) is None:
            return everything
        self._state.enter(call.step, StepKey.of(batch.sizes, batch.block_table))
        return self._state.segments_of(lambda: self._choose(call, batch, everything))

    def _choose(self, call: AttentionCall, batch: Batch, everything: list[Segment]) -> list[Segment]:
        chosen = choose_segments(batch.sizes, call.topk_indices.shape[1], self.plan.rows, self.facts.layout)
        logger.debug("%s and the layers after it: %s", call.layer, chosen)
        # One segment with the per-slot plan keeps the batch's request width and needs no split.
        return everything if chosen[0].plan == "slot" and len(chosen) == 1 else chosen

    def _may_reuse(self, call: AttentionCall, segments: list[Segment]) -> bool:
        """Whether `_mapping` holds this layer's mapping; afterwards it does, whoever made it."""
        if self._mapping is None or call.step is None:
            return False
        numbering = None if call.batch is None else call.batch.numbering(call.kv_cache)
        return self._state.may_reuse_mapping(call.step, numbering, segments, shares_indices=call.shares_indices)

    def mapping_rows(self, start: int, stop: int, topk: int) -> torch.Tensor | None:
        """The kept mapping of tokens [start, stop), or None where none of this width is kept."""
        if self._mapping is None or stop > self._mapping.shape[0] or topk != self._mapping.shape[1]:
            return None
        return self._mapping[start:stop]

    def tables(self, call: AttentionCall, segment: Segment) -> ContextTables:
        """The context tables of a segment; made by the first layer of a step with such a cache, used by all of them."""
        batch = call.batch
        assert batch is not None
        numbering = batch.numbering(call.kv_cache)
        assert numbering is not None
        self._state.enter(call.step, StepKey.of(batch.sizes, batch.block_table))
        rows = batch.sizes.context_rows[segment.first : segment.last]
        return self._state.tables_of(
            segment,
            numbering,
            lambda: build_tables(
                batch.block_table[segment.first : segment.last],
                [count // batch.block_rows for count in rows],
                numbering,
            ),
        )


class _Work:
    """One call on its way through the workspace."""

    def __init__(
        self, intercept: Intercept, call: AttentionCall, attention: SparseAttention, memory: torch.Tensor, reuse: bool
    ) -> None:
        self.intercept, self.call, self.attention, self.reuse = intercept, call, attention, reuse
        self.buffers = intercept.workspace.carve(memory)
        self.num_tokens = call.query.shape[0]
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None

    def attend_segment(self, segment: Segment) -> None:
        if segment.plan == "slot":
            self._per_slot(segment)
        else:
            self._per_context(segment)

    def _per_slot(self, segment: Segment) -> None:
        intercept, call = self.intercept, self.call
        width = call.tokens_per_request
        tokens = segment.stop - segment.start
        if width > min(MAX_REQUEST_WIDTH, intercept.plan.chunk_tokens) or tokens % width:
            width = 1
        for first, last in chunk_bounds(tokens, intercept.plan, width):
            start, stop = segment.start + first, segment.start + last
            slots = call.topk_indices[start:stop].contiguous()
            kv, indices = self.buffers[0].views(slots.shape)
            kept = intercept.mapping_rows(start, stop, slots.shape[1])
            gather = GatherCall(
                call.kv_cache,
                slots,
                kv,
                indices if kept is None else kept,
                intercept.facts.layout,
                width,
                self.reuse and kept is not None,
            )
            self._gather(gather, call.query[start:stop])
            self._put(start, stop, self.attention(call.query[start:stop], kv, gather.compact_indices))

    def _per_context(self, segment: Segment) -> None:
        intercept, call = self.intercept, self.call
        tables = intercept.tables(call, segment)
        kv, row_numbers = self.buffers[0].views(tables.slots.shape)
        self._gather(GatherCall(call.kv_cache, tables.slots, kv, row_numbers, intercept.facts.layout), None)
        for start, stop in self._remap_bounds(segment, tables):
            indices = self._remap(tables, start, stop)
            for first, last in chunk_bounds(stop - start, intercept.plan, 1):
                query = call.query[start + first : start + last]
                self._put(start + first, start + last, self.attention(query, kv, indices[first:last]))

    def _remap_bounds(self, segment: Segment, tables: ContextTables) -> list[tuple[int, int]]:
        """Tokens that are remapped at once: all of them where memory is left beside the context's rows."""
        topk = self.call.topk_indices.shape[1]
        kept = self.intercept.mapping_rows(segment.start, segment.stop, topk) is not None
        held = self.buffers[0].spare_indices(tables.slots.numel()).numel() // max(topk, 1)
        tokens = segment.stop - segment.start
        if kept or held >= tokens:
            return [(segment.start, segment.stop)]
        bounds = chunk_bounds(tokens, self.intercept.plan, 1)
        return [(segment.start + first, segment.start + last) for first, last in bounds]

    def _remap(self, tables: ContextTables, start: int, stop: int) -> torch.Tensor:
        """(stop - start, topk) int32: the rows of the slots that tokens [start, stop) selected."""
        slots = self.call.topk_indices[start:stop].contiguous()
        indices = self.intercept.mapping_rows(start, stop, slots.shape[1])
        if indices is not None and self.reuse:
            return indices
        if indices is None:
            spare = self.buffers[0].spare_indices(tables.slots.numel())
            # Without spare memory: the gather's own row numbers have served, their place is free now.
            memory = spare if spare.numel() >= slots.numel() else self.buffers[0].indices
            indices = memory[: slots.numel()].view(slots.shape)
        remap_slots(slots, tables, indices, self.intercept.lost_counter(self.call.layer))
        return indices

    def _gather(self, gather: GatherCall, query: torch.Tensor | None) -> None:
        intercept, layer = self.intercept, self.call.layer
        run_call(intercept.backend, gather)
        evidence = None
        if intercept.shadow is not None:
            shadow_kv, shadow_indices = self.buffers[1].views(gather.topk_indices.shape)
            row = intercept.shadow.layer_index(layer)
            evidence = intercept.shadow.observe(gather, shadow_kv, shadow_indices, row)
        if intercept.recorder is not None:
            intercept.recorder.record(gather, layer, query, evidence)

    def _put(self, start: int, stop: int, part: AttentionPart) -> None:
        """Keeps a chunk's result. A chunk's own output is padded to the kernel's heads, so it is copied and freed."""
        out, lse = part
        if (start, stop) == (0, self.num_tokens):
            self.out, self.lse = out, lse
            return
        if self.out is None:
            self.out = out.new_empty((self.num_tokens, *out.shape[1:]))
            self.lse = None if lse is None else lse.new_empty((self.num_tokens, *lse.shape[1:]))
        self.out[start:stop] = out
        if self.lse is not None and lse is not None:
            self.lse[start:stop] = lse

    def result(self) -> AttentionPart:
        assert self.out is not None
        return self.out, self.lse


def _capturing(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
