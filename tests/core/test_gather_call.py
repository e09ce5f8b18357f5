"""The gather call: what it gives, and the message of every argument that breaks the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import hyv4_kvdequant as h
from hyv4_kvdequant.testing import expected_rows, rows_equal
from hyv4_kvdequant.testing.cases import make_cache

T, K = 4, 8


@pytest.fixture
def cache() -> torch.Tensor:
    return make_cache(np.random.default_rng(0), 3, 16)


@pytest.fixture
def slots() -> torch.Tensor:
    return torch.arange(T * K, dtype=torch.int32).view(T, K)


def test_it_returns_both_outputs_by_name(cache: torch.Tensor, slots: torch.Tensor) -> None:
    result = h.gather_dequantize(cache, slots)
    expected = expected_rows(cache.view(-1, 656)[: T * K], h.FP8_DS_MLA)
    assert bool(rows_equal(result.compact_kv.view(torch.int16), expected, h.FP8_DS_MLA).all())
    assert torch.equal(result.compact_indices, slots)


def test_it_writes_into_buffers_it_is_given(cache: torch.Tensor, slots: torch.Tensor) -> None:
    kv = torch.empty(T * K, 576, dtype=torch.bfloat16)
    indices = torch.empty(T, K, dtype=torch.int32)
    result = h.gather_dequantize(cache, slots, compact_kv=kv, compact_indices=indices)
    assert result.compact_kv is kv
    assert result.compact_indices is indices


@pytest.mark.parametrize("form", ["flat", "fp8", "flat_with_gaps"])
def test_other_forms_of_one_cache_give_the_same(cache: torch.Tensor, slots: torch.Tensor, form: str) -> None:
    plain = h.gather_dequantize(cache, slots).compact_kv
    wide = torch.full((48, 700), 0xFF, dtype=torch.uint8)
    wide[:, :656] = cache.view(-1, 656)
    other = {"flat": cache.view(-1, 656), "fp8": cache.view(torch.float8_e4m3fn), "flat_with_gaps": wide[:, :656]}[form]
    got = h.gather_dequantize(other, slots).compact_kv
    assert torch.equal(got.view(torch.int16), plain.view(torch.int16))


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
def test_no_tokens_or_no_topk_is_an_empty_result(cache: torch.Tensor, shape: tuple[int, int]) -> None:
    result = h.gather_dequantize(cache, torch.zeros(shape, dtype=torch.int32))
    assert result.compact_kv.shape == (0, 576)
    assert result.compact_indices.shape == shape


def test_an_empty_cache_leaves_every_entry_unfilled(slots: torch.Tensor) -> None:
    result = h.gather_dequantize(torch.empty(0, 16, 656, dtype=torch.uint8), slots)
    assert bool((result.compact_indices == -1).all())
    assert not result.compact_kv.view(torch.int16).any()


def test_out_of_range_slots_are_unfilled_unless_checked(cache: torch.Tensor) -> None:
    slots = torch.tensor([[0, -1, -7, 48, 2**31 - 1, 47]], dtype=torch.int32)
    assert h.gather_dequantize(cache, slots).compact_indices.tolist() == [[0, -1, -1, -1, -1, 5]]
    with pytest.raises(h.InvalidCallError, match=r"-7 at \[0, 2\] \(3 such entries\)"):
        h.gather_dequantize(cache, slots, check_indices=True)


def test_width_and_reuse_reach_only_a_backend_whose_features_admit_them(
    cache: torch.Tensor, slots: torch.Tensor
) -> None:
    seen: list[tuple[int, bool]] = []

    class Recording(h.GatherDequantBackend):
        name = "recording"

        @classmethod
        def unavailable_reasons(cls, target: h.Target) -> list[str]:
            return []

        def gather_dequant(self, call: h.GatherCall) -> None:
            seen.append((call.tokens_per_request, call.reuse_compact_indices))

    indices = torch.empty(T, K, dtype=torch.int32)
    for features in (h.Features(), h.Features(request_dedup=True), h.Features(mapping_reuse=True)):
        backend = Recording(h.Target.detect("cpu"))
        backend.features = features
        h.gather_dequantize(
            cache, slots, backend=backend, tokens_per_request=2, compact_indices=indices, reuse_compact_indices=True
        )
    assert seen == [(1, False), (2, False), (1, True)]


def test_the_drop_in_has_the_hosts_signature(cache: torch.Tensor, slots: torch.Tensor) -> None:
    result = h.gather_dequantize_fp8_ds_mla_cache(cache, slots, 512, 64)
    assert torch.equal(result.compact_indices, slots)
    with pytest.raises(h.InvalidCallError, match=r"\(448, 64\); the record fp8_ds_mla holds \(512, 64\)"):
        h.gather_dequantize_fp8_ds_mla_cache(cache, slots, 448, 64)


Change = Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]


def _aliased(cache: torch.Tensor, slots: torch.Tensor) -> dict[str, Any]:
    return {"compact_indices": slots}


def _inside_the_cache(cache: torch.Tensor, slots: torch.Tensor) -> dict[str, Any]:
    big = torch.zeros(3 * 16 * 656, dtype=torch.uint8)
    return {
        "kv_cache": big.view(3, 16, 656),
        "topk_indices": slots[:1, :1].contiguous(),
        "compact_kv": big[:1152].view(torch.bfloat16).view(1, 576),
    }


def _outputs_overlap(cache: torch.Tensor, slots: torch.Tensor) -> dict[str, Any]:
    memory = torch.zeros(T * K * 576, dtype=torch.bfloat16)
    return {
        "compact_kv": memory.view(T * K, 576),
        "compact_indices": memory[: 2 * T * K].view(torch.int32).view(T, K),
    }


BAD: dict[str, tuple[Change, str, str]] = {
    "cache_not_a_tensor": (lambda c, s: {"kv_cache": [1]}, "kv_cache", "a list; expected a torch.Tensor"),
    "cache_dtype": (lambda c, s: {"kv_cache": c.int()}, "kv_cache", "torch.int32; expected uint8 or"),
    "cache_row_size": (lambda c, s: {"kv_cache": c[..., :576]}, "kv_cache", "576"),
    "cache_dims": (lambda c, s: {"kv_cache": c.unsqueeze(0)}, "kv_cache", "(num_blocks, block_size, 656)"),
    "cache_rows_apart": (lambda c, s: {"kv_cache": c[:, ::2]}, "kv_cache", "records contiguous and adjacent"),
    "cache_transposed": (lambda c, s: {"kv_cache": c.transpose(0, 1)}, "kv_cache", "strides"),
    "cache_expanded": (lambda c, s: {"kv_cache": c[:1].expand(3, -1, -1)}, "kv_cache", "stride(0) 0"),
    "cache_misaligned": (
        lambda c, s: {"kv_cache": torch.zeros(48 * 656 + 2, dtype=torch.uint8)[2:].view(3, 16, 656)},
        "kv_cache",
        "multiples of 4 bytes",
    ),
    "slots_int64": (lambda c, s: {"topk_indices": s.long()}, "topk_indices", "torch.int64; expected int32"),
    "slots_1d": (lambda c, s: {"topk_indices": s.view(-1)}, "topk_indices", "(num_tokens, topk), contiguous"),
    "slots_strided": (lambda c, s: {"topk_indices": s[:, ::2]}, "topk_indices", "contiguous"),
    "slots_device": (lambda c, s: {"topk_indices": s.to("meta")}, "topk_indices", "meta"),
    "width_0": (lambda c, s: {"tokens_per_request": 0}, "tokens_per_request", "divides num_tokens = 4"),
    "width_3": (lambda c, s: {"tokens_per_request": 3}, "tokens_per_request", "3; expected"),
    "width_float": (lambda c, s: {"tokens_per_request": 2.0}, "tokens_per_request", "2.0"),
    "kv_dtype": (lambda c, s: {"compact_kv": torch.zeros(T * K, 576)}, "compact_kv", "torch.float32"),
    "kv_rows": (
        lambda c, s: {"compact_kv": torch.zeros(T * K + 1, 576, dtype=torch.bfloat16)},
        "compact_kv",
        "expected torch.bfloat16 of shape (32, 576)",
    ),
    "kv_strided": (
        lambda c, s: {"compact_kv": torch.zeros(T * K, 1152, dtype=torch.bfloat16)[:, ::2]},
        "compact_kv",
        "contiguous",
    ),
    "kv_device": (
        lambda c, s: {"compact_kv": torch.zeros(T * K, 576, dtype=torch.bfloat16, device="meta")},
        "compact_kv",
        "meta",
    ),
    "indices_dtype": (
        lambda c, s: {"compact_indices": torch.zeros(T, K, dtype=torch.int64)},
        "compact_indices",
        "torch.int64",
    ),
    "indices_alias_slots": (_aliased, "compact_indices", "overlapping topk_indices"),
    "kv_inside_cache": (_inside_the_cache, "compact_kv", "overlapping kv_cache"),
    "outputs_overlap": (_outputs_overlap, "compact_kv", "overlapping compact_indices"),
    "reuse_without_mapping": (lambda c, s: {"reuse_compact_indices": True}, "reuse_compact_indices", "was None"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_arguments_are_named(cache: torch.Tensor, slots: torch.Tensor, kind: str) -> None:
    change, argument, expected = BAD[kind]
    arguments: dict[str, Any] = {"kv_cache": cache, "topk_indices": slots, **change(cache, slots)}
    with pytest.raises(h.InvalidCallError) as caught:
        h.gather_dequantize(arguments.pop("kv_cache"), arguments.pop("topk_indices"), **arguments)
    assert str(caught.value).startswith(argument)
    assert expected in str(caught.value)


def test_layouts_that_contradict_themselves() -> None:
    for change in ({"tile_dim": 100}, {"scale_offset": 500}, {"rope_offset": 640}, {"scale_offset": 513}):
        with pytest.raises(ValueError, match="layout 'fp8_ds_mla'"):
            replace(h.FP8_DS_MLA, **change)
