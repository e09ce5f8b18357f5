"""What a dequantized row must be, computed in NumPy straight from the format's definition.

Independent of PyTorch's fp8 and bf16 conversions and of every backend. Sources: OCP 8-bit floating point
specification (E4M3: bias 7, no infinities, NaN = S.1111.111), IEEE 754 for fp32 products, and bf16 as the upper half
of an fp32 rounded to nearest even.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hyv4_kvdequant.contract import RecordLayout

_BF16_NAN = 0x7FC0


def e4m3fn_values() -> npt.NDArray[np.float32]:
    """The value of each of the 256 e4m3fn bytes: (256,) fp32."""
    byte = np.arange(256)
    sign = np.where(byte & 0x80, -1.0, 1.0)
    exponent = (byte >> 3) & 0xF
    mantissa = byte & 0x7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    magnitude[(byte & 0x7F) == 0x7F] = np.nan
    return (sign * magnitude).astype(np.float32)


_E4M3FN = e4m3fn_values()


def round_to_bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of `values` rounded to nearest even in bf16; any NaN becomes 0x7FC0."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), _BF16_NAN, rounded).astype(np.uint16)


def expected_rows(records: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """Dequantizes records (n, row_bytes) uint8 by the contract's numerics: (n, row_dim) int16, the bits of bf16."""
    raw = np.ascontiguousarray(records.cpu().numpy())
    nope = _E4M3FN[raw[:, layout.nope_offset : layout.nope_offset + layout.nope_dim]]
    scale_bytes = raw[:, layout.scale_offset : layout.scale_offset + 4 * layout.num_tiles]
    scale = np.ascontiguousarray(scale_bytes).view("<f4").astype(np.float32)
    with np.errstate(all="ignore"):
        product = nope * np.repeat(scale, layout.tile_dim, axis=1)
    rope_bytes = raw[:, layout.rope_offset : layout.rope_offset + 2 * layout.rope_dim]
    rope = np.ascontiguousarray(rope_bytes).view("<u2")
    bits = np.concatenate([round_to_bf16_bits(product), rope], axis=1)
    return torch.from_numpy(bits.view(np.int16).copy())


def rows_equal(got: torch.Tensor, expected: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """Elementwise equality of bf16 rows given as int16 bits, (n, row_dim) bool: equal bits, or both NaN in NoPE."""
    nan_got, nan_expected = is_nan_bits(got), is_nan_bits(expected)
    in_nope = torch.arange(layout.row_dim, device=got.device) < layout.nope_dim
    return (got == expected) | (nan_got & nan_expected & in_nope)


def is_nan_bits(bits: torch.Tensor) -> torch.Tensor:
    """Whether bf16 values given as int16 bits are NaN."""
    return (bits & 0x7FFF) > 0x7F80
