"""`compare` as two Triton launches: one over all entries, one that settles the call's first mismatch."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from hyv4_kvdequant.ab.counters import COLUMN, ELEMENTS_PER_ENTRY, INDEX_ELEMENT, NOTHING_PENDING
from hyv4_kvdequant.contract import GatherCall

# A program is one warp, which needs no barrier to reduce, and goes through its share eight entries at a time.
ENTRIES = 8
WARPS = 1
PROGRAMS_PER_PROCESSOR = 32
INTERPRETER_PROGRAMS = 2  # more than one, so that the loop over a program's share is the same code

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


@triton.jit
def _load_part(
    kv_ptr, rows, here, FIRST: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ROW_DIM: tl.constexpr
):
    """Elements [FIRST, FIRST + SIZE) of rows [n]: int16 [n, PADDED], zeros where not `here` and in the padding."""
    element = tl.arange(0, PADDED)[None, :]
    return tl.load(
        kv_ptr + rows.to(tl.int64)[:, None] * ROW_DIM + FIRST + element,
        mask=here[:, None] & (element < SIZE),
        other=0,
    )


@triton.jit
def _count_part(
    left,  # int16 [n, PADDED]
    right,
    entries,  # int64 [n]
    counters_ptr,
    FIRST: tl.constexpr,
    PADDED: tl.constexpr,
    NANS_ARE_EQUAL: tl.constexpr,
    ELEMENTS: tl.constexpr,
    NOTHING: tl.constexpr,
    ELEMENTS_DIFFER: tl.constexpr,
    ULP: tl.constexpr,
):
    """Counts one part of the rows: (differing elements of each row [n], least key of a difference)."""
    left, right = left.to(tl.int32), right.to(tl.int32)
    differ = left != right
    if NANS_ARE_EQUAL:
        differ = differ & ((_is_nan(left) & _is_nan(right)) == 0)
    of_row = tl.sum(differ.to(tl.int32), axis=1)
    tl.atomic_add(counters_ptr + ELEMENTS_DIFFER, tl.sum(of_row).to(tl.int64), sem="relaxed")
    steps = tl.where(differ, tl.abs(_ordered(left) - _ordered(right)), 0)
    tl.atomic_max(counters_ptr + ULP, tl.max(tl.max(steps, axis=1)).to(tl.int64), sem="relaxed")
    element = FIRST + tl.arange(0, PADDED)[None, :]
    keys = tl.where(differ, entries[:, None] * ELEMENTS + element, tl.full(differ.shape, NOTHING, tl.int64))
    return of_row, tl.min(tl.min(keys, axis=1))


@triton.jit(do_not_specialize=["num_entries", "num_slots", "left_rows", "right_rows", "num_programs"])
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
    num_programs,
    ROW_DIM: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    NOPE_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
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
    ROPE_DIM: tl.constexpr = ROW_DIM - NOPE_DIM
    first = tl.program_id(0).to(tl.int64) * ENTRIES
    rows_compared = tl.zeros([ENTRIES], tl.int32)
    for start in range(first, num_entries, num_programs * ENTRIES):
        entries = start + tl.arange(0, ENTRIES)
        here = entries < num_entries
        slots = tl.load(slots_ptr + entries, mask=here, other=-1)
        left = tl.load(left_indices_ptr + entries, mask=here, other=-1)
        right = tl.load(right_indices_ptr + entries, mask=here, other=-1)
        filled = (slots >= 0) & (slots < num_slots)
        inside = (left >= 0) & (left < left_rows) & (right >= 0) & (right < right_rows)
        both = filled & inside
        disagree = here & ((filled & (inside == 0)) | ((filled == 0) & ((left != -1) | (right != -1))))
        rows_compared += both.to(tl.int32)

        left_nope = _load_part(left_kv_ptr, left, both, 0, NOPE_DIM, NOPE_PADDED, ROW_DIM)
        right_nope = _load_part(right_kv_ptr, right, both, 0, NOPE_DIM, NOPE_PADDED, ROW_DIM)
        unequal = tl.max((left_nope != right_nope).to(tl.int32), axis=1) | disagree.to(tl.int32)
        if ROPE_DIM > 0:
            left_rope = _load_part(left_kv_ptr, left, both, NOPE_DIM, ROPE_DIM, ROPE_PADDED, ROW_DIM)
            right_rope = _load_part(right_kv_ptr, right, both, NOPE_DIM, ROPE_DIM, ROPE_PADDED, ROW_DIM)
            unequal = unequal | tl.max((left_rope != right_rope).to(tl.int32), axis=1)

        # Equal bits need nothing more; what follows tells NaN from NaN, and where and how far bits differ.
        if tl.max(unequal) > 0:
            of_row, least = _count_part(
                left_nope,
                right_nope,
                entries,
                counters_ptr,
                0,
                NOPE_PADDED,
                True,
                ELEMENTS,
                NOTHING,
                ELEMENTS_DIFFER,
                ULP,
            )
            if ROPE_DIM > 0:
                more_of_row, rope_least = _count_part(
                    left_rope,
                    right_rope,
                    entries,
                    counters_ptr,
                    NOPE_DIM,
                    ROPE_PADDED,
                    False,
                    ELEMENTS,
                    NOTHING,
                    ELEMENTS_DIFFER,
                    ULP,
                )
                of_row += more_of_row
                least = tl.minimum(least, rope_least)
            tl.atomic_add(counters_ptr + ROWS_DIFFER, tl.sum((of_row > 0).to(tl.int64)), sem="relaxed")
            tl.atomic_add(counters_ptr + DISAGREE, tl.sum(disagree.to(tl.int64)), sem="relaxed")
            nothing = tl.full([ENTRIES], NOTHING, tl.int64)
            index_keys = tl.where(disagree, entries * ELEMENTS + INDEX_ELEMENT, nothing)
            tl.atomic_min(counters_ptr + PENDING, tl.minimum(least, tl.min(index_keys)), sem="relaxed")
    tl.atomic_add(counters_ptr + ROWS, tl.sum(rows_compared).to(tl.int64), sem="relaxed")


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
    nope_dim, rope_dim = call.layout.nope_dim, call.layout.rope_dim
    programs = min(triton.cdiv(entries, ENTRIES), _most_programs(call.kv_cache.device))
    _compare_kernel[(programs,)](
        *tensors,
        entries,
        call.num_slots,
        call.compact_kv.shape[0],
        shadow_kv.shape[0],
        programs,
        NOPE_DIM=nope_dim,
        NOPE_PADDED=triton.next_power_of_2(nope_dim),
        ROPE_PADDED=triton.next_power_of_2(rope_dim),
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


@cache
def _most_programs(device: torch.device) -> int:
    """As many as the device runs at once: each adds its count of rows once, and no counter is fought over."""
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
