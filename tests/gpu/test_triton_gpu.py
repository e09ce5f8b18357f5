"""The `triton` backend on a GPU: run with `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hyv4_kvdequant import FP8_DS_MLA, GatherCall, GatherDequantBackend, Target, gather_dequantize, load_backend
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.steps import load_step
from hyv4_kvdequant.testing import Case, ContractTests, check_case, expected_rows, rows_equal

pytestmark = pytest.mark.gpu

ROW_BYTES = FP8_DS_MLA.row_bytes


def make_backend(dedup_from_rows: int | None = None) -> GatherDequantBackend:
    backend = load_backend("triton")(Target.detect("cuda"))
    if dedup_from_rows is not None:
        backend._launch.dedup_from_rows = dedup_from_rows
    return backend


class TestTriton(ContractTests):
    backend = "triton"
    device = "cuda"


class TestTritonDedup(ContractTests):
    """Deduplicates however small the call."""

    backend = "triton"
    device = "cuda"

    @classmethod
    def make_backend(cls) -> GatherDequantBackend:
        return make_backend(dedup_from_rows=0)


@pytest.mark.parametrize("dedup_from_rows", [0, None], ids=["dedup", "plain"])
def test_golden_step_is_bit_identical(golden_step: Path, dedup_from_rows: int | None) -> None:
    step = load_step(golden_step)
    slots = step.topk_indices
    result = gather_dequantize(
        step.kv_cache.cuda(),
        slots.cuda(),
        backend=make_backend(dedup_from_rows),
        tokens_per_request=2 if dedup_from_rows == 0 and slots.shape[0] % 2 == 0 else 1,
    )
    filled = slots >= 0
    indices = result.compact_indices.cpu()
    assert torch.equal(indices >= 0, filled)
    got = result.compact_kv.view(torch.int16).cpu()[indices[filled].long()]
    assert torch.equal(got, step.tensors["rows"].view(torch.int16)[slots[filled].long()])


def random_cache(num_blocks: int, gap: int = 0) -> torch.Tensor:
    """(num_blocks, 64, 656) uint8 with ordinary scales and `gap` bytes between blocks."""
    stride = 64 * ROW_BYTES + gap
    memory = torch.empty(num_blocks * stride, dtype=torch.uint8, device="cuda")
    cache = memory.as_strided((num_blocks, 64, ROW_BYTES), (stride, ROW_BYTES, 1))
    fill_with_random(cache)
    return cache


def fill_with_random(cache: torch.Tensor) -> None:
    cache.copy_(torch.randint(0, 256, cache.shape, dtype=torch.uint8, device="cuda"))
    scales = torch.rand((*cache.shape[:2], 4), device="cuda") - 0.5
    cache[..., 512:528] = scales.view(torch.uint8)


def make_call(cache: torch.Tensor, slots: torch.Tensor, width: int = 1) -> GatherCall:
    rows = torch.full((slots.numel(), 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    return GatherCall(cache, slots, rows, torch.full_like(slots, -7), tokens_per_request=width)


@pytest.mark.parametrize(("native_e4m3", "native_bf16"), [(False, True), (True, False), (False, False), (True, True)])
def test_both_conversions_give_the_same_bits(native_e4m3: bool, native_bf16: bool) -> None:
    """All bytes under scales that make ties, overflow and subnormals, against the oracle and so each other."""
    backend = make_backend()
    if native_e4m3 and not backend._launch._numerics["NATIVE_E4M3"]:
        pytest.skip("this GPU has no e4m3fn")
    backend._launch._numerics = {"NATIVE_E4M3": native_e4m3, "NATIVE_BF16": native_bf16}
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 2**32, 1 << 15, dtype=np.uint64).astype(np.uint32)
    ties = (rng.integers(1, 255, 1 << 15) << 23 | 0x8000 | rng.integers(0, 128, 1 << 15) << 16) + rng.integers(
        -1, 2, 1 << 15
    )
    subnormal = rng.integers(0, 2**25, 1 << 15)
    scales = np.concatenate([bits, ties.astype(np.uint32), subnormal.astype(np.uint32)]).reshape(-1, 4)
    records = np.zeros((len(scales), ROW_BYTES), np.uint8)
    records[:, :512] = np.concatenate([np.arange(256), np.arange(255, -1, -1)])
    records[:, 512:528] = np.ascontiguousarray(scales).view(np.uint8)
    cache = torch.from_numpy(records).cuda().unsqueeze(0)
    slots = torch.arange(len(scales), dtype=torch.int32, device="cuda").unsqueeze(0)
    call = make_call(cache, slots)
    run_call(backend, call)
    expected = expected_rows(torch.from_numpy(records), FP8_DS_MLA)
    assert bool(rows_equal(call.compact_kv.view(torch.int16).cpu(), expected, FP8_DS_MLA).all())


@pytest.mark.parametrize(("width", "dedup_from_rows"), [(1, None), (4, None), (4, 0)])
def test_a_graph_replayed_1000_times_equals_eager(width: int, dedup_from_rows: int | None) -> None:
    backend = make_backend(dedup_from_rows)
    torch.manual_seed(1)
    cache = random_cache(32, gap=3 * ROW_BYTES)
    slots = torch.zeros((8, 256), dtype=torch.int32, device="cuda")
    captured, eager = make_call(cache, slots, width), make_call(cache, slots, width)
    run_call(backend, captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_call(backend, captured)
    differs = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(1000):
        slots.copy_(torch.randint(-40, 32 * 64 + 40, slots.shape, device="cuda"))
        if turn % 10 == 0:
            fill_with_random(cache)
        for call in (captured, eager):
            call.compact_kv.view(torch.int16).fill_(turn)
            call.compact_indices.fill_(turn)
        graph.replay()
        run_call(backend, eager)
        differs += (captured.compact_kv.view(torch.int16) != eager.compact_kv.view(torch.int16)).sum()
        differs += (captured.compact_indices != eager.compact_indices).sum()
    assert int(differs) == 0
    assert check_case(backend, Case("last", cache, slots, width)) == []


@pytest.mark.parametrize("gap", [0, 64 * ROW_BYTES], ids=["packed", "gapped"])
def test_a_cache_past_2_to_the_32_bytes(gap: int) -> None:
    stride = 64 * ROW_BYTES + gap
    num_blocks = 2**32 // stride + 1024
    if torch.cuda.mem_get_info()[0] < num_blocks * stride + 2**30:
        pytest.skip("too little device memory")
    memory = torch.empty(num_blocks * stride, dtype=torch.uint8, device="cuda")
    cache = memory.as_strided((num_blocks, 64, ROW_BYTES), (stride, ROW_BYTES, 1))
    edges = [2**31 // stride * 64, 2**32 // stride * 64, 2**31 // ROW_BYTES, num_blocks * 64 - 64]
    slots = torch.tensor([edge + near for edge in edges for near in range(-64, 64)], dtype=torch.int32, device="cuda")
    slots = slots[(slots >= 0) & (slots < num_blocks * 64)].unsqueeze(0)
    fill_with_random(block := torch.empty((slots.numel(), 1, ROW_BYTES), dtype=torch.uint8, device="cuda"))
    long = slots[0].long()
    cache[long // 64, long % 64] = block[:, 0]
    assert check_case(make_backend(), Case("past 4 GiB", cache, slots)) == []
    assert check_case(make_backend(0), Case("past 4 GiB", cache, slots.repeat(2, 1), 2)) == []


def test_one_kernel_a_call_and_no_compilation_for_new_token_counts() -> None:
    backend = make_backend()
    cache = random_cache(512)
    slots = torch.randint(0, 512 * 64, (64, 2048), dtype=torch.int32, device="cuda")
    for width in (1, 4):
        run_call(backend, make_call(cache, slots[:4], width))
    compiled = compilations(backend)
    calls = [make_call(cache, slots[:tokens], width) for width in (1, 4) for tokens in (4, 8, 12, 28, 32, 60, 64)]
    calls += [make_call(cache, slots[:tokens], 1) for tokens in (1, 2, 3, 17)]
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for call in calls:
            run_call(backend, call)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert {event.name for event in kernels} == {"gather_dequant_kernel", "gather_distinct_kernel"}
    assert len(kernels) == len(calls)
    assert compilations(backend) == compiled


def compilations(backend: GatherDequantBackend) -> int:
    """Kernels in Triton's caches of this process."""
    from hyv4_kvdequant_triton import dedup, kernel

    functions = (kernel.gather_dequant_kernel, dedup.gather_distinct_kernel)
    return sum(len(caches[0]) for function in functions for caches in function.device_caches.values())
