"""The real HYV4FlashMLASparseImpl with the intercept: golden step, shapes, chunks, LSE."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_process")]

GATE = "VLLM_HCU_HYV4_FP8_KV_DEQUANT"
IDENTITY_TABLE = torch.arange(17, dtype=torch.int32).view(1, 17)


def forward_mixed(golden: dict[str, Any], query_lens: list[int] | None = None, **build: Any) -> Any:
    """The class's own `_forward_fp8_kv_mixed_batch` on the golden step: (out, lse as the kernel call returned it)."""
    config = harness.make_config(build.pop("additional_config", None))
    impl = harness.build_impl(config, topk=512, sinks=build.pop("sinks", golden["attn_sink"]))
    impl.need_to_return_lse_for_decode = True
    lens = query_lens or [16]
    metadata = harness.mixed_metadata(IDENTITY_TABLE.expand(len(lens), -1).contiguous(), lens)
    return impl._forward_fp8_kv_mixed_batch(golden["query"], golden["kv_cache"], golden["slots"], metadata)


def assert_golden(golden: dict[str, Any], out: torch.Tensor, lse: torch.Tensor) -> None:
    recorded = golden["bf16_out"].double()
    assert (out.double() - recorded).norm() / recorded.norm() < 2e-3
    filled = golden["bf16_lse"].isfinite()
    assert (lse - golden["bf16_lse"])[filled].abs().max() < 1e-3
    # vLLM's merge identity for a row of which this rank owns nothing.
    assert bool((lse[~filled] == -torch.inf).all())
    assert not out[3].any()


def test_golden_step_through_the_real_mixed_batch_path(golden: dict[str, Any]) -> None:
    harness.LOG.heads.clear()
    out, lse = forward_mixed(golden)
    assert_golden(golden, out, lse)
    assert harness.LOG.heads == [64], "vLLM's own padding of the heads ran"


@pytest.mark.parametrize("query_lens", [[4, 4, 4, 4], [1, 7, 3, 5]])
def test_uniform_and_ragged_batches_give_the_same_bits(golden: dict[str, Any], query_lens: list[int]) -> None:
    out, lse = forward_mixed(golden)
    other_out, other_lse = forward_mixed(golden, query_lens)
    assert torch.equal(out, other_out)
    assert torch.equal(lse, other_lse)


def test_without_a_sink(golden: dict[str, Any]) -> None:
    with_sink, lse_with = forward_mixed(golden)
    without, lse_without = forward_mixed(golden, sinks=None)
    assert torch.equal(lse_with, lse_without), "the sink stays outside the LSE"
    filled = lse_with.isfinite().unsqueeze(-1).expand_as(without)
    factor = torch.sigmoid(lse_with - golden["attn_sink"]).unsqueeze(-1)
    assert torch.allclose((without.float() * factor)[filled], with_sink.float()[filled], rtol=2e-2, atol=1e-4)


def kernel_call(impl: Any, query: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> Any:
    return impl._fp8_flash_mla_kernel(q=query, kv_c_and_k_pe_cache=cache, topk_indices=slots, kernel_metadata=None)


@pytest.mark.parametrize("shape", [(1, 16), (16, 1), (4, 4), (2, 8)])
def test_every_shape_of_q_keeps_the_kernels_conventions(golden: dict[str, Any], shape: tuple[int, int]) -> None:
    impl = harness.build_impl(harness.make_config(), topk=512, sinks=golden["attn_sink"])
    plain_out, plain_lse = kernel_call(impl, golden["query"][None], golden["kv_cache"], golden["slots"][None])
    query, slots = golden["query"].view(*shape, 8, 576), golden["slots"].view(*shape, 512)
    out, lse = kernel_call(impl, query, golden["kv_cache"], slots)
    assert out.shape == (*shape, 8, 512)
    assert lse.shape == (shape[0], 8, shape[1])
    assert lse.dtype == torch.float32
    assert torch.equal(out.reshape(16, 8, 512), plain_out[0])
    assert torch.equal(lse.transpose(1, 2).reshape(16, 8), plain_lse[0].T)


def test_no_tokens(golden: dict[str, Any]) -> None:
    impl = harness.build_impl(harness.make_config(), topk=512, sinks=golden["attn_sink"])
    out, lse = kernel_call(impl, golden["query"][None, :0], golden["kv_cache"], golden["slots"][None, :0])
    assert (out.shape, lse.shape) == ((1, 0, 8, 512), (1, 8, 0))


@pytest.mark.parametrize("width", [1, 4])
def test_chunks_give_the_same_bits(golden: dict[str, Any], width: int) -> None:
    whole = forward_mixed(golden, [width] * (16 // width))
    harness.LOG.tokens.clear()
    # 3 MiB hold 5 tokens of 512 slots, so 16 tokens go through in several calls.
    parts = forward_mixed(golden, [width] * (16 // width), additional_config={"hyv4_kvdequant": {"workspace_mb": 3}})
    assert len(harness.LOG.tokens) > 1
    assert max(harness.LOG.tokens) <= 5
    assert sum(harness.LOG.tokens) == 16
    assert all(tokens % width == 0 for tokens in harness.LOG.tokens)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


def test_pages_of_other_layers_between_ours(golden: dict[str, Any]) -> None:
    wide = torch.full((17, 3, 64, 656), 0xFF, dtype=torch.uint8)
    wide[:, 1] = golden["kv_cache"]
    impl = harness.build_impl(harness.make_config(), topk=512, sinks=golden["attn_sink"])
    plain = kernel_call(impl, golden["query"][None], golden["kv_cache"], golden["slots"][None])
    gapped = kernel_call(impl, golden["query"][None], wide[:, 1], golden["slots"][None])
    assert torch.equal(plain[0], gapped[0])


def test_the_workspace_is_reserved_when_the_layer_is_built(golden: dict[str, Any]) -> None:
    from vllm.v1.worker.workspace import current_workspace_manager

    impl = harness.build_impl(harness.make_config(), topk=512, sinks=golden["attn_sink"])
    reserved = current_workspace_manager()._current_workspaces[0].numel()
    assert reserved >= impl._hyv4_kvdequant_layer.intercept.workspace_bytes
    current_workspace_manager().lock()  # from here on vLLM refuses to grow it
    kernel_call(impl, golden["query"][None], golden["kv_cache"], golden["slots"][None])
    assert current_workspace_manager()._current_workspaces[0].numel() == reserved


def test_the_query_that_lies_in_the_shared_workspace_is_not_overwritten(golden: dict[str, Any]) -> None:
    from vllm.v1.worker.workspace import current_workspace_manager

    from hyv4_kvdequant.hosts import vllm_mainline

    impl = harness.build_impl(harness.make_config(), topk=512, sinks=golden["attn_sink"])
    query, *_ = current_workspace_manager().get_simultaneous(*vllm_mainline._host_specs(impl))
    query = query[:16, :8]
    query.copy_(golden["query"])
    out, _ = kernel_call(impl, query[None], golden["kv_cache"], golden["slots"][None])
    recorded = golden["bf16_out"].double()
    assert (out[0].double() - recorded).norm() / recorded.norm() < 2e-3
    assert torch.equal(query, golden["query"])


def test_two_engines_in_one_process_keep_their_settings(golden: dict[str, Any]) -> None:
    first = harness.build_impl(harness.make_config(), topk=512, sinks=golden["attn_sink"])
    harness.start_process()
    small = harness.make_config({"hyv4_kvdequant": {"workspace_mb": 3}})
    second = harness.build_impl(small, topk=512, sinks=golden["attn_sink"])
    assert first._hyv4_kvdequant_layer.intercept.plan.chunk_tokens == 64
    assert second._hyv4_kvdequant_layer.intercept.plan.chunk_tokens == 5
    out, _ = kernel_call(second, golden["query"][None], golden["kv_cache"], golden["slots"][None])
    assert out.shape == (1, 16, 8, 512)


def test_our_variables_are_vllms_too() -> None:
    import vllm.envs
    from vllm.platforms import current_platform

    assert GATE in vllm.envs.environment_variables
    assert GATE + "_BACKEND" in vllm.envs.compile_factors()
    # The check moved from vllm.envs to the platform between the two versions.
    owner = vllm.envs if hasattr(vllm.envs, "validate_environ") else current_platform
    owner.validate_environ(hard_fail=True)
