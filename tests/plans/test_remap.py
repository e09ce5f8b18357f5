"""The context plan's tables and remap, in both forms."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from hyv4_kvdequant.plans.remap import BlockNumbering, build_tables, remap_slots


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_rows_follow_the_block_tables() -> None:
    tables = build_tables(table([5, 2, 9], [0, 7, 3]), [2, 3], BlockNumbering(64, 64, 640))
    assert tables.slots.shape == (5, 64)
    assert tables.slots[:, 0].tolist() == [320, 128, 0, 448, 192]
    out = torch.empty(1, 6, dtype=torch.int32)
    slots = table([5 * 64 + 1, 2 * 64 + 63, 3 * 64, -1, 10 * 64, 9 * 64])
    lost = torch.tensor([7])
    remap_slots(slots, tables, out, lost)
    # 9 lies past the first request's two blocks, so no context holds it: the one filled entry that got lost.
    assert out.tolist() == [[1, 127, 256, -1, -1, -1]]
    assert lost.tolist() == [8]


def test_a_shared_prefix_maps_to_one_of_two_equal_rows_always_the_same() -> None:
    tables = build_tables(table([4, 1], [4, 2]), [2, 2], BlockNumbering(64, 64, 320))
    assert tables.row_of_block.tolist() == [-1, 64, 192, -1, 128]


def test_blocks_of_several_pages_with_pages_of_other_layers_between() -> None:
    tables = build_tables(table([2, 1]), [2], BlockNumbering(128, 6 * 64, 18 * 64))
    assert tables.slots[:, [0, 64]].flatten().tolist() == [12 * 64, 13 * 64, 6 * 64, 7 * 64]


def test_what_lies_past_a_context_in_its_block_table_stays_inside_the_cache() -> None:
    tables = build_tables(table([1, -7, 10**6]), [3], BlockNumbering(64, 64, 256))
    assert int(tables.slots.min()) >= 0
    assert int(tables.slots.max()) < 4 * 64


BOTH_FORMS = """
import torch
from hyv4_kvdequant.plans.remap import BlockNumbering, ContextTables, remap_slots_torch
from hyv4_kvdequant.plans.remap_triton import remap_slots_triton
generator = torch.Generator().manual_seed(0)
some_lost = 0
for blocks, (size, stride), shape in (
    (1, (64, 64), (1, 1)),
    (7, (64, 64), (3, 5)),
    (50, (64, 77), (9, 333)),
    (50, (128, 141), (2, 1100)),
    (5, (64, 64), (0, 4)),
):
    row_of_block = torch.randint(-1, 5, (blocks,), generator=generator, dtype=torch.int32) * size
    row_of_block[row_of_block < 0] = -1
    numbering = BlockNumbering(size, stride, (blocks - 1) * stride + size)
    slots = torch.randint(-3, numbering.num_slots + 5, shape, generator=generator, dtype=torch.int32)
    if slots.numel() > 4:
        ends = [-(2**31), 2**31 - 1, numbering.num_slots, numbering.num_slots - 1]
        slots.view(-1)[:4] = torch.tensor(ends, dtype=torch.int32)
    tables = ContextTables(torch.empty(0), row_of_block, numbering)
    expected, got = torch.full_like(slots, 77), torch.full_like(slots, 78)
    lost, triton_lost = torch.tensor([3]), torch.tensor([3])
    remap_slots_torch(slots, tables, expected, lost)
    if slots.numel():
        remap_slots_triton(slots, row_of_block, got, triton_lost, **vars(numbering))
        assert torch.equal(expected, got), (blocks, shape)
    assert torch.equal(lost, triton_lost)
    some_lost += int(lost) - 3
assert some_lost
print("equal")
"""


def test_the_triton_form_gives_the_same_bits() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", BOTH_FORMS], capture_output=True, text=True, env=env, check=False)
    assert "equal" in done.stdout, done.stderr
