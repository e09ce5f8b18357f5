"""On a GPU with vLLM's own FlashMLA: `pytest -m "gpu and vllm" tests/vllm/test_gpu.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from batches import RaggedBatch, forward, make_batch
from safetensors.torch import load_file

pytestmark = [pytest.mark.vllm, pytest.mark.gpu, pytest.mark.usefixtures("vllm_process")]

DEVICE = harness.DEVICE


def build(backend: str, *, topk: int, sinks: torch.Tensor | None, max_tokens: int = 8192, **settings: Any) -> Any:
    config = harness.make_config({"hyv4_kvdequant": settings}, max_tokens=max_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_HCU_HYV4_FP8_KV_DEQUANT_BACKEND", backend)
        return harness.build_impl(config, topk=topk, sinks=sinks)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.fixture
def golden(golden_step: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in load_file(golden_step).items()}


def fp8_kernel(impl: Any, query: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> Any:
    """vLLM's own fp8 kernel, the method that the intercept wraps."""
    from vllm.third_party.flashmla.flash_mla_interface import get_mla_metadata
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseMetadata

    metadata = FlashMLASparseMetadata.FP8KernelMetadata(
        get_mla_metadata()[0],
        torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
        torch.full((1,), 1 << 20, dtype=torch.int32, device=DEVICE),
    )
    original = type(impl)._fp8_flash_mla_kernel.__wrapped__
    return original(impl, query, cache, slots, metadata)


def kernel(impl: Any, query: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> Any:
    return impl._fp8_flash_mla_kernel(q=query, kv_c_and_k_pe_cache=cache, topk_indices=slots, kernel_metadata=None)


def test_golden_step_with_the_real_flashmla(golden: dict[str, torch.Tensor]) -> None:
    arguments = golden["query"][None], golden["kv_cache"], golden["slots"][None]
    results = {}
    for backend in ("triton", "torch"):
        impl = build(backend, topk=512, sinks=golden["attn_sink"])
        results[backend] = kernel(impl, *arguments)
    out, lse = results["triton"]
    assert torch.equal(out, results["torch"][0])
    assert torch.equal(lse, results["torch"][1])
    fp8_out, fp8_lse = fp8_kernel(impl, *arguments)
    assert relative(out, fp8_out) < 2e-3
    filled = fp8_lse.isfinite()
    assert (lse - fp8_lse)[filled].abs().max() < 1e-3
    assert relative(out[0], golden["bf16_out"]) < 2e-3


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_captured_call_follows_changed_contents(golden: dict[str, torch.Tensor], backend: str) -> None:
    impl = build(backend, topk=512, sinks=golden["attn_sink"])
    query, cache, slots = golden["query"][None].clone(), golden["kv_cache"].clone(), golden["slots"][None].clone()
    kernel(impl, query, cache, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernel(impl, query, cache, slots)
    before = torch.zeros_like(out)
    for turn in range(1, 6):
        query.copy_(query.roll(turn, dims=1))
        cache[..., 512:528].view(torch.float32).mul_(1.25)  # the tile scales
        slots.copy_(slots.roll(turn, dims=1))
        graph.replay()
        expected_out, expected_lse = kernel(impl, query.clone(), cache.clone(), slots.clone())
        assert torch.equal(out, expected_out)
        assert torch.equal(lse, expected_lse)
        assert not torch.equal(out, before)
        before = out.clone()


def peak_of(impl: Any, batch: RaggedBatch, metadata: Any) -> int:
    """Bytes allocated above what was there before the call, at most; vLLM's workspace, with ours in it, was there."""
    forward(impl, batch, metadata)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward(impl, batch, metadata)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_an_8192_token_prefill_stays_within_the_bound() -> None:
    impl = build("triton", topk=2048, sinks=None, workspace_mb=1024)
    intercept = impl._hyv4_kvdequant_layer.intercept
    assert intercept.workspace_bytes <= 1024 * 2**20
    batch = make_batch([(8192, 32768)], topk=2048)
    for metadata in (batch.metadata, batch.without_sizes()):
        peak = peak_of(impl, batch, metadata)
        print(f"peak above the workspace: {peak / 2**20:.0f} MiB")
        # Output, converted slots and one chunk's padded query and output; unbounded it was 19.3 GB.
        assert peak < 512 * 2**20


BATCHES: dict[str, tuple[list[tuple[int, int]], int]] = {
    "prefill": ([(2048, 8192)], 0),
    "several": ([(700, 5000), (800, 800), (300, 9001)], 0),
    "shared_prefix": ([(900, 6000), (900, 6100)], 64),
    "decode_before_prefill": ([(1, 9000)] * 16 + [(2048, 4096)], 0),
    "block_edges": ([(500, 2047), (500, 2048), (500, 2049)], 0),
    "width_4": ([(4, 9000)] * 32, 8),
}


@pytest.mark.parametrize("name", BATCHES)
def test_plans_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyv4_kvdequant.plans.choice.CONTEXT_OVERHEAD_BYTES", 0)
    monkeypatch.setattr("hyv4_kvdequant.plans.choice.SEGMENT_OVERHEAD_BYTES", 0)
    lens, prefix = BATCHES[name]
    impl = build("triton", topk=2048, sinks=torch.zeros(8, device=DEVICE))
    batch = make_batch(lens, topk=2048, shared_prefix=prefix)
    taken = impl._hyv4_kvdequant_layer.intercept.plans_taken
    before = taken["context"]
    out, lse = forward(impl, batch)
    if name != "width_4":
        assert taken["context"] > before
    slot_out, slot_lse = forward(impl, batch, batch.without_sizes())
    assert torch.equal(out, slot_out)
    assert torch.equal(lse, slot_lse)
