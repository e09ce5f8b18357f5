"""The layout of the workspace: BF16 rows and their indices, once for the primary and once for a shadow."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hyv4_kvdequant.contract import RecordLayout
from hyv4_kvdequant.plans.chunks import row_bytes


@dataclass(frozen=True, eq=False)
class Buffer:
    """One backend's part: `kv` (rows, row_dim) bf16 and `indices` (rows,) int32."""

    kv: torch.Tensor
    indices: torch.Tensor

    def views(self, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """The first rows and indices, for `topk_indices` of this shape."""
        rows = shape.numel()
        return self.kv[:rows], self.indices[:rows].view(shape)

    def spare_indices(self, rows: int) -> torch.Tensor:
        """The memory behind the first `rows` rows, as int32: for indices where few rows are needed."""
        return self.kv[rows:].view(torch.int32).view(-1)


@dataclass(frozen=True)
class Workspace:
    """`rows` rows for each of `copies` backends."""

    rows: int
    copies: int
    layout: RecordLayout

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.rows * row_bytes(self.layout, self.copies)

    def carve(self, memory: torch.Tensor) -> list[Buffer]:
        """Cuts (nbytes,) uint8 into one buffer a backend."""
        # All BF16 rows first: their size is a multiple of 16 bytes, so that every part stays aligned.
        kv_bytes = self.rows * self.layout.row_dim * torch.bfloat16.itemsize
        kv = memory[: self.copies * kv_bytes].view(torch.bfloat16).view(self.copies, self.rows, self.layout.row_dim)
        indices = memory[self.copies * kv_bytes :].view(torch.int32).view(self.copies, self.rows)
        return [Buffer(kv[copy], indices[copy]) for copy in range(self.copies)]
