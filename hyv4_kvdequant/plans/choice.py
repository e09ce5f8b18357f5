"""Which plan a batch takes: a cost in bytes moved, from numbers the host already has on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hyv4_kvdequant.contract import RecordLayout

# In bytes that an H200's memory moves in that time (docs/performance.md has the measurements). About 20 us for a
# context plan, between its tables (32 to 40 us, once a step) and its extra launch (every layer). About 64 us for a
# wave of the sparse kernel, which every further segment may add.
CONTEXT_OVERHEAD_BYTES = 80_000_000
SEGMENT_OVERHEAD_BYTES = 270_000_000
_INDEX_BYTES = 4


@dataclass(frozen=True)
class BatchSizes:
    """One batch as the host knows it without reading the device.

    Attributes:
        query_lens: query tokens of each request, in batch order.
        context_rows: cache rows that each request's context spans on this rank (whole blocks, an upper bound).
    """

    query_lens: tuple[int, ...]
    context_rows: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """A run of requests [first, last) with tokens [start, stop) that takes one plan."""

    plan: Literal["slot", "context"]
    first: int
    last: int
    start: int
    stop: int


def choose_segments(sizes: BatchSizes, topk: int, capacity_rows: int, layout: RecordLayout) -> list[Segment]:
    """Splits a batch into segments, each with the plan that costs least.

    Per selected slot, a token costs `topk` rows. Per context, each context row is moved once and each selected slot
    is remapped (one index read, one written). Hosts put decodes before prefills, so three ways are compared: all
    per slot, all per context, and per slot up to the first request whose own context is cheaper.

    Args:
        sizes: the batch.
        topk: selected slots a token.
        capacity_rows: rows that the workspace holds; contexts are grouped to fit, and one that does not fit at all
            goes per slot.
        layout: the cache's record.
    """
    count = len(sizes.query_lens)
    cheaper = [
        rows <= capacity_rows and _context_bytes(tokens, rows, topk, layout) < _slot_bytes(tokens, topk, layout)
        for tokens, rows in zip(sizes.query_lens, sizes.context_rows, strict=True)
    ]
    first = cheaper.index(True) if True in cheaper else count
    ways = [_segments(sizes, split, capacity_rows) for split in dict.fromkeys((count, first, 0))]
    return min(ways, key=lambda segments: _cost(segments, sizes, topk, layout))


def moved_bytes(layout: RecordLayout) -> int:
    """Bytes that one gathered row reads and writes: its record, its BF16 row, and both indices."""
    return layout.row_bytes + 2 * layout.row_dim + 2 * _INDEX_BYTES


def _slot_bytes(tokens: int, topk: int, layout: RecordLayout) -> int:
    return tokens * topk * moved_bytes(layout)


def _context_bytes(tokens: int, rows: int, topk: int, layout: RecordLayout) -> int:
    return rows * moved_bytes(layout) + tokens * topk * 2 * _INDEX_BYTES + CONTEXT_OVERHEAD_BYTES


def _cost(segments: list[Segment], sizes: BatchSizes, topk: int, layout: RecordLayout) -> int:
    total = (len(segments) - 1) * SEGMENT_OVERHEAD_BYTES
    for segment in segments:
        tokens = segment.stop - segment.start
        if segment.plan == "slot":
            total += _slot_bytes(tokens, topk, layout)
        else:
            rows = sum(sizes.context_rows[segment.first : segment.last])
            total += _context_bytes(tokens, rows, topk, layout)
    return total


def _segments(sizes: BatchSizes, split: int, capacity_rows: int) -> list[Segment]:
    """Requests before `split` per slot; the rest per context, in groups that fit the workspace."""
    edges = [0]
    for tokens in sizes.query_lens:
        edges.append(edges[-1] + tokens)
    segments: list[Segment] = []

    def add(plan: Literal["slot", "context"], first: int, last: int) -> None:
        if edges[last] > edges[first]:
            segments.append(Segment(plan, first, last, edges[first], edges[last]))

    add("slot", 0, split)
    for first, last in _groups(sizes.context_rows, split, capacity_rows):
        fits = sum(sizes.context_rows[first:last]) <= capacity_rows
        add("context" if fits else "slot", first, last)
    return segments


def _groups(rows: Sequence[int], start: int, capacity: int) -> list[tuple[int, int]]:
    """Consecutive runs of requests from `start` whose rows fit `capacity`; a request that never fits stands alone."""
    groups: list[tuple[int, int]] = []
    first, held = start, 0
    for request in range(start, len(rows)):
        if held and held + rows[request] > capacity:
            groups.append((first, request))
            first, held = request, 0
        held += rows[request]
    if first < len(rows):
        groups.append((first, len(rows)))
    return groups
