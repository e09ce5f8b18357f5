"""Record layouts: where the parts of one token's cache record lie, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

_Bytes = TypeVar("_Bytes", npt.NDArray[np.uint8], torch.Tensor)


@dataclass(frozen=True)
class RecordLayout:
    """The bytes of one slot of the KV cache, little endian.

    A record holds `nope_dim` quantized latent (NoPE) values, one scale for every `tile_dim` of them,
    and `rope_dim` rotary (RoPE) values stored as they are. Offsets and `row_bytes` are in bytes from
    the start of the record. The dequantized row is NoPE followed by RoPE, `row_dim` values of bf16.

    Raises:
        ValueError: the parts overlap, leave the record, are misaligned, or `tile_dim` does not divide `nope_dim`.
    """

    name: str
    row_bytes: int
    nope_dim: int
    rope_dim: int
    tile_dim: int
    nope_offset: int
    scale_offset: int
    rope_offset: int
    nope_dtype: torch.dtype = torch.float8_e4m3fn
    scale_dtype: torch.dtype = torch.float32
    rope_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.tile_dim < 1 or self.nope_dim % self.tile_dim:
            raise ValueError(f"layout {self.name!r}: tile_dim {self.tile_dim} does not divide nope_dim {self.nope_dim}")
        end = 0
        for start, size, dtype in sorted(self._parts(), key=lambda part: part[0]):
            if start < end or start + size > self.row_bytes:
                raise ValueError(
                    f"layout {self.name!r}: bytes [{start}, {start + size}) overlap another part or leave the record"
                )
            if start % dtype.itemsize or self.row_bytes % dtype.itemsize:
                raise ValueError(f"layout {self.name!r}: offset {start} or row_bytes is not a multiple of {dtype}")
            end = start + size

    def _parts(self) -> list[tuple[int, int, torch.dtype]]:
        return [
            (self.nope_offset, self.nope_dim * self.nope_dtype.itemsize, self.nope_dtype),
            (self.scale_offset, self.num_tiles * self.scale_dtype.itemsize, self.scale_dtype),
            (self.rope_offset, self.rope_dim * self.rope_dtype.itemsize, self.rope_dtype),
        ]

    @property
    def num_tiles(self) -> int:
        """Scales in a record."""
        return self.nope_dim // self.tile_dim

    @property
    def row_dim(self) -> int:
        """Values in a dequantized row."""
        return self.nope_dim + self.rope_dim

    @property
    def alignment(self) -> int:
        """Bytes that a record's address must be a multiple of, so that every part can be read in its own type."""
        return max(dtype.itemsize for _, _, dtype in self._parts())


def put_parts(
    layout: RecordLayout,
    records: torch.Tensor,
    *,
    nope: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    rope: torch.Tensor | None = None,
) -> None:
    """Writes parts into records in place, bit for bit; a part that is None stays as it is.

    Args:
        layout: where the parts lie.
        records: (..., row_bytes) uint8, last dimension contiguous.
        nope, scale, rope: (..., nope_dim), (..., num_tiles) and (..., rope_dim), of the layout's dtype or of integers
            of the same size; moved to the device of `records`.

    Raises:
        ValueError: a part does not fill its place: another number of values, or values of another size.
    """
    for place, part in zip(_places(layout), (nope, scale, rope), strict=True):
        if part is None:
            continue
        size = part.shape[-1] * part.itemsize
        if size != place.stop - place.start:
            raise ValueError(
                f"a part of {part.shape[-1]} values of {part.dtype} does not fill bytes "
                f"[{place.start}, {place.stop}) of the record {layout.name!r}"
            )
        if size:
            records[..., place] = part.contiguous().view(torch.uint8).to(records.device)


def take_parts(layout: RecordLayout, records: _Bytes) -> tuple[_Bytes, _Bytes, _Bytes]:
    """The bytes of NoPE, scales and RoPE of records (..., row_bytes) uint8, an array or a tensor: three views."""
    nope, scale, rope = _places(layout)
    return records[..., nope], records[..., scale], records[..., rope]


def _places(layout: RecordLayout) -> tuple[slice, slice, slice]:
    nope, scale, rope = (slice(start, start + size) for start, size, _ in layout._parts())
    return nope, scale, rope
