"""The kernel for request widths above 1: stores once a slot that several query rows of a request selected.

One launch, no state between calls. Programs cannot wait for each other, so each finds its duplicates alone: a
request is given to a power of two of programs ("parts"), a slot belongs to the part that its hash names, and a part
handles all entries of its slots: it finds the first entry of each slot in a hash table of its own, writes their
indices, lists the first entries, and moves those rows. A bucket keeps the smallest entry that fell into it, so the
mapping is the same in every run; an entry whose bucket was won by another slot keeps a row of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyv4_kvdequant_triton.kernel import move_rows

ROWS = 128
NUM_WARPS = 16
MAX_ENTRIES = 16384
"""Entries of a request (width * topk) that one program can hold."""


@triton.jit(
    do_not_specialize=["num_slots", "num_entries", "log_parts", "num_buckets"],
    do_not_specialize_on_alignment=["topk_indices", "compact_indices"],
)
def gather_distinct_kernel(
    kv_cache,  # u8: records
    topk_indices,  # i32 (num_requests * num_entries,)
    compact_kv,  # bf16 (num_requests * num_entries, NOPE_DIM + ROPE_DIM)
    compact_indices,  # i32 (num_requests * num_entries,)
    scratch,  # i32 (num_requests << log_parts, num_buckets + num_entries)
    num_slots,
    num_entries,  # of one request: its width * topk
    log_parts,
    num_buckets,  # a power of two, at most ENTRIES
    ENTRIES: tl.constexpr,  # num_entries rounded up to a power of two
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    NOPE_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    NATIVE_E4M3: tl.constexpr,
    NATIVE_BF16: tl.constexpr,
):
    """Grid: `num_requests << log_parts` programs."""
    program = tl.program_id(0)
    last_part = (1 << log_parts) - 1
    first_row = (program >> log_parts).to(tl.int64) * num_entries
    table = scratch + program.to(tl.int64) * (num_buckets + num_entries)
    owners = table + num_buckets

    entry = tl.arange(0, ENTRIES)
    inside = entry < num_entries
    slot = tl.load(topk_indices + first_row + entry, mask=inside, other=-1)
    filled = (slot >= 0) & (slot < num_slots)
    hashed = ((slot.to(tl.uint32) * 0x9E3779B1) >> 12).to(tl.int32)  # Knuth's multiplicative hash: 20 good bits
    mine = inside & ((tl.where(filled, hashed >> 13, entry) & last_part) == program & last_part)
    bucket = table + (hashed & (num_buckets - 1))

    # Each barrier makes what this program's threads wrote to scratch visible to all of them.
    tl.store(table + entry, ENTRIES, mask=entry < num_buckets)
    tl.debug_barrier()
    tl.atomic_min(bucket, entry, mask=mine & filled, sem="relaxed", scope="cta")
    tl.debug_barrier()
    winner = tl.load(bucket, mask=mine & filled, other=0)
    has_same_slot = tl.load(topk_indices + first_row + winner, mask=mine & filled, other=-1) == slot
    owner = tl.where(filled & has_same_slot, winner, entry)
    tl.store(compact_indices + first_row + entry, tl.where(filled, first_row + owner, -1).to(tl.int32), mask=mine)
    owns_row = (mine & (owner == entry)).to(tl.int32)
    tl.store(owners + tl.cumsum(owns_row, 0) - 1, entry, mask=owns_row > 0)
    num_owners = tl.sum(owns_row, 0)
    tl.debug_barrier()

    for start in range(0, num_owners, ROWS):
        place = start + tl.arange(0, ROWS)
        write = place < num_owners
        row = first_row + tl.load(owners + place, mask=write, other=0)
        owned_slot = tl.load(topk_indices + row, mask=write, other=-1)
        move_rows(
            kv_cache,
            compact_kv,
            owned_slot,
            row,
            (owned_slot >= 0) & (owned_slot < num_slots),
            write,
            BLOCK_SIZE,
            BLOCK_STRIDE,
            ROW_BYTES,
            NOPE_DIM,
            ROPE_DIM,
            TILE_DIM,
            NOPE_OFFSET,
            SCALE_OFFSET,
            ROPE_OFFSET,
            NATIVE_E4M3,
            NATIVE_BF16,
        )
