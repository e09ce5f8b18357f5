"""Reference attention and cache writer in PyTorch, for people and tests without a GPU. Plain, not fast."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from hyv4_kvdequant.contract import FP8_DS_MLA, InvalidCallError, RecordLayout
from hyv4_kvdequant.records import record_of


class AttentionResult(NamedTuple):
    """Output and log-sum-exp of a sparse attention.

    Attributes:
        out: (num_tokens, num_heads, nope_dim) bf16.
        lse: (num_tokens, num_heads) fp32, natural log, without the sink.
    """

    out: torch.Tensor
    lse: torch.Tensor


def sparse_attention(
    query: torch.Tensor,
    compact_kv: torch.Tensor,
    compact_indices: torch.Tensor,
    softmax_scale: float,
    attn_sink: torch.Tensor | None = None,
    *,
    nope_dim: int = FP8_DS_MLA.nope_dim,
) -> AttentionResult:
    """Sparse MLA attention over dequantized rows, with FlashMLA's conventions (`flash_mla_sparse_fwd`).

    Keys are whole rows, values their first `nope_dim` elements. The sink adds `exp(sink)` to the softmax
    denominator of a head and no value. A token with no filled entry gives output 0 and LSE +inf.

    Args:
        query: (num_tokens, num_heads, row_dim) bf16.
        compact_kv: (num_rows, row_dim) bf16.
        compact_indices: (num_tokens, topk) int32; outside [0, num_rows) is unfilled.
        softmax_scale: factor of the logits.
        attn_sink: (num_heads,) fp32, natural-log logits; None for no sink.
        nope_dim: values in an output row.

    Raises:
        InvalidCallError: shapes do not fit each other.
    """
    fits = query.dim() == 3 and compact_indices.dim() == 2 and query.shape[0] == compact_indices.shape[0]
    if not fits or query.shape[2] != compact_kv.shape[-1]:
        raise InvalidCallError(
            f"query {tuple(query.shape)}, compact_kv {tuple(compact_kv.shape)} and compact_indices "
            f"{tuple(compact_indices.shape)} do not fit; expected (tokens, heads, row_dim), (rows, row_dim) "
            f"and (tokens, topk)."
        )
    out = query.new_zeros((*query.shape[:2], nope_dim), dtype=torch.bfloat16)
    lse = query.new_full(query.shape[:2], torch.inf, dtype=torch.float32)
    for token in range(query.shape[0]):
        entries = compact_indices[token].long()
        rows = compact_kv[entries[(entries >= 0) & (entries < compact_kv.shape[0])]].float()
        if rows.shape[0] == 0:
            continue
        logits = (query[token].float() @ rows.T) * softmax_scale
        token_lse = torch.logsumexp(logits, dim=-1)
        weights = torch.exp(logits - token_lse.unsqueeze(-1))
        token_out = weights @ rows[:, :nope_dim]
        if attn_sink is not None:
            token_out = token_out * torch.sigmoid(token_lse - attn_sink.float()).unsqueeze(-1)
        out[token] = token_out.to(torch.bfloat16)
        lse[token] = token_lse
    return AttentionResult(out, lse)


def write_cache(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: Literal["amax", "power_of_two"] = "amax",
    layout: RecordLayout = FP8_DS_MLA,
) -> None:
    """Quantizes tokens into the cache, in place, as the hosts' writers do (`concat_and_cache_mla`).

    Args:
        kv_c: (num_tokens, nope_dim) bf16 latent.
        k_pe: (num_tokens, rope_dim) bf16 rotary part.
        kv_cache: (num_blocks, block_size, row_bytes) uint8.
        slot_mapping: (num_tokens,) int; the slot of each token, negative for a token that is not stored.
        scale: a tile's scale: `amax` is max|x| / 448 (Hygon's writer); `power_of_two` rounds that up to a power
            of two (vLLM 0.33.0's writer on NVIDIA).
        layout: the cache's record.

    Raises:
        InvalidCallError: a slot is past the cache, or the record has no such rule for its scales.
    """
    record = record_of(layout)
    if scale not in record.scale_rules:
        raise InvalidCallError(f"scale is {scale!r}; expected {' or '.join(map(repr, record.scale_rules))}.")
    block_size = kv_cache.shape[1]
    stored = slot_mapping >= 0
    slots = slot_mapping[stored].long()
    if slots.numel() and int(slots.max()) >= kv_cache.shape[0] * block_size:
        raise InvalidCallError(
            f"slot_mapping has slot {int(slots.max())}; the cache has {kv_cache.shape[0] * block_size}."
        )
    kv_cache[slots // block_size, slots % block_size] = record.encode(kv_c[stored], k_pe[stored], scale)
