"""The gather call: validate, allocate what the caller did not bring, and hand one `GatherCall` to a backend."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hyv4_kvdequant.contract import FP8_DS_MLA, GatherCall, GatherDequantBackend, InvalidCallError, RecordLayout, Target
from hyv4_kvdequant.selector import get_backend, select_backend
from hyv4_kvdequant.validation import check_values, validate_cache, validate_call, validate_slots


class GatherResult(NamedTuple):
    """The two outputs of a gather call.

    Attributes:
        compact_kv: (num_tokens * topk, row_dim) bf16, one dequantized record a row.
        compact_indices: (num_tokens, topk) int32, the row of each selected slot, -1 where unfilled.
    """

    compact_kv: torch.Tensor
    compact_indices: torch.Tensor


def gather_dequantize(
    kv_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    *,
    backend: GatherDequantBackend | str | None = None,
    layout: RecordLayout = FP8_DS_MLA,
    tokens_per_request: int = 1,
    compact_kv: torch.Tensor | None = None,
    compact_indices: torch.Tensor | None = None,
    reuse_compact_indices: bool = False,
    check_indices: bool = False,
) -> GatherResult:
    """Gathers the selected slots of a paged fp8 cache and dequantizes them to BF16.

    Args:
        kv_cache: (num_blocks, block_size, row_bytes) or (num_slots, row_bytes), uint8 or the layout's fp8 dtype;
            records are contiguous and adjacent in a block, blocks may have gaps between them. Never copied.
        topk_indices: (num_tokens, topk) int32, contiguous; a slot outside [0, num_slots) is unfilled.
        backend: an instance, a registered name, or None for what the settings choose.
        layout: the cache's record.
        tokens_per_request: request width; rows of one request are adjacent and it divides num_tokens.
        compact_kv: (num_tokens * topk, row_dim) bf16 to write into; allocated when None.
        compact_indices: (num_tokens, topk) int32 to write into; allocated when None.
        reuse_compact_indices: `compact_indices` holds the mapping that the same backend wrote for equal
            `topk_indices` (a layer that shares its indexer), so the mapping work may be skipped.
        check_indices: also look at the values: raise where a slot is below -1 or past the cache. This copies
            a flag to the host and must not be used while a graph is captured.

    Returns:
        GatherResult(compact_kv, compact_indices); the tensors passed in, where they were.

    Raises:
        InvalidCallError: an argument breaks the contract; the message names it, what it was and what is expected.
        BackendError: the backend cannot be had (see `select_backend`).
    """
    blocks = validate_cache(kv_cache, layout)
    validate_slots(topk_indices, blocks, tokens_per_request)
    if reuse_compact_indices and compact_indices is None:
        raise InvalidCallError(
            "reuse_compact_indices=True needs compact_indices, the mapping to reuse; it was None. "
            "Pass the compact_indices of the earlier call, or leave reuse_compact_indices out."
        )
    num_tokens, topk = topk_indices.shape
    device = topk_indices.device
    if compact_kv is None:
        compact_kv = torch.empty((num_tokens * topk, layout.row_dim), dtype=torch.bfloat16, device=device)
    if compact_indices is None:
        compact_indices = torch.empty((num_tokens, topk), dtype=torch.int32, device=device)
    call = GatherCall(
        blocks, topk_indices, compact_kv, compact_indices, layout, tokens_per_request, reuse_compact_indices
    )
    validate_call(call)
    if check_indices:
        check_values(call)
    run_call(_resolve(backend, call), call)
    return GatherResult(compact_kv, compact_indices)


def run_call(backend: GatherDequantBackend, call: GatherCall) -> None:
    """Runs a validated call: settles the empty cases and sets only the fields that the backend's features admit."""
    if call.topk_indices.numel() == 0:
        return
    if call.num_slots == 0:
        call.compact_kv.zero_()
        call.compact_indices.fill_(-1)
        return
    features = backend.features
    width = call.tokens_per_request if features.request_dedup else 1
    reuse = call.reuse_compact_indices and features.mapping_reuse
    if (width, reuse) != (call.tokens_per_request, call.reuse_compact_indices):
        call = GatherCall(
            call.kv_cache, call.topk_indices, call.compact_kv, call.compact_indices, call.layout, width, reuse
        )
    backend.gather_dequant(call)


def _resolve(backend: GatherDequantBackend | str | None, call: GatherCall) -> GatherDequantBackend:
    if isinstance(backend, GatherDequantBackend):
        return backend
    stride = call.kv_cache.stride(0)
    target = Target.detect(
        call.kv_cache.device,
        call.layout,
        block_size=call.block_size,
        topk=call.topk,
        packed=stride == call.block_size * call.layout.row_bytes or call.kv_cache.shape[0] <= 1,
    )
    return select_backend(target) if backend is None else get_backend(backend, target)


def gather_dequantize_fp8_ds_mla_cache(
    kv_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    tokens_per_request: int = 1,
) -> GatherResult:
    """`gather_dequantize` under the name and signature that public hosts already call.

    Args:
        kv_cache, topk_indices, tokens_per_request: as `gather_dequantize`.
        kv_lora_rank: NoPE values in a record; must be the record's 512.
        qk_rope_head_dim: RoPE values in a record; must be the record's 64.

    Raises:
        InvalidCallError: the two sizes are not those of `fp8_ds_mla`, or as `gather_dequantize`.
    """
    expected = (FP8_DS_MLA.nope_dim, FP8_DS_MLA.rope_dim)
    if (kv_lora_rank, qk_rope_head_dim) != expected:
        raise InvalidCallError(
            f"(kv_lora_rank, qk_rope_head_dim) is {(kv_lora_rank, qk_rope_head_dim)}; the record "
            f"{FP8_DS_MLA.name} holds {expected}. Only this record is read by this function."
        )
    return gather_dequantize(kv_cache, topk_indices, tokens_per_request=tokens_per_request)
