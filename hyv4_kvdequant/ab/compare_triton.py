"""`compare` as two Triton launches: one over all entries, one that settles the call's first mismatch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyv4_kvdequant.ab.counters import COLUMN, ELEMENTS_PER_ENTRY, INDEX_ELEMENT, NOTHING_PENDING
from hyv4_kvdequant.contract import GatherCall

# Eight entries a program of eight warps: 32 elements a thread, which the registers hold.
ENTRIES = 8
WARPS = 8

_COLUMNS = {
    "ROWS": COLUMN["rows_compared"],
    "ROWS_DIFFER": COLUMN["rows_differ"],
    "ELEMENTS_DIFFER": COLUMN["elements_differ"],
    "ULP": COLUMN["largest_ulp"],
    "DISAGREE": COLUMN["index_disagreements"],
    "PENDING": COLUMN["pending"],
}


@triton.jit
def _is_nan(bits):
    return (bits & 0x7FFF) > 0x7F80


@triton.jit
def _ordered(bits):
    magnitude = bits & 0x7FFF
    return tl.where(bits < 0, -magnitude, magnitude)


@triton.jit(do_not_specialize=["num_entries", "num_slots", "left_rows", "right_rows"])
def _compare_kernel(
    slots_ptr,  # (num_entries,) int32
    left_indices_ptr,  # (num_entries,) int32
    right_indices_ptr,  # (num_entries,) int32
    left_kv_ptr,  # (left_rows, ROW_DIM) int16, the bits of bf16
    right_kv_ptr,  # (right_rows, ROW_DIM) int16
    counters_ptr,  # (len(FIELDS),) int64
    num_entries,
    num_slots,
    left_rows,
    right_rows,
    ROW_DIM: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ENTRIES: tl.constexpr,
    ELEMENTS: tl.constexpr,
    INDEX_ELEMENT: tl.constexpr,
    NOTHING: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_DIFFER: tl.constexpr,
    ELEMENTS_DIFFER: tl.constexpr,
    ULP: tl.constexpr,
    DISAGREE: tl.constexpr,
    PENDING: tl.constexpr,
):
    entries = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    here = entries < num_entries
    slots = tl.load(slots_ptr + entries, mask=here, other=-1)
    left = tl.load(left_indices_ptr + entries, mask=here, other=-1)
    right = tl.load(right_indices_ptr + entries, mask=here, other=-1)
    filled = (slots >= 0) & (slots < num_slots)
    inside = (left >= 0) & (left < left_rows) & (right >= 0) & (right < right_rows)
    both = filled & inside
    disagree = (filled & (inside == 0)) | ((filled == 0) & ((left != -1) | (right != -1)))

    element = tl.arange(0, ELEMENTS)
    mask = both[:, None] & (element < ROW_DIM)[None, :]
    left_bits = tl.load(left_kv_ptr + left.to(tl.int64)[:, None] * ROW_DIM + element[None, :], mask=mask, other=0)
    right_bits = tl.load(right_kv_ptr + right.to(tl.int64)[:, None] * ROW_DIM + element[None, :], mask=mask, other=0)
    left_bits, right_bits = left_bits.to(tl.int32), right_bits.to(tl.int32)
    both_nan = _is_nan(left_bits) & _is_nan(right_bits) & (element < NOPE_DIM)[None, :]
    differ = ((left_bits != right_bits) & (both_nan == 0) & mask).to(tl.int32)

    tl.atomic_add(counters_ptr + ROWS, tl.sum(both.to(tl.int64)), sem="relaxed")
    differing = tl.sum(differ)
    disagreeing = tl.sum((disagree & here).to(tl.int32))
    if differing + disagreeing > 0:
        steps = tl.where(differ > 0, tl.abs(_ordered(left_bits) - _ordered(right_bits)), 0)
        tl.atomic_add(counters_ptr + ROWS_DIFFER, tl.sum(tl.max(differ, axis=1)).to(tl.int64), sem="relaxed")
        tl.atomic_add(counters_ptr + ELEMENTS_DIFFER, differing.to(tl.int64), sem="relaxed")
        tl.atomic_add(counters_ptr + DISAGREE, disagreeing.to(tl.int64), sem="relaxed")
        tl.atomic_max(counters_ptr + ULP, tl.max(steps).to(tl.int64), sem="relaxed")
        nothing = tl.full([ENTRIES, ELEMENTS], NOTHING, tl.int64)
        keys = tl.where(differ > 0, entries[:, None] * ELEMENTS + element[None, :], nothing)
        index_keys = tl.where(disagree & here, entries * ELEMENTS + INDEX_ELEMENT, NOTHING)
        least = tl.minimum(tl.min(keys), tl.min(index_keys))
        tl.atomic_min(counters_ptr + PENDING, least, sem="relaxed")


@triton.jit(do_not_specialize=["topk"])
def _settle_kernel(
    slots_ptr,
    left_indices_ptr,
    right_indices_ptr,
    left_kv_ptr,
    right_kv_ptr,
    counters_ptr,
    topk,
    ROW_DIM: tl.constexpr,
    ELEMENTS: tl.constexpr,
    INDEX_ELEMENT: tl.constexpr,
    NOTHING: tl.constexpr,
    CALLS: tl.constexpr,
    FIRST: tl.constexpr,
    PENDING: tl.constexpr,
):
    calls = tl.load(counters_ptr + CALLS)
    pending = tl.load(counters_ptr + PENDING)
    if (pending != NOTHING) & (tl.load(counters_ptr + FIRST) < 0):
        entry, element = pending // ELEMENTS, pending % ELEMENTS
        left = tl.load(left_indices_ptr + entry).to(tl.int64)
        right = tl.load(right_indices_ptr + entry).to(tl.int64)
        is_row = element != INDEX_ELEMENT
        left_bits = tl.load(left_kv_ptr + left * ROW_DIM + element, mask=is_row, other=0).to(tl.int64) & 0xFFFF
        right_bits = tl.load(right_kv_ptr + right * ROW_DIM + element, mask=is_row, other=0).to(tl.int64) & 0xFFFF
        tl.store(counters_ptr + FIRST, calls)
        tl.store(counters_ptr + FIRST + 1, entry // topk)
        tl.store(counters_ptr + FIRST + 2, entry % topk)
        tl.store(counters_ptr + FIRST + 3, tl.where(is_row, element, -1))
        tl.store(counters_ptr + FIRST + 4, tl.load(slots_ptr + entry).to(tl.int64))
        tl.store(counters_ptr + FIRST + 5, tl.where(is_row, left_bits, left))
        tl.store(counters_ptr + FIRST + 6, tl.where(is_row, right_bits, right))
    tl.store(counters_ptr + PENDING, tl.full([], NOTHING, tl.int64))
    tl.store(counters_ptr + CALLS, calls + 1)


def compare_triton(
    call: GatherCall, shadow_kv: torch.Tensor, shadow_indices: torch.Tensor, counters: torch.Tensor
) -> None:
    """As `hyv4_kvdequant.ab.compare.compare`."""
    entries = call.topk_indices.numel()
    tensors = (
        call.topk_indices,
        call.compact_indices,
        shadow_indices,
        call.compact_kv.view(torch.int16),
        shadow_kv.view(torch.int16),
        counters,
    )
    shared = {
        "ROW_DIM": call.layout.row_dim,
        "ELEMENTS": ELEMENTS_PER_ENTRY,
        "INDEX_ELEMENT": INDEX_ELEMENT,
        "NOTHING": NOTHING_PENDING,
    }
    _compare_kernel[(triton.cdiv(entries, ENTRIES),)](
        *tensors,
        entries,
        call.num_slots,
        call.compact_kv.shape[0],
        shadow_kv.shape[0],
        NOPE_DIM=call.layout.nope_dim,
        ENTRIES=ENTRIES,
        num_warps=WARPS,
        **shared,
        **_COLUMNS,
    )
    _settle_kernel[(1,)](
        *tensors,
        call.topk,
        CALLS=COLUMN["calls"],
        FIRST=COLUMN["first_call"],
        PENDING=COLUMN["pending"],
        **shared,
    )
