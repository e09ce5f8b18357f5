"""Step files: what is written comes back, and what is not a step is told what it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hyv4_kvdequant import StepFileError
from hyv4_kvdequant.steps import Step, load_step, save_step
from hyv4_kvdequant.testing.cases import make_cache

SLOTS = torch.tensor([[0, 5, -1, 31]] * 4, dtype=torch.int32)


@pytest.mark.parametrize("gap", [0, 100])
def test_a_step_comes_back_with_its_strides(tmp_path: Path, gap: int) -> None:
    cache = make_cache(np.random.default_rng(0), 2, 16, gap=gap)
    save_step(tmp_path / "s", Step(cache, SLOTS, tokens_per_request=4, softmax_scale=0.1, notes={"layer": "3"}))
    step = load_step(tmp_path / "s")
    assert torch.equal(step.kv_cache, cache)
    assert step.kv_cache.stride() == cache.stride()
    assert torch.equal(step.topk_indices, SLOTS)
    assert (step.tokens_per_request, step.softmax_scale, dict(step.notes)) == (4, 0.1, {"layer": "3"})


def test_missing_truncated_and_foreign_files(tmp_path: Path, golden_step: Path) -> None:
    with pytest.raises(StepFileError, match="does not exist"):
        load_step(tmp_path / "none")
    (tmp_path / "cut").write_bytes(golden_step.read_bytes()[:100_000])
    with pytest.raises(StepFileError, match="truncated"):
        load_step(tmp_path / "cut")
    save_file({"weight": torch.zeros(2)}, tmp_path / "model")
    with pytest.raises(StepFileError, match="lacks kv_cache and slots; it has \\['weight'\\]"):
        load_step(tmp_path / "model")


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"format": "other"}, "format 'other'"),
        ({"version": "2"}, "reads up to 1. Upgrade"),
        ({"layout": "nvfp4_ds_mla"}, "layout 'nvfp4_ds_mla'"),
        ({"tokens_per_request": "3"}, "inconsistent"),
        ({"block_stride": "12", "block_size": "16"}, "block_stride"),
        ({"block_stride": "41984"}, "there is no block_size"),
        ({"block_stride": "9" * 30, "block_size": "64"}, "block_stride is '999"),
        ({"block_stride": str(2**31 - 1), "block_size": "64"}, "do not fit block_stride 2147483647"),
        ({"block_size": "32"}, "blocks of 64 slots; expected 32"),
        ({"block_size": "0"}, "block_size is '0': a whole number"),
        ({"block_size": "64.0"}, "block_size is '64.0': a whole number"),
        ({"tokens_per_request": "-4"}, "tokens_per_request is '-4'"),
        ({"tokens_per_request": "four"}, "tokens_per_request is 'four'"),
        ({"softmax_scale": "nan"}, "softmax_scale is 'nan'"),
        ({"softmax_scale": "inf"}, "softmax_scale is 'inf'"),
        ({"softmax_scale": "-0.1"}, "softmax_scale is '-0.1'"),
        ({"softmax_scale": "1e39"}, "softmax_scale is '1e39'"),
        ({"softmax_scale": "a little"}, "softmax_scale is 'a little'"),
        *[({"version": text}, "reads up to 1. Upgrade") for text in ("", "0", "-1", "1.0", " 1", "+1", "\u0661", "x")],
    ],
)
def test_a_step_that_contradicts_us_or_itself(
    tmp_path: Path, golden_step: Path, metadata: dict[str, str], expected: str
) -> None:
    save_file(load_file(golden_step), tmp_path / "odd", metadata)
    with pytest.raises(StepFileError, match=expected):
        load_step(tmp_path / "odd")


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("slots", torch.zeros(16, 512, dtype=torch.int64), "int32"),
        ("slots", torch.tensor(3, dtype=torch.int32), "topk_indices is of shape"),
        ("kv_cache", torch.zeros(17, 64, 656), "uint8"),
        ("kv_cache", torch.tensor(1, dtype=torch.uint8), "kv_cache is of shape"),
        ("kv_cache", torch.zeros(17, 0, 656, dtype=torch.uint8), "blocks of 0 slots"),
        ("query", torch.zeros(16, 8, 576), r"query is torch.float32 of shape \(16, 8, 576\); expected torch.bfloat16"),
        ("query", torch.zeros(16, 8, 512, dtype=torch.bfloat16), "row_dim = 576"),
        ("query", torch.zeros(15, 8, 576, dtype=torch.bfloat16), "num_tokens = 16"),
        ("query", torch.zeros(16, 0, 576, dtype=torch.bfloat16), "query is"),
        ("query", torch.tensor(1.0, dtype=torch.bfloat16), "num_tokens = 16, num_heads, row_dim = 576"),
        ("attn_sink", torch.zeros(7), "num_heads = 8"),
        ("attn_sink", torch.zeros(8, dtype=torch.float64), "expected torch.float32"),
        ("rows", torch.zeros(1087, 576, dtype=torch.bfloat16), "num_slots = 1088"),
        ("fp8_out", torch.zeros(16, 8, 576, dtype=torch.bfloat16), "nope_dim = 512"),
        ("bf16_out", torch.zeros(16, 8, dtype=torch.bfloat16), "bf16_out"),
        ("fp8_lse", torch.zeros(16, 8, 1), "fp8_lse"),
        ("bf16_lse", torch.zeros(8, 16), "bf16_lse"),
    ],
)
def test_a_tensor_that_is_not_what_its_name_says(
    tmp_path: Path, golden_step: Path, name: str, tensor: torch.Tensor, expected: str
) -> None:
    save_file({**load_file(golden_step), name: tensor}, tmp_path / "odd")
    with pytest.raises(StepFileError, match=expected):
        load_step(tmp_path / "odd")


def test_a_cache_may_lie_anywhere_in_the_file(tmp_path: Path, golden_step: Path) -> None:
    save_file({**load_file(golden_step), "odd": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path / "step")
    assert torch.equal(load_step(tmp_path / "step").kv_cache, load_step(golden_step).kv_cache)


def test_a_header_that_declares_what_no_tensor_can_be(tmp_path: Path) -> None:
    header = b'{"kv_cache": {"dtype": "U8", "shape": [0, 9223372036854775808], "data_offsets": [0, 0]}}'
    (tmp_path / "odd").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(StepFileError, match="is not a readable safetensors file") as caught:
        load_step(tmp_path / "odd")
    assert len(str(caught.value)) < 500


def test_a_file_written_before_the_format_had_a_name_still_reads(golden_step: Path) -> None:
    step = load_step(golden_step)
    assert (step.kv_cache.shape, step.topk_indices.shape) == ((17, 64, 656), (16, 512))
    assert (step.layout.name, step.tokens_per_request, step.softmax_scale) == ("fp8_ds_mla", 1, 1 / 24)
    assert step.notes["writer"].startswith("vLLM 0.33.0")
    assert {"query", "rows", "attn_sink", "kv_c", "k_pe", "slot_mapping"} <= step.tensors.keys()
