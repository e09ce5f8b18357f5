"""Running a backend on one case, into outputs that show what it wrote and what it left."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hyv4_kvdequant.contract import GatherCall, GatherDequantBackend
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.testing.cases import Case

# More rows than a kernel's tile on both sides, so that a whole tile too many is still seen; an odd number, so that
# compact_indices has the alignment of its dtype and no more.
_GUARD_ROWS = 131
_POISON_BITS = 0x7FA5  # a NaN nobody writes by chance
_GUARD_INDEX = -77
_SMALL_CACHE_BYTES = 2**26


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a backend made of a case: outputs on the CPU, and whether it left alone what it must not touch.

    Attributes:
        case: the input.
        rows: (num_tokens * topk, row_dim) int16, the bits of `compact_kv`.
        compact_indices: (num_tokens, topk) int32.
        slots: (num_tokens, topk) int32, `topk_indices` as they were before the call.
        guards_intact: whether the memory around both outputs is as it was.
        inputs_intact: whether `topk_indices` and the cache (of a large one, the selected records) are as they were.
    """

    case: Case
    rows: torch.Tensor
    compact_indices: torch.Tensor
    slots: torch.Tensor
    guards_intact: bool
    inputs_intact: bool

    @property
    def filled(self) -> torch.Tensor:
        return (self.slots >= 0) & (self.slots < self.case.num_slots)


class Buffers:
    """Poisoned outputs with guards on both sides, as a caller who slices a workspace would pass them."""

    def __init__(self, case: Case) -> None:
        device, rows = case.kv_cache.device, case.topk_indices.numel()
        self._rows = slice(_GUARD_ROWS, _GUARD_ROWS + rows)
        size = rows + 2 * _GUARD_ROWS
        self._kv = torch.full((size, case.layout.row_dim), _POISON_BITS, dtype=torch.int16, device=device)
        self._indices = torch.full((size,), _GUARD_INDEX, dtype=torch.int32, device=device)
        # A stale mapping looks like a real one: the rows in reverse.
        self._stale = torch.arange(rows - 1, -1, -1, dtype=torch.int32, device=device)
        self.poison_indices()

    def poison_rows(self) -> None:
        self._kv[self._rows] = _POISON_BITS

    def poison_indices(self) -> None:
        self._indices[self._rows] = self._stale

    def call(self, case: Case, *, reuse: bool = False) -> GatherCall:
        """The call of a case of the same shape as the one these buffers were made for."""
        return GatherCall(
            kv_cache=case.kv_cache,
            topk_indices=case.topk_indices,
            compact_kv=self._kv[self._rows].view(torch.bfloat16),
            compact_indices=self._indices[self._rows].view(case.topk_indices.shape),
            layout=case.layout,
            tokens_per_request=case.tokens_per_request,
            reuse_compact_indices=reuse,
        )

    def outcome(self, case: Case, slots: torch.Tensor | None = None, *, inputs_intact: bool = True) -> Outcome:
        """What the outputs hold now, as the outcome of `case`; `slots` are its slots where a call may change them."""
        call = self.call(case)
        slots = case.topk_indices if slots is None else slots
        rows = call.compact_kv.view(torch.int16).cpu()
        return Outcome(case, rows, call.compact_indices.cpu(), slots.cpu(), self._guards_intact(), inputs_intact)

    def _guards_intact(self) -> bool:
        ends = (slice(None, self._rows.start), slice(self._rows.stop, None))
        return all(
            bool((self._kv[end] == _POISON_BITS).all() and (self._indices[end] == _GUARD_INDEX).all()) for end in ends
        )


def run_case(backend: GatherDequantBackend, case: Case) -> Outcome:
    """Runs one case into poisoned, guarded buffers."""
    buffers = Buffers(case)
    slots, memory = case.topk_indices.clone(), _cache_bytes(case)
    run_call(backend, buffers.call(case))
    intact = torch.equal(slots, case.topk_indices) and torch.equal(memory, _cache_bytes(case))
    return buffers.outcome(case, slots, inputs_intact=intact)


def _cache_bytes(case: Case) -> torch.Tensor:
    """A copy of the cache's memory with its gaps; of a large cache, of the selected records alone."""
    num_blocks, block_size, row_bytes = case.kv_cache.shape
    size = (num_blocks - 1) * case.kv_cache.stride(0) + block_size * row_bytes
    if size <= _SMALL_CACHE_BYTES:
        return case.kv_cache.as_strided((size,), (1,)).clone()
    slots = case.topk_indices.flatten()
    return case.records(slots[(slots >= 0) & (slots < case.num_slots)])
