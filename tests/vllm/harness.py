"""The real vLLM attention class on a CPU, with one thing replaced: the FlashMLA op, at the op boundary.

`torch.ops._flashmla_C.sparse_prefill_fwd` (which needs a GPU) becomes the reference attention; vLLM's wrapper around
it, the class, its index conversion (Triton's interpreter) and its workspace manager are vLLM's own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from hyv4_kvdequant.reference import sparse_attention

# vLLM keeps Triton where no device is visible yet only if the variable is set and empty.
if not torch.cuda.is_available():
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("TRITON_INTERPRET", "1")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

NUM_HEADS = 8
_LIBRARY = torch.library.Library("_flashmla_C", "FRAGMENT")


@dataclass
class OpLog:
    """What the replaced op was called with."""

    tokens: list[int] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


LOG = OpLog()


def define_flashmla_op() -> None:
    """Registers the reference attention under the FlashMLA op's name and schema."""
    if DEVICE.type == "cuda" or hasattr(torch.ops._flashmla_C, "sparse_prefill_fwd"):
        return
    _LIBRARY.define(
        "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink, "
        "Tensor? topk_length, Tensor? out) -> (Tensor, Tensor, Tensor)"
    )

    def forward(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out):  # type: ignore[no-untyped-def]  # noqa: PLR0917
        assert topk_length is None, "the intercept leaves validity to the -1 entries"
        LOG.tokens.append(q.shape[0])
        LOG.heads.append(q.shape[1])
        LOG.rows.append(kv.shape[0])
        result = sparse_attention(q, kv[:, 0], indices[:, 0], sm_scale, attn_sink, nope_dim=d_v)
        return result.out, torch.zeros_like(result.lse), result.lse

    _LIBRARY.impl("sparse_prefill_fwd", forward, "CPU")


def use_vllms_flashmla_wrapper(*modules: Any) -> None:
    """Without a GPU vLLM binds a function that raises; bind its real wrapper, which calls the op defined above."""
    if DEVICE.type == "cuda":
        return
    # The compiled module does nothing but register the op, and does not load without a GPU's driver.
    sys.modules.setdefault("vllm._flashmla_C", ModuleType("vllm._flashmla_C"))
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_sparse_fwd

    for module in modules:
        module.flash_mla_sparse_fwd = flash_mla_sparse_fwd


def _device_config(**fields: Any) -> Any:
    from vllm.config import DeviceConfig, VllmConfig

    return VllmConfig(device_config=DeviceConfig(device=DEVICE.type), **fields)


def make_config(
    additional_config: dict[str, Any] | None = None, *, max_tokens: int = 64, max_model_len: int = 2048
) -> Any:
    """A real VllmConfig; its model config, which needs a checkpoint, is reduced to what attention reads."""
    config = _device_config(additional_config=additional_config or {})
    config.scheduler_config.max_num_batched_tokens = max_tokens
    object.__setattr__(config, "model_config", SimpleNamespace(max_model_len=max_model_len))
    if getattr(config.attention_config, "sparse_mla_prefill_workspace_factor", 0) is None:
        config.attention_config.sparse_mla_prefill_workspace_factor = 1
    return config


def start_process() -> None:
    """What a worker process has done before it builds layers: distributed state and the workspace manager."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.v1.worker import workspace

    if not torch.distributed.is_initialized():
        store = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
        with set_current_vllm_config(_device_config()):
            parallel_state.init_distributed_environment(1, 0, f"file://{store.name}", 0, "gloo")
            parallel_state.initialize_model_parallel(1)
    if DEVICE.type == "cpu":
        _answer_for_the_accelerator()
        _let_the_interpreter_store_under_integer_masks()
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(DEVICE)


def _answer_for_the_accelerator() -> None:
    """What vLLM asks of the accelerator while layers are built; without one PyTorch and vLLM's platform raise."""
    from vllm.platforms import current_platform

    torch.accelerator.empty_cache = lambda: None
    # From 0.34.0 on: the current device and its multiprocessors, which only size the BF16 kernel's launch.
    torch.accelerator.current_device_index = lambda: 0
    type(current_platform).num_compute_units = classmethod(lambda cls, device_id=0: 1)


def _let_the_interpreter_store_under_integer_masks() -> None:
    """Triton's compiler takes any integer as a mask (vLLM 0.34.0 stores under an int32), its interpreter bits only."""
    from triton.runtime.interpreter import InterpreterBuilder

    store = InterpreterBuilder.create_masked_store
    if store.__name__ == "store_under_bits":
        return

    def store_under_bits(self, ptrs, value, mask, cache_policy):  # type: ignore[no-untyped-def]
        mask.data = mask.data.astype(bool)
        return store(self, ptrs, value, mask, cache_policy)

    InterpreterBuilder.create_masked_store = store_under_bits


def build_impl(
    config: Any,
    *,
    topk: int,
    sinks: torch.Tensor | None,
    softmax_scale: float = 1 / 24,
    heads: int = NUM_HEADS,
    kv_cache_dtype: str = "fp8_ds_mla",
) -> Any:
    """A real HYV4FlashMLASparseImpl, built as vLLM builds it."""
    from vllm.config import set_current_vllm_config
    from vllm.models.hy_v4.nvidia import flashmla_sparse

    use_vllms_flashmla_wrapper(flashmla_sparse)
    buffer = torch.full((config.scheduler_config.max_num_batched_tokens, topk), -1, dtype=torch.int32, device=DEVICE)
    extra = {} if sinks is None else {"sinks": sinks}
    with set_current_vllm_config(config):
        return flashmla_sparse.HYV4FlashMLASparseImpl(
            heads,
            576,
            softmax_scale,
            1,
            None,
            None,
            kv_cache_dtype,
            None,
            "decoder",
            None,
            topk_indices_buffer=buffer,
            indexer=SimpleNamespace(topk_indices_buffer=buffer),
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            qk_head_dim=192,
            v_head_dim=128,
            kv_b_proj=None,
            **extra,
        )


def mixed_metadata(block_table: torch.Tensor, query_lens: list[int], **more: Any) -> Any:
    """Attention metadata of a mixed batch: request r has query_lens[r] rows, block_table (num_reqs, blocks) int32."""
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadata

    request_ids = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens)).int().to(DEVICE)
    kernel = FlashMLASparseMetadata.FP8KernelMetadata(None, None, None)
    return SimpleNamespace(
        num_reqs=len(query_lens),
        max_query_len=max(query_lens),
        num_actual_tokens=sum(query_lens),
        num_decode_tokens=0,
        block_table=block_table,
        req_id_per_token=request_ids,
        block_size=64,
        fp8_extra_metadata=kernel,
        cp_kv_cache_interleave_size=1,
        **more,
    )
