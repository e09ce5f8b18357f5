"""Ragged batches over a paged cache, as a scheduler makes them, for the real attention class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import harness
import torch

from hyv4_kvdequant.reference import write_cache


@dataclass
class RaggedBatch:
    """What `_forward_fp8_kv_mixed_batch` is given, and its metadata.

    Attributes:
        query: (num_tokens, heads, 576) bf16.
        kv_cache: (num_pages, 64, 656) uint8.
        logical: (num_tokens, topk) int32, positions in a request's own context, -1 where unfilled.
        metadata: the step's metadata, with the batch's sizes.
    """

    query: torch.Tensor
    kv_cache: torch.Tensor
    logical: torch.Tensor
    metadata: Any

    def without_sizes(self) -> Any:
        """The same metadata from a host that knows no sizes on the CPU: the plan is per slot."""
        return harness.mixed_metadata(self.metadata.block_table, self.query_lens)

    @property
    def query_lens(self) -> list[int]:
        return list(self.metadata.hyv4_kvdequant_lens[0])


def make_cache(pages: int, generator: torch.Generator) -> torch.Tensor:
    """A cache written by the reference writer from normal activations: (pages, 64, 656) uint8."""
    device = harness.DEVICE
    cache = torch.zeros(pages, 64, 656, dtype=torch.uint8, device=device)
    for start in range(0, pages * 64, 65536):
        slots = torch.arange(start, min(start + 65536, pages * 64), device=device)
        kv = torch.randn(len(slots), 512, generator=generator, device=device).bfloat16()
        pe = torch.randn(len(slots), 64, generator=generator, device=device).bfloat16()
        write_cache(kv, pe, cache, slots)
    return cache


def make_batch(
    lens: list[tuple[int, int]], *, topk: int, shared_prefix: int = 0, seed: int = 0, spare_pages: int = 8
) -> RaggedBatch:
    """Requests of (query tokens, context length); each row selects from what its position may see.

    Args:
        lens: query tokens and context length of each request; the queries are the context's last tokens.
        topk: selected slots a token.
        shared_prefix: pages that all requests have in common.
        seed: of everything drawn.
        spare_pages: pages that belong to nobody.
    """
    device = harness.DEVICE
    generator = torch.Generator(device).manual_seed(seed)
    blocks = [-(-context // 64) for _, context in lens]
    pages = sum(blocks) + spare_pages
    order = torch.randperm(pages, generator=generator, device=device).int()
    table = torch.zeros(len(lens), max(blocks), dtype=torch.int32, device=device)
    taken = 0
    for request, count in enumerate(blocks):
        table[request, :count] = order[taken : taken + count]
        taken += count
    common = min(shared_prefix, *blocks)
    table[:, :common] = table[0, :common].clone()
    rows = []
    for query, context in lens:
        seen = torch.arange(context - query + 1, context + 1, device=device).unsqueeze(1)
        drawn = (torch.rand(query, topk, generator=generator, device=device) * seen).int()
        unfilled = torch.arange(topk, device=device).unsqueeze(0) >= seen
        rows.append(torch.where(unfilled, -1, drawn.clamp(max=context - 1)))
    logical = torch.cat(rows).int().contiguous()
    query = torch.randn(len(logical), harness.NUM_HEADS, 576, generator=generator, device=device).bfloat16()
    sizes = ([q for q, _ in lens], [context for _, context in lens])
    metadata = harness.mixed_metadata(table, sizes[0], hyv4_kvdequant_lens=sizes)
    return RaggedBatch(query, make_cache(pages, generator), logical, metadata)


def forward(impl: Any, batch: RaggedBatch, metadata: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The class's own mixed-batch path; returns output and LSE."""
    impl.need_to_return_lse_for_decode = True
    return impl._forward_fp8_kv_mixed_batch(
        batch.query, batch.kv_cache, batch.logical.clone(), batch.metadata if metadata is None else metadata
    )
