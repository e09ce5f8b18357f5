"""The kit's oracle, held to PyTorch's own conversions, which it does not use, and to the format's definition."""

from __future__ import annotations

import math

import numpy as np
import torch

from hyv4_kvdequant import FP8_DS_MLA
from hyv4_kvdequant.records.fp8_ds_mla import SCALES, e4m3fn_values, round_to_bf16_bits
from hyv4_kvdequant.testing import expected_rows, rows_equal


def test_every_e4m3_byte_as_pytorch_decodes_it() -> None:
    decoded = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3fn_values(), decoded, equal_nan=True)
    signs = np.signbit(e4m3fn_values()) == np.signbit(decoded)
    assert signs[~np.isnan(decoded)].all()


def test_named_e4m3_values() -> None:
    values = e4m3fn_values()
    assert [values[byte] for byte in (0x00, 0x01, 0x08, 0x38, 0x7E, 0xFE)] == [0, 2**-9, 2**-6, 1, 448, -448]
    assert math.copysign(1, values[0x80]) == -1
    assert np.isnan(values[[0x7F, 0xFF]]).all()
    assert np.isnan(values).sum() == 2


def test_rounding_as_pytorch_rounds() -> None:
    """All upper halves, each with lower halves at, just below and just above the tie."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | np.uint32(lower)).view(np.float32)
        ours = torch.from_numpy(round_to_bf16_bits(values).view(np.int16).copy())
        theirs = torch.from_numpy(values.copy()).to(torch.bfloat16)
        numbers = ~torch.from_numpy(np.isnan(values))
        assert torch.equal(ours[numbers], theirs.view(torch.int16)[numbers])
        assert bool(ours.view(torch.bfloat16)[~numbers].isnan().all())


def test_scales_hold_what_they_promise() -> None:
    """A product that is a tie, one that is a tie in fp32 only on either side, overflow, subnormal products."""
    scales = np.array(SCALES, np.float32)
    with np.errstate(all="ignore"):
        exact = scales[:, None].astype(np.float64) * e4m3fn_values().astype(np.float64)
        product = scales[:, None] * e4m3fn_values()
    tie = (product.view(np.uint32) & 0xFFFF) == 0x8000
    assert (tie & (exact == product)).any()
    assert (tie & (exact > product) & (exact > 0)).any()
    assert (tie & (exact < product) & (exact > 0)).any()
    finite = np.isfinite(exact)
    assert (finite & np.isinf(product)).any()
    # In bf16 the largest finite value is 0x7F7F; these are finite in fp32 and are not in bf16.
    assert (np.isfinite(product) & (round_to_bf16_bits(product) & 0x7FFF == 0x7F80)).any()
    subnormal = (np.abs(product) < 2.0**-126) & (product != 0)
    assert (subnormal & (round_to_bf16_bits(product) & 0x7FFF != 0)).any()


def test_nan_is_any_nan_in_nope_and_one_bit_pattern_in_rope() -> None:
    rows = expected_rows(torch.full((1, FP8_DS_MLA.row_bytes), 0xFF, dtype=torch.uint8), FP8_DS_MLA)
    other = torch.where(rows == -1, torch.tensor(0x7FC1, dtype=torch.int16), rows)
    other[:, : FP8_DS_MLA.nope_dim] = 0x7FA5
    equal = rows_equal(other, rows, FP8_DS_MLA)[0]
    assert bool(equal[: FP8_DS_MLA.nope_dim].all())
    assert not bool(equal[FP8_DS_MLA.nope_dim :].any())
