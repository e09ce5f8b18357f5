"""`hyv4_kvdequant.plans.remap.remap_slots` as one Triton launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["num_entries", "num_slots", "block_slots", "block_stride"])
def _remap_kernel(
    slots_ptr,  # (num_entries,) int32
    row_of_block_ptr,  # (ceil(num_slots / block_stride),) int32
    out_ptr,  # (num_entries,) int32
    lost_ptr,  # (1,) int64
    num_entries,
    num_slots,
    block_slots,
    block_stride,
    BLOCK: tl.constexpr,
):
    entries = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < num_entries
    slots = tl.load(slots_ptr + entries, mask=inside, other=-1)
    filled = (slots >= 0) & (slots < num_slots)
    position = slots % block_stride
    first_row = tl.load(row_of_block_ptr + slots // block_stride, mask=filled, other=-1)
    found = filled & (first_row >= 0) & (position < block_slots)
    tl.store(out_ptr + entries, tl.where(found, first_row + position, -1), mask=inside)
    lost = tl.sum((filled & (found == 0)).to(tl.int32), 0)
    # Programs add whole numbers, so their order does not matter; mostly there is nothing to add.
    if lost > 0:
        tl.atomic_add(lost_ptr, lost.to(tl.int64))


def remap_slots_triton(
    topk_indices: torch.Tensor,
    row_of_block: torch.Tensor,
    out: torch.Tensor,
    lost: torch.Tensor,
    *,
    num_slots: int,
    block_slots: int,
    block_stride: int,
) -> None:
    """As `remap_slots`, with the numbering's numbers by name."""
    entries = topk_indices.numel()
    _remap_kernel[(triton.cdiv(entries, BLOCK),)](
        topk_indices, row_of_block, out, lost, entries, num_slots, block_slots, block_stride, BLOCK=BLOCK
    )
