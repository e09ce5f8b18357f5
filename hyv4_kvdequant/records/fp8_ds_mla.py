"""`fp8_ds_mla`, DeepSeek's and HY V4's record in vLLM (the cache dtype of that name), and its relatives.

656 bytes, little endian: 512 e4m3fn NoPE values, 4 fp32 scales of 128 values each, 64 bf16 RoPE values. `make_record`
makes the same of another layout of these types: other sizes, another order, no RoPE.

The oracle is NumPy, straight from the format's definition, and uses neither PyTorch's fp8 and bf16 conversions nor any
backend. Sources: OCP 8-bit floating point specification (E4M3: bias 7, no infinities, NaN = S.1111.111), IEEE 754 for
fp32 products, and bf16 as the upper half of an fp32 rounded to nearest even.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from hyv4_kvdequant.records.layout import RecordLayout, put_parts, take_parts
from hyv4_kvdequant.records.record import Hostile, Record, register_record

FP8_DS_MLA = RecordLayout(
    name="fp8_ds_mla",
    row_bytes=656,
    nope_dim=512,
    rope_dim=64,
    tile_dim=128,
    nope_offset=0,
    scale_offset=512,
    rope_offset=528,
)
"""DeepSeek's and HY V4's record in vLLM (cache dtype `fp8_ds_mla`): 512 e4m3fn, 4 fp32 tile scales, 64 bf16."""

_DTYPES = (torch.float8_e4m3fn, torch.float32, torch.bfloat16)

# --- how values become bytes ---

_E4M3_MAX = 448.0
# Floor of a tile scale before it is rounded, so that a tile of zeros divides by something. vLLM 0.33.0's is
# 1e-4 (read off a cache it wrote); the other writer's is the least normal fp32.
_LEAST_SCALE = {"amax": torch.finfo(torch.float32).tiny, "power_of_two": 1e-4}


def encode(layout: RecordLayout, kv_c: torch.Tensor, k_pe: torch.Tensor, scale_rule: str) -> torch.Tensor:
    """Records as hosts write them; `scale_rule` as in `hyv4_kvdequant.reference.write_cache`. Shapes as in `Record`."""
    tiles = kv_c.float().view(-1, layout.num_tiles, layout.tile_dim)
    scales = (tiles.abs().amax(dim=-1) / _E4M3_MAX).clamp_min(_LEAST_SCALE[scale_rule])
    if scale_rule == "power_of_two":
        scales = _round_up_to_power_of_two(scales)
    # PyTorch's cast to e4m3fn does not saturate, the hosts' does.
    values = (tiles / scales.unsqueeze(-1)).clamp(-_E4M3_MAX, _E4M3_MAX).to(layout.nope_dtype)
    records = torch.zeros((len(tiles), layout.row_bytes), dtype=torch.uint8, device=kv_c.device)
    put_parts(layout, records, nope=values.view(-1, layout.nope_dim), scale=scales, rope=k_pe.to(layout.rope_dtype))
    return records


def _round_up_to_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(scales)  # scale = mantissa * 2**exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(scales), torch.where(mantissa == 0.5, exponent - 1, exponent))


# --- what bytes mean: the oracle ---

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


def decode(layout: RecordLayout, records: torch.Tensor) -> torch.Tensor:
    """What the contract's numerics make of records. Shapes as in `Record`."""
    nope_bytes, scale_bytes, rope_bytes = take_parts(layout, np.ascontiguousarray(records.cpu().numpy()))
    scale = np.ascontiguousarray(scale_bytes).view("<f4").astype(np.float32)
    with np.errstate(all="ignore"):
        product = _E4M3FN[nope_bytes] * np.repeat(scale, layout.tile_dim, axis=1)
    rope = np.ascontiguousarray(rope_bytes).view("<u2")
    bits = np.concatenate([round_to_bf16_bits(product), rope], axis=1)
    return torch.from_numpy(bits.view(np.int16).copy())


# --- what is worth testing ---


def _tie_only_in_fp32(byte_value: float, tie: float, side: float) -> float:
    """The fp32 scale whose exact product with `byte_value` lies on `side` of `tie`, and whose fp32 product is `tie`."""
    nearest = np.float32(tie / byte_value)
    beyond = np.nextafter(nearest, np.float32(side))
    wanted = [scale for scale in (nearest, beyond) if (float(scale) * byte_value - tie) * (side - tie) > 0]
    return float(next(scale for scale in wanted if np.float32(byte_value) * scale == np.float32(tie)))


# bf16 has 8 bits of precision: next to 1 its neighbours are 2**-7 apart, so odd multiples of 2**-8 are ties.
SCALES: tuple[float, ...] = (
    1.0,
    1.0 + 2.0**-8,
    1.0 + 3 * 2.0**-8,
    1.0 + 2.0**-8 + 2.0**-20,
    1.0 + 2.0**-8 - 2.0**-20,
    -(1.0 + 5 * 2.0**-8),
    # Ties that the rounding of the fp32 product makes: a product that skips fp32 rounds the other way.
    _tie_only_in_fp32(1.125, 1.0 + 2.0**-8, math.inf),
    _tie_only_in_fp32(1.125, 1.0 + 3 * 2.0**-8, -math.inf),
    0.0123456789,
    3.0 / 448,
    1e38,
    3.4e38,
    1e-38,
    2.0**-126,
    2.0**-133,
    1e-42,
    2.0**-149,
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
)
"""Tile scales that make ties, overflow and subnormal products, and the special values."""

ROPE_BITS = (0x7FC1, 0x7F81, 0xFFFF, 0xFF81, 0x7F80, 0xFF80, 0x0001, 0x8000, 0x807F, 0x3F80)
"""bf16 bits: quiet and signalling NaN with payloads, infinities, subnormals, the negative zero, and 1."""


def make_record(layout: RecordLayout) -> Record:
    """The record of a layout with this record's types.

    Raises:
        ValueError: the layout's types are others.
    """
    if (layout.nope_dtype, layout.scale_dtype, layout.rope_dtype) != _DTYPES:
        raise ValueError(
            f"record layout {layout.name!r} is not e4m3fn values with fp32 scales and bf16 RoPE; "
            "make its Record with an encode and a decode of its own, and register it"
        )
    return Record(
        layout=layout,
        scale_rules=tuple(_LEAST_SCALE),
        encode=partial(encode, layout),
        decode=partial(decode, layout),
        hostile=Hostile(tuple(range(256)), SCALES, ROPE_BITS if layout.rope_dim else ()),
    )


RECORD = register_record(make_record(FP8_DS_MLA))
