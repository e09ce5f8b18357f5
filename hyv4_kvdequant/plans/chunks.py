"""How many tokens go through the workspace at a time: host-side arithmetic, so that graphs capture a fixed loop."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from hyv4_kvdequant.contract import ConfigurationError, RecordLayout
from hyv4_kvdequant.settings import variable_name

_MIB = 2**20
_INDEX_BYTES = 4


def sparse_wave(device: torch.device) -> int:
    """Tokens that the BF16 sparse kernel runs at once (one thread block a token): the multiprocessors; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def row_bytes(layout: RecordLayout, copies: int) -> int:
    """Workspace bytes of one selected slot: its BF16 row and its index, for each of `copies` backends."""
    return copies * (layout.row_dim * torch.bfloat16.itemsize + _INDEX_BYTES)


@dataclass(frozen=True)
class WorkspacePlan:
    """The size of the workspace and what fits into it.

    Attributes:
        rows: selected slots (BF16 rows) that fit at once.
        chunk_tokens: query tokens that fit at once.
        wave: tokens of one wave of the sparse kernel; a chunk is never smaller, except the last.
    """

    rows: int
    chunk_tokens: int
    wave: int


def plan_workspace(
    bound_mb: int, topk: int, max_tokens: int, wave: int, layout: RecordLayout, *, copies: int = 1, max_rows: int = 0
) -> WorkspacePlan:
    """Sizes the workspace within `bound_mb` MiB.

    Args:
        bound_mb: the upper bound, MiB.
        topk: selected slots a token.
        max_tokens: most query tokens of a batch.
        wave: tokens of one wave of the sparse kernel.
        layout: the cache's record.
        copies: backends that each get buffers: 1, or 2 with a shadow.
        max_rows: most rows that any plan could use; the workspace is not made larger than is useful.

    Raises:
        ConfigurationError: the bound does not hold one wave; the message has the least that works.
    """
    each = row_bytes(layout, copies)
    useful = max(max_tokens * topk, max_rows)
    rows = min(bound_mb * _MIB // each, useful)
    least_tokens = min(wave, max_tokens)
    if rows < least_tokens * topk:
        least_mb = -(-least_tokens * topk * each // _MIB)
        raise ConfigurationError(
            f"{variable_name('workspace_mb')} is {bound_mb}, which holds {rows // topk} query tokens of {topk} slots; "
            f"the sparse kernel wants {least_tokens} at once. What to do: set it to {least_mb} or more."
        )
    return WorkspacePlan(rows, rows // topk, wave)


def chunk_bounds(num_tokens: int, plan: WorkspacePlan, width: int) -> list[tuple[int, int]]:
    """Splits tokens [0, num_tokens) into chunks that fit the workspace: [(start, stop), ...].

    Chunks are whole waves, as even as possible, so that the number of waves is the least there can be; the
    tokens of one request (`width`) stay together.
    """
    if num_tokens <= plan.chunk_tokens:
        return [(0, num_tokens)]
    unit = min(-(-plan.wave // width) * width, plan.chunk_tokens // width * width)
    units = -(-num_tokens // unit)
    chunks = -(-units // (plan.chunk_tokens // unit))
    edges = [min(num_tokens, unit * (units * position // chunks)) for position in range(chunks + 1)]
    edges[-1] = num_tokens
    return list(pairwise(edges))
