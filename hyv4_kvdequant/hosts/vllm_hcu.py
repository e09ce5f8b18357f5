"""vllm_hcu, Hygon's plugin: everything that depends on its code.

Two kinds of revision exist (read from its public repository), told apart by what `vllm_hcu.models.hy_v4.hcu_sparse`
holds:

* without a gate of its own: `HYV4FlashMLASparseImpl._fp8_flash_mla_kernel`, the seam of mainline vLLM; its
  `_bf16_flash_mla_kernel` returns the output alone, so there is no LSE and no decode context parallelism;
* with one: the module imports by name, and calls, the function
  `gather_dequantize_fp8_ds_mla_cache(kv_cache, topk_indices, kv_lora_rank, qk_rope_head_dim, tokens_per_request=1,
  reuse_state=None, allow_mapping_reuse=False, mapping_reuse_group_size=1) -> (compact_kv, compact_indices)`.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import torch

from hyv4_kvdequant.contract import FP8_DS_MLA, HostError, InvalidCallError, Target
from hyv4_kvdequant.gather import GatherResult, gather_dequantize
from hyv4_kvdequant.hosts import vllm_mainline
from hyv4_kvdequant.hosts.hooking import check_callable, find_class, find_revision, on_import, wrap
from hyv4_kvdequant.hosts.revisions import Revision
from hyv4_kvdequant.selector import select_backend
from hyv4_kvdequant.settings import GATE, Settings, load_settings, load_settings_of, variable_name
from hyv4_kvdequant.versions import installed_version

MODULE = "vllm_hcu.models.hy_v4.hcu_sparse"
IMPL_CLASS = "HYV4FlashMLASparseImpl"
# What mainline had when these revisions were made; `topk_length` of vLLM 0.34.0 has not been seen in any of them.
REVISIONS = (
    Revision(
        "vllm_hcu without a gate of its own",
        {"_fp8_flash_mla_kernel": "self, q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata"},
    ),
)
FUNCTION = "gather_dequantize_fp8_ds_mla_cache"
FUNCTION_PARAMETERS = ("kv_cache", "topk_indices", "kv_lora_rank", "qk_rope_head_dim", "tokens_per_request")
REUSE_PARAMETERS = ("reuse_state", "allow_mapping_reuse", "mapping_reuse_group_size")


def install() -> None:
    """Hooks the module, whenever it is imported."""
    on_import(MODULE, hook)


def hook(module: ModuleType) -> None:
    """Takes the seam that this revision has; HostError when it has neither."""
    if hasattr(module, FUNCTION):
        _check_function(module)
        _check_settings(module)
        setattr(module, FUNCTION, gather_for_hcu)
        if hasattr(module, IMPL_CLASS):
            wrap(getattr(module, IMPL_CLASS), "__init__", _check_backend)
        return
    owner = find_class(module, IMPL_CLASS)
    check_callable(module, owner, "_bf16_flash_mla_kernel", 4)
    find_revision(module, owner, REVISIONS, f"vllm_hcu {installed_version('vllm-hcu')}")
    wrap(owner, "__init__", _after_init)
    wrap(owner, "_fp8_flash_mla_kernel", _replace_kernel)


def _check_function(module: ModuleType) -> None:
    given = tuple(inspect.signature(getattr(module, FUNCTION)).parameters)
    known = (*FUNCTION_PARAMETERS, *REUSE_PARAMETERS)
    if given != known[: len(given)] or len(given) < len(FUNCTION_PARAMETERS):
        raise HostError(
            f"{GATE} is on, but {module.__name__}.{FUNCTION} takes ({', '.join(given)}), expected ({', '.join(known)}) "
            f"or its first {len(FUNCTION_PARAMETERS)}.\nWhat to do: upgrade hyv4-kvdequant, or unset {GATE}."
        )


def _check_settings(module: ModuleType) -> None:
    settings = load_settings()
    asked = [name for name in ("shadow", "trace", "trace_on_mismatch") if getattr(settings, name)]
    if asked:
        raise HostError(
            f"{', '.join(map(variable_name, asked))} cannot be honoured: this revision of {module.__name__} takes its "
            "rows from a function and goes on with them itself, so nothing can be compared or recorded beside it.\n"
            "What to do: unset it, and compare backends with `hyv4-kvdequant ab replay`."
        )


def _check_backend(wrapped: Any, impl: Any, args: Any, kwargs: Any) -> None:
    """A backend that cannot be had on the worker's device stops the start-up, not the first token."""
    wrapped(*args, **kwargs)
    _check_additional_config(type(impl).__module__)
    # Without the buffer: hosts build their layers with the accelerator as PyTorch's default device.
    buffer = getattr(impl, "topk_indices_buffer", None)
    select_backend(Target.detect(torch.get_default_device() if buffer is None else buffer.device))


def _check_additional_config(module: str) -> None:
    from vllm.config import get_current_vllm_config_or_none

    settings = load_settings_of(getattr(get_current_vllm_config_or_none(), "additional_config", None))
    asked = [field for field in Settings.model_fields if settings.source(field).endswith("--additional-config")]
    if asked:
        raise HostError(
            f"{', '.join(asked)} in --additional-config cannot be honoured: this revision of {module} takes its rows "
            "from a function that is called without vLLM's configuration.\n"
            f"What to do: set {', '.join(map(variable_name, asked))} instead."
        )


# --- revisions without a gate: the kernel call ---


def _after_init(wrapped: Any, impl: Any, args: Any, kwargs: Any) -> None:
    vllm_mainline.init_layer(wrapped, impl, args, kwargs)
    if getattr(impl, "dcp_world_size", 1) > 1:
        raise HostError(
            f"{GATE} is on together with decode context parallelism, which needs the log-sum-exp of every call; "
            "vllm_hcu's BF16 kernel does not return it.\nWhat to do: leave out decode context parallelism, or unset "
            f"{GATE}."
        )


def _replace_kernel(wrapped: Any, impl: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    def attention(
        query: torch.Tensor, compact_kv: torch.Tensor, compact_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return impl._bf16_flash_mla_kernel(query, compact_kv, compact_indices), None

    return vllm_mainline.replace_kernel(impl, args, kwargs, attention)


# --- revisions with a gate: the gather function ---


def gather_for_hcu(  # noqa: PLR0917 - the host's signature
    kv_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    tokens_per_request: int = 1,
    reuse_state: Any = None,
    allow_mapping_reuse: bool = False,
    mapping_reuse_group_size: int = 1,
) -> GatherResult:
    """The host's gather function, served by the backend that the settings choose.

    Args:
        kv_cache, topk_indices, kv_lora_rank, qk_rope_head_dim, tokens_per_request: as
            `gather_dequantize_fp8_ds_mla_cache`.
        reuse_state: the host's object of a group of layers that share an indexer; its `compact_indices`
            (max_tokens, topk) int32 receives the mapping, its `dedup_key` says what the mapping was made for.
        allow_mapping_reuse: this layer follows one that made the mapping.
        mapping_reuse_group_size: request width for which a mapping may be reused; 1 forbids it.

    This function returns the whole buffer, so the host's step cannot be cut into chunks here: the buffer is
    allocated a call, as the host's own function does, and is not bounded by the workspace setting.

    Raises:
        InvalidCallError: as `gather_dequantize`.
    """
    expected = (FP8_DS_MLA.nope_dim, FP8_DS_MLA.rope_dim)
    if (kv_lora_rank, qk_rope_head_dim) != expected:
        raise InvalidCallError(
            f"(kv_lora_rank, qk_rope_head_dim) is {(kv_lora_rank, qk_rope_head_dim)}; {FP8_DS_MLA.name} has {expected}."
        )
    slots = topk_indices.to(torch.int32).contiguous()
    indices = None if reuse_state is None else reuse_state.compact_indices[: slots.shape[0]]
    key = (slots.shape[0], kv_cache.numel(), tokens_per_request)
    eligible = reuse_state is not None and mapping_reuse_group_size == tokens_per_request > 1
    result = gather_dequantize(
        kv_cache,
        slots,
        tokens_per_request=tokens_per_request,
        compact_indices=indices,
        reuse_compact_indices=eligible and allow_mapping_reuse and reuse_state.dedup_key == key,
    )
    if reuse_state is not None:
        reuse_state.dedup_key = key if eligible else None
    return result
