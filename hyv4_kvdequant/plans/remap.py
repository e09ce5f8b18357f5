"""From selected slots to rows of a dequantized context: the context plan's tables and its one device step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockNumbering:
    """How a call numbers the slots of the host's blocks.

    Attributes:
        block_slots: slots in a block.
        block_stride: slot numbers from one block's start to the next one's; larger where records of other layers lie
            between two blocks and are numbered too.
        num_slots: slots of the cache, as the call numbers them.
    """

    block_slots: int
    block_stride: int
    num_slots: int

    @property
    def num_blocks(self) -> int:
        """Blocks that start inside the cache; the last one need not be followed by its gap."""
        return -(-self.num_slots // self.block_stride)


@dataclass(frozen=True, eq=False)
class ContextTables:
    """Where each block of some requests' contexts lies in the dequantized rows.

    Attributes:
        slots: (num_blocks, block_slots) int32; the slot of every row, in row order: the gather's `topk_indices`.
        row_of_block: (blocks in the cache,) int32; first row of a block, -1 where no context holds it.
        numbering: how slots follow from blocks.
    """

    slots: torch.Tensor
    row_of_block: torch.Tensor
    numbering: BlockNumbering


def build_tables(block_table: torch.Tensor, blocks: Sequence[int], numbering: BlockNumbering) -> ContextTables:
    """Tables for some requests' contexts, built on the device without reading it.

    Args:
        block_table: (num_requests, max_blocks) int32, the block numbers of each request.
        blocks: blocks of each request's context (host-side; an upper bound will do).
        numbering: of the call's cache.
    """
    ids = torch.cat([block_table[request, :count] for request, count in enumerate(blocks)])
    # What a block table holds past a context's end is anybody's number; it must only stay inside the cache.
    ids = ids.clamp(0, numbering.num_blocks - 1)
    positions = torch.arange(numbering.block_slots, dtype=torch.int32, device=ids.device)
    slots = ids.unsqueeze(1) * numbering.block_stride + positions
    rows = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device) * numbering.block_slots
    row_of_block = torch.full((numbering.num_blocks,), -1, dtype=torch.int32, device=ids.device)
    # Requests that share a prefix list a block twice, with equal contents; the later row is taken, always.
    row_of_block.scatter_reduce_(0, ids.long(), rows, "amax")
    return ContextTables(slots, row_of_block, numbering)


def remap_slots(topk_indices: torch.Tensor, tables: ContextTables, out: torch.Tensor, lost: torch.Tensor) -> None:
    """Writes the row of every selected slot: on accelerators in one Triton launch, elsewhere in PyTorch.

    Args:
        topk_indices: (num_tokens, topk) int32, contiguous; outside the cache is unfilled.
        tables: of the contexts that the slots belong to.
        out: (num_tokens, topk) int32, contiguous; the row, -1 where unfilled.
        lost: (1,) int64; gets added the filled entries that no context holds, whose rows are missing in attention.
            None are expected: the host's lengths or its block table were wrong.
    """
    if topk_indices.device.type == "cuda":
        from hyv4_kvdequant.plans.remap_triton import remap_slots_triton

        remap_slots_triton(topk_indices, tables.row_of_block, out, lost, **vars(tables.numbering))
    else:
        remap_slots_torch(topk_indices, tables, out, lost)


def remap_slots_torch(topk_indices: torch.Tensor, tables: ContextTables, out: torch.Tensor, lost: torch.Tensor) -> None:
    """`remap_slots` in PyTorch, on any device."""
    numbering = tables.numbering
    filled = (topk_indices >= 0) & (topk_indices < numbering.num_slots)
    readable = torch.where(filled, topk_indices, 0)
    position = readable % numbering.block_stride
    first_row = tables.row_of_block[(readable // numbering.block_stride).long()]
    found = filled & (first_row >= 0) & (position < numbering.block_slots)
    out.copy_(torch.where(found, first_row + position, -1))
    lost += (filled & ~found).sum()
