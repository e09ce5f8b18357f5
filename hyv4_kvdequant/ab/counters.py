"""The counters: a small int64 tensor, one row a layer, updated on the device, read by a thread beside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

FIELDS = (
    "calls",
    "rows_compared",
    "rows_differ",
    "elements_differ",
    "largest_ulp",
    "index_disagreements",
    "first_call",
    "first_token",
    "first_k",
    "first_element",
    "first_slot",
    "first_primary_bits",
    "first_shadow_bits",
    "pending",
    "lost_entries",
)
"""Columns, in order. `pending` is the comparison's own: the least mismatch of the call that is being compared."""

COLUMN = {name: position for position, name in enumerate(FIELDS)}
NOTHING_PENDING = 2**62
# A mismatch is ordered by entry, then element; an entry whose indices disagree comes with this element.
ELEMENTS_PER_ENTRY = 1024
INDEX_ELEMENT = ELEMENTS_PER_ENTRY - 1


# What a file may hold where a counter stands.
Count = Annotated[int, Field(ge=0, lt=2**63)]
Signed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
FROM_FILES = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def fresh_row() -> list[int]:
    """A layer's counters before its first call."""
    row = [0] * len(FIELDS)
    row[COLUMN["first_call"]] = -1
    row[COLUMN["pending"]] = NOTHING_PENDING
    return row


@dataclass(frozen=True)
class FirstMismatch:
    """Where a layer's results differed first.

    Attributes:
        call: number of the compared call, from 0.
        token, k: the entry of `topk_indices`.
        element: of the row; -1 when the indices themselves disagree.
        slot: the selected slot.
        primary_bits, shadow_bits: the bf16 bits there; for an index disagreement the two indices.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FROM_FILES

    call: Count
    token: Count
    k: Count
    element: Annotated[int, Field(ge=-1, lt=ELEMENTS_PER_ENTRY)]
    slot: Signed
    primary_bits: Signed
    shadow_bits: Signed


@dataclass(frozen=True)
class LayerCounters:
    """One layer's counters, as read.

    Attributes:
        calls: compared calls.
        rows_compared: filled entries whose two rows were compared.
        rows_differ, elements_differ: of those; any NaN equals any other NaN in the NoPE part.
        largest_ulp: largest difference of an element, in bf16 steps.
        index_disagreements: entries that only one side calls unfilled, or whose index points outside the rows.
        first: the first mismatch, or None.
        lost_entries: filled entries that became unfilled between `topk_indices` and the sparse kernel; counted
            whether or not a shadow runs.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FROM_FILES

    calls: Count = 0
    rows_compared: Count = 0
    rows_differ: Count = 0
    elements_differ: Count = 0
    largest_ulp: Count = 0
    index_disagreements: Count = 0
    first: FirstMismatch | None = None
    lost_entries: Count = 0

    @property
    def mismatches(self) -> int:
        """Rows and indices that differ; 0 means that the two backends agreed."""
        return self.rows_differ + self.index_disagreements


def read_row(row: Sequence[int]) -> LayerCounters:
    """A row of the counters tensor as numbers."""
    value = dict(zip(FIELDS, row, strict=True))
    first = None
    if value["first_call"] >= 0:
        first = FirstMismatch(**{one.name: value[f"first_{one.name}"] for one in fields(FirstMismatch)})
    counts = {name: value[name] for name in (*FIELDS[:6], "lost_entries")}
    return LayerCounters(**counts, first=first)


def add(left: LayerCounters, right: LayerCounters) -> LayerCounters:
    """The counters of two together, as when ranks are merged."""
    return LayerCounters(
        left.calls + right.calls,
        left.rows_compared + right.rows_compared,
        left.rows_differ + right.rows_differ,
        left.elements_differ + right.elements_differ,
        max(left.largest_ulp, right.largest_ulp),
        left.index_disagreements + right.index_disagreements,
        left.first or right.first,
        left.lost_entries + right.lost_entries,
    )


def total(layers: Iterable[LayerCounters]) -> LayerCounters:
    """All of them together."""
    return reduce(add, layers, LayerCounters())
