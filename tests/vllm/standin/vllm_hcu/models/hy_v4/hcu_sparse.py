# ruff: noqa: PLR0917 - the host's own signatures
"""A stand-in for vllm_hcu's module of this name, which is on no package index and needs an HCU.

It has the names, signatures and return shapes that Hygon's public repository shows, and nothing of its code.
VLLM_HCU_STANDIN picks the revision: `kernel` (no gate of its own), `function` (own gate, a gather function with
reuse), `old_function` (own gate, without reuse), `neither`.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch

from hyv4_kvdequant.reference import sparse_attention

REVISION = os.environ.get("VLLM_HCU_STANDIN", "kernel")

if REVISION == "kernel":

    class HYV4FlashMLASparseImpl:
        """The attention object as far as the intercept sees it."""

        def __init__(
            self,
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            *,
            topk_indices_buffer,
            sinks=None,
            dcp_world_size=1,
        ):
            self.softmax_scale, self.sinks, self.dcp_world_size = scale, sinks, dcp_world_size
            self.topk_indices_buffer = topk_indices_buffer
            self.kv_lora_rank = 512

        def _fp8_flash_mla_kernel(self, q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata):
            raise AssertionError("the host's own fp8 kernel ran")

        def _bf16_flash_mla_kernel(self, q, kv_c_and_k_pe_cache, topk_indices, topk_length=None):
            rows = kv_c_and_k_pe_cache.view(-1, 576)
            return sparse_attention(q, rows, topk_indices, self.softmax_scale, self.sinks).out


class LightOpKVReuseState(SimpleNamespace):
    """What a group of layers that share an indexer keeps: `compact_indices` and `dedup_key`."""


if REVISION in ("function", "old_function"):

    class HYV4FlashMLASparseImpl:
        """The attention object of a revision whose step calls the gather function."""

        def __init__(self, *, topk_indices_buffer):
            self.topk_indices_buffer = topk_indices_buffer


if REVISION == "function":

    def gather_dequantize_fp8_ds_mla_cache(
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        tokens_per_request: int = 1,
        reuse_state: LightOpKVReuseState | None = None,
        allow_mapping_reuse: bool = False,
        mapping_reuse_group_size: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("the host's own gather ran")


if REVISION == "old_function":

    def gather_dequantize_fp8_ds_mla_cache(
        kv_cache, topk_indices, kv_lora_rank, qk_rope_head_dim, tokens_per_request=1
    ):
        raise AssertionError("the host's own gather ran")


def forward(kv_cache: torch.Tensor, topk_indices: torch.Tensor, *arguments: object, **reuse: object) -> object:
    """Calls the gather function by the name it has in this module, as the host does."""
    return gather_dequantize_fp8_ds_mla_cache(kv_cache, topk_indices, 512, 64, *arguments, **reuse)
