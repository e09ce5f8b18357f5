"""The reference writer and attention, held to what real vLLM ops wrote and computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hyv4_kvdequant as h
from hyv4_kvdequant.reference import sparse_attention, write_cache
from hyv4_kvdequant.steps import load_step


def test_the_writer_writes_what_vllm_wrote(golden_step: Path) -> None:
    step = load_step(golden_step)
    cache = torch.zeros_like(step.kv_cache)
    tensors = step.tensors
    write_cache(tensors["kv_c"], tensors["k_pe"], cache, tensors["slot_mapping"], scale="power_of_two")
    assert torch.equal(cache, step.kv_cache)


def test_amax_scales_use_the_whole_range_of_e4m3() -> None:
    kv_c = torch.randn(5, 512, dtype=torch.bfloat16)
    cache = torch.zeros(1, 16, 656, dtype=torch.uint8)
    write_cache(kv_c, torch.randn(5, 64, dtype=torch.bfloat16), cache, torch.tensor([3, 1, -1, 15, 0]))
    record = cache[0, 3]
    assert torch.equal(record[512:528].view(torch.float32), kv_c[0].float().view(4, 128).abs().amax(1) / 448)
    assert bool((record[:512].view(torch.float8_e4m3fn).float().view(4, 128).abs().amax(1) == 448).all())
    assert not cache[0, 2].any()


def test_the_writer_names_a_slot_past_the_cache() -> None:
    cache = torch.zeros(1, 16, 656, dtype=torch.uint8)
    kv_c, k_pe = torch.zeros(1, 512, dtype=torch.bfloat16), torch.zeros(1, 64, dtype=torch.bfloat16)
    with pytest.raises(h.InvalidCallError, match="slot 16; the cache has 16"):
        write_cache(kv_c, k_pe, cache, torch.tensor([16]))
    with pytest.raises(h.InvalidCallError, match="'mean'"):
        write_cache(kv_c, k_pe, cache, torch.tensor([0]), scale="mean")  # type: ignore[arg-type]


def test_attention_agrees_with_flashmla(golden_step: Path) -> None:
    step = load_step(golden_step)
    result = h.gather_dequantize(step.kv_cache, step.topk_indices)
    assert step.softmax_scale is not None
    out, lse = sparse_attention(step.tensors["query"], *result, step.softmax_scale, step.tensors["attn_sink"])
    for kernel in ("fp8", "bf16"):
        recorded = step.tensors[f"{kernel}_out"].double()
        assert (out.double() - recorded).norm() / recorded.norm() < 2e-3
        filled = step.tensors[f"{kernel}_lse"].isfinite()
        assert torch.equal(filled, lse.isfinite())
        assert (lse - step.tensors[f"{kernel}_lse"])[filled].abs().max() < 1e-3


def test_attention_against_a_plain_softmax_in_float64() -> None:
    torch.manual_seed(0)
    query, kv = torch.randn(2, 3, 576, dtype=torch.bfloat16), torch.randn(6, 576, dtype=torch.bfloat16)
    indices = torch.tensor([[0, 2, -1, 5], [-1, -1, -1, 4]], dtype=torch.int32)
    sink = torch.tensor([0.5, -1.0, 3.0])
    out, lse = sparse_attention(query, kv, indices, 0.1, sink)
    for token, chosen in enumerate(([0, 2, 5], [4])):
        logits = query[token].double() @ kv[chosen].double().T * 0.1
        exponents = logits.exp()
        expected = exponents @ kv[chosen, :512].double() / (exponents.sum(1) + sink.double().exp())[:, None]
        assert torch.allclose(out[token].double(), expected, rtol=1e-2, atol=1e-3)
        assert torch.allclose(lse[token].double(), exponents.sum(1).log(), atol=1e-5)


def test_a_row_without_slots_gives_zero_and_infinity() -> None:
    out, lse = sparse_attention(
        torch.ones(1, 2, 576, dtype=torch.bfloat16),
        torch.full((4, 576), torch.nan, dtype=torch.bfloat16),
        torch.full((1, 4), -1, dtype=torch.int32),
        1.0,
    )
    assert not out.any()
    assert bool((lse == torch.inf).all())


def test_shapes_that_do_not_fit_are_told() -> None:
    with pytest.raises(h.InvalidCallError, match="do not fit"):
        sparse_attention(torch.zeros(2, 1, 576), torch.zeros(1, 576), torch.zeros(3, 4, dtype=torch.int32), 1.0)
