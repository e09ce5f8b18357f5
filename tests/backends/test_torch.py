"""The `torch` backend meets the contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hyv4_kvdequant import FP8_DS_MLA, RecordLayout, Target, load_backend
from hyv4_kvdequant.testing import ContractTests, run_checks


class TestTorch(ContractTests):
    backend = "torch"


class TestTorchOtherSeed(ContractTests):
    backend = "torch"
    seed = 20261130


@pytest.mark.gpu
class TestTorchOnGpu(ContractTests):
    backend = "torch"
    device = "cuda"


WITHOUT_ROPE = RecordLayout(
    "no_rope", row_bytes=528, nope_dim=512, rope_dim=0, tile_dim=128, nope_offset=0, scale_offset=512, rope_offset=528
)
SCALES_FIRST = replace(FP8_DS_MLA, name="scales_first", nope_offset=16, scale_offset=0, row_bytes=672)
SMALL_TILES = RecordLayout(
    "small_tiles", row_bytes=128, nope_dim=64, rope_dim=16, tile_dim=32, nope_offset=0, scale_offset=64, rope_offset=72
)


@pytest.mark.parametrize("layout", [WITHOUT_ROPE, SCALES_FIRST, SMALL_TILES], ids=lambda layout: layout.name)
def test_other_records_of_the_same_types(layout: RecordLayout) -> None:
    """It reads a record by its layout, not by the numbers of fp8_ds_mla."""
    results = run_checks(load_backend("torch"), layout=layout)
    assert [result.failures for result in results if result.failures] == []


def test_a_record_of_other_types_is_a_reason() -> None:
    layout = replace(FP8_DS_MLA, name="ue8m0", scale_dtype=torch.float8_e8m0fnu)
    (reason,) = load_backend("torch").unavailable_reasons(Target.detect("cpu", layout))
    assert "'ue8m0'" in reason
