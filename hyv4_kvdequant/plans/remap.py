"""From selected slots to rows of a dequantized context: the context plan's tables and its one device step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PAGE_SLOTS = 64
"""Slots in a page: the granularity of the tables. Hosts' blocks are whole pages."""


@dataclass(frozen=True, eq=False)
class ContextTables:
    """Where each page of some requests' contexts lies in the dequantized rows.

    Attributes:
        slots: (num_pages, PAGE_SLOTS) int32; the slot of every row, in row order: the gather's `topk_indices`.
        row_of_page: (pages in the cache,) int32; first row of a page, -1 where no context holds it.
    """

    slots: torch.Tensor
    row_of_page: torch.Tensor


def build_tables(
    block_table: torch.Tensor,
    blocks: Sequence[int],
    *,
    cache_pages: int,
    pages_per_block: int = 1,
    page_stride: int = 1,
) -> ContextTables:
    """Tables for some requests' contexts, built on the device without reading it.

    Args:
        block_table: (num_requests, max_blocks) int32, the block numbers of each request.
        blocks: blocks of each request's context (host-side; an upper bound will do).
        cache_pages: pages in the cache.
        pages_per_block: pages in a block.
        page_stride: pages from the start of one block to the start of the next.
    """
    ids = torch.cat([block_table[request, :count] for request, count in enumerate(blocks)])
    steps = torch.arange(pages_per_block, dtype=torch.int32, device=ids.device)
    pages = (ids.unsqueeze(1) * page_stride + steps).flatten()
    # What a block table holds past a context's end is anybody's number; it must only stay inside the cache.
    pages = pages.clamp_(0, cache_pages - 1)
    positions = torch.arange(PAGE_SLOTS, dtype=torch.int32, device=ids.device)
    slots = pages.unsqueeze(1) * PAGE_SLOTS + positions
    rows = torch.arange(pages.numel(), dtype=torch.int32, device=ids.device) * PAGE_SLOTS
    row_of_page = torch.full((cache_pages,), -1, dtype=torch.int32, device=ids.device)
    # Requests that share a prefix list a page twice, with equal contents; the later row is taken, always.
    row_of_page.scatter_reduce_(0, pages.long(), rows, "amax")
    return ContextTables(slots, row_of_page)


def remap_slots(topk_indices: torch.Tensor, row_of_page: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the row of every selected slot: on accelerators in one Triton launch, elsewhere in PyTorch.

    Args:
        topk_indices: (num_tokens, topk) int32, contiguous; outside the cache is unfilled.
        row_of_page: as in `ContextTables`.
        out: (num_tokens, topk) int32, contiguous; the row, -1 where unfilled.
    """
    if topk_indices.device.type == "cuda":
        from hyv4_kvdequant.plans.remap_triton import remap_slots_triton

        remap_slots_triton(topk_indices, row_of_page, out)
    else:
        remap_slots_torch(topk_indices, row_of_page, out)


def remap_slots_torch(topk_indices: torch.Tensor, row_of_page: torch.Tensor, out: torch.Tensor) -> None:
    """`remap_slots` in PyTorch, on any device."""
    filled = (topk_indices >= 0) & (topk_indices < row_of_page.numel() * PAGE_SLOTS)
    readable = torch.where(filled, topk_indices, 0)
    first_row = row_of_page[(readable // PAGE_SLOTS).long()]
    out.copy_(torch.where(filled & (first_row >= 0), first_row + readable % PAGE_SLOTS, -1))
