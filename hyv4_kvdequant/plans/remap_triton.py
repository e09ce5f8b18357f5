"""`remap_slots` as one Triton launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["num_entries", "num_pages"])
def _remap_kernel(
    slots_ptr,  # (num_entries,) int32
    row_of_page_ptr,  # (num_pages,) int32
    out_ptr,  # (num_entries,) int32
    num_entries,
    num_pages,
    PAGE_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entries = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < num_entries
    slots = tl.load(slots_ptr + entries, mask=inside, other=-1)
    page = slots // PAGE_SLOTS
    filled = (slots >= 0) & (page < num_pages)
    first_row = tl.load(row_of_page_ptr + page, mask=filled, other=-1)
    rows = tl.where(first_row >= 0, first_row + slots % PAGE_SLOTS, -1)
    tl.store(out_ptr + entries, rows, mask=inside)


def remap_slots_triton(topk_indices: torch.Tensor, row_of_page: torch.Tensor, out: torch.Tensor) -> None:
    """As `hyv4_kvdequant.plans.remap.remap_slots`."""
    from hyv4_kvdequant.plans.remap import PAGE_SLOTS

    entries = topk_indices.numel()
    _remap_kernel[(triton.cdiv(entries, BLOCK),)](
        topk_indices, row_of_page, out, entries, row_of_page.numel(), PAGE_SLOTS=PAGE_SLOTS, BLOCK=BLOCK
    )
