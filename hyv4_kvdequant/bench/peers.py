"""What a vLLM that is installed beside us offers for comparison; None where there is none."""

from __future__ import annotations

from collections.abc import Callable

import torch

_PADDED_HEADS = 64


def vllm_upconvert(
    kv_cache: torch.Tensor, block_table: torch.Tensor, rows: torch.Tensor
) -> Callable[[], object] | None:
    """vLLM's `cp_gather_and_upconvert_fp8_kv_cache` of whole contexts into `rows` (num_rows, 576) bf16."""
    if kv_cache.device.type != "cuda":
        return None
    try:
        from vllm import _custom_ops as ops
    except ImportError:
        return None
    requests, each = block_table.shape[0], block_table.shape[1] * kv_cache.shape[1]
    starts = torch.arange(0, requests * each, each, dtype=torch.int32, device=kv_cache.device)
    return lambda: ops.cp_gather_and_upconvert_fp8_kv_cache(kv_cache, rows, block_table, starts, requests)


def flashmla_attention(query: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor) -> Callable[[], object] | None:
    """FlashMLA's BF16 sparse kernel, heads padded as vLLM pads them.

    Args:
        query: (num_tokens, heads, 576) bf16.
        rows: (num_rows, 576) bf16.
        indices: (num_tokens, topk) int32 into `rows`.
    """
    if query.device.type != "cuda":
        return None
    try:
        from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd, is_flashmla_sparse_supported
    except ImportError:
        return None
    if not is_flashmla_sparse_supported()[0]:
        return None
    tokens, heads, width = query.shape
    padded = query.new_zeros((tokens, -(-heads // _PADDED_HEADS) * _PADDED_HEADS, width))
    padded[:, :heads] = query
    return lambda: flash_mla_sparse_fwd(padded, rows.unsqueeze(1), indices.unsqueeze(1), width**-0.5)
