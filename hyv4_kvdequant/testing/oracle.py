"""What a dequantized row must be, and when two rows are equal. The numerics are the record's own, `Record.decode`."""

from __future__ import annotations

import torch

from hyv4_kvdequant.contract import RecordLayout
from hyv4_kvdequant.records import record_of


def expected_rows(records: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """Dequantizes records (n, row_bytes) uint8 by the contract's numerics: (n, row_dim) int16, the bits of bf16."""
    return record_of(layout).decode(records)


def rows_equal(got: torch.Tensor, expected: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """Elementwise equality of bf16 rows given as int16 bits, (n, row_dim) bool: equal bits, or both NaN in NoPE."""
    nan_got, nan_expected = is_nan_bits(got), is_nan_bits(expected)
    in_nope = torch.arange(layout.row_dim, device=got.device) < layout.nope_dim
    return (got == expected) | (nan_got & nan_expected & in_nope)


def is_nan_bits(bits: torch.Tensor) -> torch.Tensor:
    """Whether bf16 values given as int16 bits are NaN."""
    return (bits & 0x7FFF) > 0x7F80
