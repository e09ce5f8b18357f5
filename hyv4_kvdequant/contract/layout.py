"""Record layouts: where the parts of one token's cache record lie, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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

LAYOUTS = {layout.name: layout for layout in (FP8_DS_MLA,)}
"""Layouts by name, as step files name them."""
