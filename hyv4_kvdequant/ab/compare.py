"""Comparing what two backends made of one call, by the contract and not by the buffers.

For each filled entry, the rows that the two `compact_indices` point to are compared by bits (any NaN equals any other
NaN in the NoPE part), so a backend that stores a slot once and one that stores it twice compare equal. Unfilled
entries must be -1 on both sides. Nothing outside the rows is read through an index.
"""

from __future__ import annotations

import torch

from hyv4_kvdequant.ab.counters import COLUMN, ELEMENTS_PER_ENTRY, INDEX_ELEMENT, NOTHING_PENDING
from hyv4_kvdequant.contract import GatherCall

_ENTRIES_PER_PASS = 8192


def compare(call: GatherCall, shadow_kv: torch.Tensor, shadow_indices: torch.Tensor, counters: torch.Tensor) -> None:
    """Adds the comparison of one call to a layer's counters, on the device: no synchronisation, no allocation.

    Args:
        call: the primary's call, filled.
        shadow_kv: (num_rows, row_dim) bf16 and
        shadow_indices: (num_tokens, topk) int32, what the shadow made of it.
        counters: (len(FIELDS),) int64, one layer's row.
    """
    if counters.device.type == "cuda":
        from hyv4_kvdequant.ab.compare_triton import compare_triton

        compare_triton(call, shadow_kv, shadow_indices, counters)
    else:
        compare_torch(call, shadow_kv, shadow_indices, counters)


def ordered(bits: torch.Tensor) -> torch.Tensor:
    """bf16 bits (int16) as int32 that are ordered as the values are and differ by bf16 steps."""
    wide = bits.int()
    magnitude = wide & 0x7FFF
    return torch.where(wide < 0, -magnitude, magnitude)


def compare_torch(
    call: GatherCall, shadow_kv: torch.Tensor, shadow_indices: torch.Tensor, counters: torch.Tensor
) -> None:
    """`compare` in PyTorch, with bounded temporaries; allocates them, so not for graphs."""
    for start in range(0, call.topk_indices.numel(), _ENTRIES_PER_PASS):
        _compare_entries(call, shadow_kv, shadow_indices, counters, start)
    _settle_first(call, shadow_kv, shadow_indices, counters)
    counters[COLUMN["calls"]] += 1


def _compare_entries(
    call: GatherCall, shadow_kv: torch.Tensor, shadow_indices: torch.Tensor, counters: torch.Tensor, start: int
) -> None:
    part = slice(start, start + _ENTRIES_PER_PASS)
    slots = call.topk_indices.view(-1)[part]
    left, right = call.compact_indices.view(-1)[part], shadow_indices.view(-1)[part]
    filled = (slots >= 0) & (slots < call.num_slots)
    inside = (left >= 0) & (left < call.compact_kv.shape[0]) & (right >= 0) & (right < shadow_kv.shape[0])
    both = filled & inside
    disagree = (filled & ~inside) | (~filled & ((left != -1) | (right != -1)))
    left_bits = call.compact_kv.view(torch.int16)[left[both].long()]
    right_bits = shadow_kv.view(torch.int16)[right[both].long()]
    differ = _differ(left_bits, right_bits, call.layout.nope_dim)
    steps = torch.where(differ, (ordered(left_bits) - ordered(right_bits)).abs(), 0)

    counters[COLUMN["rows_compared"]] += both.sum()
    counters[COLUMN["rows_differ"]] += differ.any(1).sum()
    counters[COLUMN["elements_differ"]] += differ.sum()
    counters[COLUMN["index_disagreements"]] += disagree.sum()
    if steps.numel():
        counters[COLUMN["largest_ulp"]].clamp_(min=int(steps.max()))
    entries = start + both.nonzero().view(-1)
    wrong = differ.nonzero()
    keys = torch.cat(
        [
            entries[wrong[:, 0]] * ELEMENTS_PER_ENTRY + wrong[:, 1],
            (start + disagree.nonzero().view(-1)) * ELEMENTS_PER_ENTRY + INDEX_ELEMENT,
        ]
    )
    if keys.numel():
        counters[COLUMN["pending"]].clamp_(max=int(keys.min()))


def _differ(left: torch.Tensor, right: torch.Tensor, nope_dim: int) -> torch.Tensor:
    nan = ((left & 0x7FFF) > 0x7F80) & ((right & 0x7FFF) > 0x7F80)
    nan[:, nope_dim:] = False
    return (left != right) & ~nan


def _settle_first(
    call: GatherCall, shadow_kv: torch.Tensor, shadow_indices: torch.Tensor, counters: torch.Tensor
) -> None:
    pending = int(counters[COLUMN["pending"]])
    counters[COLUMN["pending"]] = NOTHING_PENDING
    if pending == NOTHING_PENDING or int(counters[COLUMN["first_call"]]) >= 0:
        return
    entry, element = divmod(pending, ELEMENTS_PER_ENTRY)
    left, right = int(call.compact_indices.view(-1)[entry]), int(shadow_indices.view(-1)[entry])
    found = (left, right)
    if element == INDEX_ELEMENT:
        element = -1
    else:
        rows = call.compact_kv.view(torch.int16), shadow_kv.view(torch.int16)
        found = (int(rows[0][left, element]) & 0xFFFF, int(rows[1][right, element]) & 0xFFFF)
    values = (int(counters[COLUMN["calls"]]), entry // call.topk, entry % call.topk, element)
    slot = int(call.topk_indices.view(-1)[entry])
    first = COLUMN["first_call"]
    counters[first : first + 7] = torch.tensor([*values, slot, *found], device=counters.device)
