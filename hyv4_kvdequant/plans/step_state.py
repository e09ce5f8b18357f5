"""What is kept for as long as one step of the host lasts, and how it is told that it still holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hyv4_kvdequant.plans.choice import BatchSizes, Segment
from hyv4_kvdequant.plans.remap import BlockNumbering, ContextTables


@dataclass(frozen=True)
class StepKey:
    """What segments and tables are made from. Equal keys give equal segments and tables.

    A host may hand in the same metadata object again with its block table changed in place, so the object alone does
    not tell. PyTorch counts in-place writes to a tensor (`_version`); a host's own kernel may write past that count.
    Tables that are then too old still pair every row with the slot it was gathered from: a slot of a newer block is
    not in them, and the remap counts it as lost. Wrong rows they cannot give.
    """

    sizes: BatchSizes
    block_table: tuple[int, int, torch.Size, tuple[int, ...]]

    @classmethod
    def of(cls, sizes: BatchSizes, block_table: torch.Tensor) -> StepKey:
        """The key of a batch."""
        # A tensor that was made under inference mode keeps no count.
        version = -1 if block_table.is_inference() else block_table._version
        return cls(sizes, (block_table.data_ptr(), version, block_table.shape, block_table.stride()))


@dataclass
class StepState:
    """One step's segments, context tables and index mapping. `step` is the object itself, not its id, which a later
    step's object may be given again."""

    step: Any = None
    key: StepKey | None = None
    segments: list[Segment] | None = None
    tables: dict[tuple[Segment, BlockNumbering], ContextTables] = field(default_factory=dict)
    mapping_made_for: tuple[Any, BlockNumbering | None, list[Segment]] | None = None

    @classmethod
    def keeps(cls, key: StepKey) -> bool:
        """Whether anything may be kept under this key: without a count of writes nothing can tell."""
        return key.block_table[1] >= 0

    def enter(self, step: Any, key: StepKey) -> None:
        """Forgets segments and tables unless they were made in this step from the same things."""
        if step is None or self.step is not step or self.key != key or not self.keeps(key):
            self.step, self.key, self.segments, self.tables = step, key, None, {}

    def segments_of(self, choose: Callable[[], list[Segment]]) -> list[Segment]:
        """The step's segments, chosen at the first layer."""
        if self.segments is None:
            self.segments = choose()
        return self.segments

    def tables_of(
        self, segment: Segment, numbering: BlockNumbering, build: Callable[[], ContextTables]
    ) -> ContextTables:
        """A segment's tables for a cache with this numbering, built at the first layer that has such a cache."""
        if (segment, numbering) not in self.tables:
            self.tables[segment, numbering] = build()
        return self.tables[segment, numbering]

    def may_reuse_mapping(
        self, step: Any, numbering: BlockNumbering | None, segments: list[Segment], *, shares_indices: bool
    ) -> bool:
        """Whether the kept mapping is this layer's: made in this step, over the same rows. Afterwards it is."""
        made_for = self.mapping_made_for
        self.mapping_made_for = (step, numbering, segments)
        return shares_indices and made_for is not None and made_for[0] is step and made_for[1:] == (numbering, segments)
