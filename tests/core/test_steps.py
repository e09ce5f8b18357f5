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
    ],
)
def test_a_step_that_contradicts_us_or_itself(
    tmp_path: Path, golden_step: Path, metadata: dict[str, str], expected: str
) -> None:
    save_file(load_file(golden_step), tmp_path / "odd", metadata)
    with pytest.raises(StepFileError, match=expected):
        load_step(tmp_path / "odd")
