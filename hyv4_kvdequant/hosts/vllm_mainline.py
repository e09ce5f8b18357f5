"""Mainline vLLM 0.29.0 to 0.34.0: everything that depends on its code.

Read beside `vllm/models/hy_v4/nvidia/flashmla_sparse.py` (the class we intercept), `.../attention.py` (which builds
it) and `vllm/v1/attention/backends/mla/flashmla_sparse.py` (its base). There, with an fp8 cache, every call of the
fp8 kernel goes through one method:

    _fp8_flash_mla_kernel(self, q, kv_c_and_k_pe_cache, topk_indices, kernel_metadata, topk_length=None) -> (out, lse)

    q             (b, s, heads, 576) bf16: (1, T, ...) in mixed batch, (num_decodes, query_len, ...) in decode
    topk_indices  (b, s, topk) int32, global slots, -1 where unfilled
    topk_length   from 0.34.0: (b,) int32 on the device; of entries from there on nothing is read. vLLM gives it under
                  decode context parallelism on sm_100, where a rank's slots are packed to the front of each row
    out           (b, s, heads, 512) bf16
    lse           (b, heads, s) fp32, natural log, without the sink
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from hyv4_kvdequant.contract import ConfigurationError, HostError, InvalidCallError
from hyv4_kvdequant.hosts.hooking import find_class, find_revision, on_import, wrap
from hyv4_kvdequant.hosts.intercept import AttentionCall, Batch, HostFacts, Intercept, SparseAttention
from hyv4_kvdequant.hosts.vllm_revisions import BUILDER_REVISIONS, IMPL_CLASS, IMPL_MODULE, REVISIONS
from hyv4_kvdequant.plans.choice import BatchSizes
from hyv4_kvdequant.settings import GATE, load_settings_of
from hyv4_kvdequant.versions import installed_version

BACKEND_CLASS = "HYV4FlashMLASparseBackend"
ATTENTION_MODULE = "vllm.models.hy_v4.nvidia.attention"
ATTENTION_CLASS = "HYV4MLAAttention"

NOPE_DIM = 512  # values of an output row, the fp8 kernel's head_dim_v
PAGE_SIZE = 64  # slots; what the fp8 kernel is given, so what backends are asked for. A call's own pages decide.
SERVED_CACHE_DTYPES = ("fp8_ds_mla", "fp8")  # the second is vLLM's alias, until it makes it the first

_STATE = "_hyv4_kvdequant_layer"


def install() -> None:
    """Hooks the two modules, whenever they are imported."""
    on_import(IMPL_MODULE, hook_impl)
    on_import(ATTENTION_MODULE, hook_attention)


def hook_impl(module: ModuleType) -> None:
    """Replaces the fp8 kernel call of the class; HostError when the class is not the one we know."""
    owner = find_class(module, IMPL_CLASS)
    find_revision(module, owner, REVISIONS, f"vLLM {installed_version('vllm')}")
    wrap(owner, "__init__", _init_mainline_layer)
    wrap(owner, "forward_mqa", _remember_layer)
    wrap(owner, "_forward_fp8_kv_mixed_batch", _remember_batch)
    wrap(owner, "_fp8_flash_mla_kernel", _replace_kernel)
    backend = find_class(module, BACKEND_CLASS)
    _with_sizes(module, backend)
    # The context plan cuts a batch by the query lengths that vLLM has on the CPU. vLLM then refuses, with its own
    # message, what makes the device's lengths others (adaptive verification trims drafts there).
    backend.supports_device_cpu_query_lens_mismatch = classmethod(lambda cls: False)


def hook_attention(module: ModuleType) -> None:
    """Makes a layer that would attend without our class stop the start-up, instead of serving unintercepted."""
    owner = find_class(module, ATTENTION_CLASS)
    wrap(owner, "__init__", _check_layer)


# --- building layers ---


@dataclass
class LayerState:
    """What we keep with one attention object."""

    intercept: Intercept
    name: str
    shares_indices: bool = False


_intercepts: dict[tuple[object, ...], Intercept] = {}
_layer_count = 0


def init_layer(wrapped: Any, impl: Any, args: Any, kwargs: Any) -> None:
    """Builds an attention object and makes it ready; raises what would be wrong while serving."""
    cache_dtype = _argument("kv_cache_dtype", 6, args, kwargs)
    if cache_dtype not in SERVED_CACHE_DTYPES:
        raise ConfigurationError(
            f"{GATE} is on, but the KV cache dtype is {cache_dtype!r}; the intercept dequantizes 'fp8_ds_mla' caches "
            f"only.\nWhat to do: pass --kv-cache-dtype fp8_ds_mla, or unset {GATE}."
        )
    wrapped(*args, **kwargs)
    layer_state(impl)


def _init_mainline_layer(wrapped: Any, impl: Any, args: Any, kwargs: Any) -> None:
    _refuse_sinks_under_dcp(kwargs.get("sinks"))
    init_layer(wrapped, impl, args, kwargs)


def _refuse_sinks_under_dcp(sinks: torch.Tensor | None) -> None:
    ranks = _vllm_config().parallel_config.decode_context_parallel_size
    if sinks is not None and ranks > 1:
        raise HostError(
            f"{GATE} is on with decode context parallelism (decode_context_parallel_size {ranks}), and this layer has "
            "attention sinks. Query heads are gathered from all ranks there while HY V4's sinks stay local, so vLLM "
            "itself raises at the first request.\nWhat to do: leave out --decode-context-parallel-size."
        )


def _argument(name: str, position: int, args: Any, kwargs: Any) -> Any:
    return kwargs[name] if name in kwargs else args[position]


def layer_state(impl: Any) -> LayerState:
    """The state of an attention object; made on first use: its backend resolved and the workspace reserved."""
    state = getattr(impl, _STATE, None)
    if state is None:
        state = _make_state(impl)
        setattr(impl, _STATE, state)
    return state


def _make_state(impl: Any) -> LayerState:
    global _layer_count  # noqa: PLW0603
    config = _vllm_config()
    settings = load_settings_of(getattr(config, "additional_config", None))
    facts = _host_facts(impl, config)
    key = (settings.model_dump_json(), facts)
    if key not in _intercepts:
        _intercepts[key] = Intercept(settings, facts)
    intercept = _intercepts[key]
    _reserve(impl, intercept.workspace_bytes)
    _layer_count += 1
    return LayerState(intercept, f"layer.{_layer_count - 1}")


def _shares_indices(state: LayerState) -> None:
    state.shares_indices = True
    state.intercept.keep_mappings()


def _vllm_config() -> Any:
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def _host_facts(impl: Any, config: Any) -> HostFacts:
    buffer = impl.topk_indices_buffer
    if buffer is None:
        raise HostError(f"{IMPL_CLASS} was built without a topk_indices_buffer; sparse attention cannot run without.")
    # vLLM's own condition: two options switch micro-batches on.
    if config.parallel_config.use_ubatching:
        raise HostError(
            f"{GATE} is on together with micro-batches ({config.parallel_config.num_ubatches} of them), of which every "
            "further one would need a workspace of its own.\n"
            f"What to do: leave out --enable-dbo and --ubatch-size, or unset {GATE}."
        )
    return HostFacts(
        device=buffer.device,
        topk=buffer.shape[-1],
        block_size=PAGE_SIZE,
        max_tokens=config.scheduler_config.max_num_batched_tokens,
        rank=torch.distributed.get_rank() if torch.distributed.is_initialized() else 0,
        world_size=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        # vLLM gives every engine a short random name, which its workers share.
        run_id=getattr(config, "instance_id", None) or None,
    )


def _check_layer(wrapped: Any, attention: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    if not getattr(attention, "is_sparse", False):
        return
    impl = attention.mla_attn.impl
    state = getattr(impl, _STATE, None)
    if state is None:
        raise HostError(
            f"{GATE} is on, but a sparse layer of HY V4 attends through {type(impl).__module__}.{type(impl).__name__}, "
            f"which the intercept does not serve.\nWhat to do: let vLLM choose {IMPL_CLASS} (attention backend "
            f"FLASHMLA_SPARSE, KV cache dtype fp8_ds_mla), or unset {GATE}."
        )
    state.name = getattr(attention.mla_attn, "layer_name", state.name)
    if getattr(attention, "skip_topk", False):
        _shares_indices(state)


# --- workspace ---


def _host_specs(impl: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """What the host itself takes from the shared workspace while our call is running (its query lies there)."""
    specs = getattr(impl, "workspace_specs", None)
    if specs is not None:
        return list(specs)
    # 0.29.0 keeps views instead of shapes.
    views = [getattr(impl, name, None) for name in ("q_concat_buffer", "prefill_bf16_workspace")]
    return [(tuple(view.shape), view.dtype) for view in views if view is not None]


def _scratch(impl: Any, nbytes: int) -> torch.Tensor:
    from vllm.v1.worker.workspace import current_workspace_manager

    manager = current_workspace_manager()
    views: list[torch.Tensor] = manager.get_simultaneous(*_host_specs(impl), ((nbytes,), torch.uint8))
    return views[-1]


def _reserve(impl: Any, nbytes: int) -> None:
    """Grows vLLM's shared workspace at model load, before the KV cache is sized."""
    from vllm.v1.worker.workspace import current_workspace_manager

    specs = _host_specs(impl)
    views = current_workspace_manager().get_simultaneous(*specs, ((nbytes,), torch.uint8))
    # 0.29.0 holds on to views made before the workspace grew; moving them lets the old memory go.
    for name, view in zip(("q_concat_buffer", "prefill_bf16_workspace"), views[: len(specs)], strict=False):
        if isinstance(getattr(impl, name, None), torch.Tensor):
            setattr(impl, name, view)


# --- batches ---


def _with_sizes(module: ModuleType, backend: type[Any]) -> None:
    """Has the metadata builder of HY V4's attention backend keep the batch's sizes, which it gets on the CPU."""
    builder = backend.get_builder_cls()
    find_revision(module, builder, BUILDER_REVISIONS)

    class SizedBuilder(builder):  # type: ignore[misc,valid-type]
        """vLLM's builder; its metadata also has `hyv4_kvdequant_lens`: query and context lengths of each request."""

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.hyv4_kvdequant_lens = _lens(common_attn_metadata)
            return metadata

    SizedBuilder.__name__, SizedBuilder.__qualname__ = builder.__name__, builder.__qualname__
    backend.get_builder_cls = staticmethod(lambda: SizedBuilder)


def _lens(common: Any) -> tuple[list[int], list[int]] | None:
    """Query lengths, and context lengths (upper bounds), of a batch; None where the host has none on the CPU."""
    bounds = getattr(common, "seq_lens_cpu_upper_bound", None)
    if bounds is None:
        return None
    starts = common.query_start_loc_cpu.tolist()
    return [stop - start for start, stop in pairwise(starts)], bounds.tolist()


def batch_of(impl: Any, metadata: Any, kv_cache: torch.Tensor) -> Batch | None:
    """The batch of a mixed-batch call, from what the metadata holds on the CPU.

    Args:
        impl: the attention object; its DCP size decides how much of a context lies on this rank.
        metadata: the step's FlashMLASparseMetadata.
        kv_cache: (num_blocks, block_size, row_bytes), the layer's cache before it is cut into pages.
    """
    lens = getattr(metadata, "hyv4_kvdequant_lens", None)
    if lens is None:
        return None
    query_lens, context_lens = lens
    block_rows = metadata.block_size
    ranks, interleave = getattr(impl, "dcp_world_size", 1), metadata.cp_kv_cache_interleave_size
    most = metadata.block_table.shape[1]
    blocks = [min(most, -(-(-(-length // (ranks * interleave)) * interleave) // block_rows)) for length in context_lens]
    sizes = BatchSizes(tuple(query_lens), tuple(count * block_rows for count in blocks))
    stride_rows, odd_bytes = divmod(kv_cache.stride(0), kv_cache.shape[-1])
    return Batch(sizes, metadata.block_table, block_rows, None if odd_bytes else stride_rows)


# --- serving ---


@dataclass(frozen=True)
class _Step:
    """What is known around a kernel call: the step's metadata, and the batch where it is a mixed one."""

    metadata: Any = None
    mixed: bool = False
    batch: Batch | None = None


_NO_STEP = _Step()
_step: ContextVar[_Step] = ContextVar("hyv4_kvdequant_step")


def _remember_layer(wrapped: Any, impl: Any, args: Any, kwargs: Any) -> Any:
    state = layer_state(impl)
    name = getattr(_argument("layer", 3, args, kwargs), "layer_name", None)
    if name is not None:
        state.name = name
    return _within(_Step(_argument("attn_metadata", 2, args, kwargs)), wrapped, args, kwargs)


def _remember_batch(wrapped: Any, impl: Any, args: Any, kwargs: Any) -> Any:
    metadata = _argument("attn_metadata", 3, args, kwargs)
    batch = batch_of(impl, metadata, _argument("kv_c_and_k_pe_cache", 1, args, kwargs))
    return _within(_Step(metadata, mixed=True, batch=batch), wrapped, args, kwargs)


def _within(step: _Step, wrapped: Any, args: Any, kwargs: Any) -> Any:
    token = _step.set(step)
    try:
        return wrapped(*args, **kwargs)
    finally:
        _step.reset(token)


def _replace_kernel(wrapped: Any, impl: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return replace_kernel(impl, args, kwargs, impl._bf16_flash_mla_kernel)


def replace_kernel(
    impl: Any, args: Any, kwargs: Any, attention: SparseAttention
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The fp8 kernel call's stand-in: same arguments, same shapes out (see the module's table)."""
    q = _argument("q", 0, args, kwargs)
    batch, length, heads, width = q.shape
    topk_indices = _argument("topk_indices", 2, args, kwargs)
    topk_length = kwargs.get("topk_length", args[4] if len(args) > 4 else None)
    if topk_length is not None:
        topk_indices = within_length(topk_indices, topk_length)
    state, step = layer_state(impl), _step.get(_NO_STEP)
    call = AttentionCall(
        query=q.reshape(batch * length, heads, width),
        kv_cache=_argument("kv_c_and_k_pe_cache", 1, args, kwargs),
        topk_indices=topk_indices.reshape(batch * length, topk_indices.shape[-1]),
        tokens_per_request=_request_width(step, batch, length),
        layer=state.name,
        shares_indices=state.shares_indices,
        step=step.metadata,
        batch=step.batch,
    )
    if batch * length == 0:
        return q.new_empty((batch, length, heads, NOPE_DIM)), q.new_empty((batch, heads, length), dtype=torch.float32)
    out, lse = state.intercept.attend(call, attention, lambda nbytes: _scratch(impl, nbytes))
    lse = None if lse is None else lse.view(batch, length, heads).transpose(1, 2)
    return out.view(batch, length, heads, -1), lse


def within_length(topk_indices: torch.Tensor, topk_length: torch.Tensor) -> torch.Tensor:
    """The indices with every entry from `topk_length` on unfilled; one launch on the device, nothing is read back.

    Args:
        topk_indices: (b, s, topk) int32.
        topk_length: (b,) int32 on the same device; 0 or less leaves nothing, more than topk everything.

    Raises:
        InvalidCallError: `topk_length` has another shape.
    """
    batch, topk = topk_indices.shape[0], topk_indices.shape[-1]
    if topk_length.shape != (batch,):
        raise InvalidCallError(
            f"topk_length is of shape {tuple(topk_length.shape)}; expected ({batch},), one length for each of the "
            f"{batch} batch rows of topk_indices {tuple(topk_indices.shape)}. Pass it as vLLM 0.34.0 does."
        )
    position = torch.arange(topk, dtype=torch.int32, device=topk_indices.device)
    return torch.where(position < topk_length.view(batch, 1, 1), topk_indices, -1)


def _request_width(step: _Step, batch: int, length: int) -> int:
    """Query rows of one request: the decode shape tells; in mixed batch the metadata, if the batch is uniform."""
    if not step.mixed:
        return length
    width: int = step.metadata.max_query_len
    uniform = width > 0 and step.metadata.num_reqs * width == step.metadata.num_actual_tokens
    return width if uniform and length % width == 0 else 1
