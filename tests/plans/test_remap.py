"""The context plan's tables and remap, in both forms."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from hyv4_kvdequant.plans.remap import build_tables, remap_slots


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_rows_follow_the_block_tables() -> None:
    tables = build_tables(table([5, 2, 9], [0, 7, 3]), [2, 3], cache_pages=10)
    assert tables.slots.shape == (5, 64)
    assert tables.slots[:, 0].tolist() == [320, 128, 0, 448, 192]
    out = torch.empty(1, 6, dtype=torch.int32)
    slots = table([5 * 64 + 1, 2 * 64 + 63, 3 * 64, -1, 10 * 64, 9 * 64])
    remap_slots(slots, tables.row_of_page, out)
    # 9 lies past the first request's two blocks, so no context holds it.
    assert out.tolist() == [[1, 127, 256, -1, -1, -1]]


def test_a_shared_prefix_maps_to_one_of_two_equal_rows_always_the_same() -> None:
    tables = build_tables(table([4, 1], [4, 2]), [2, 2], cache_pages=5)
    assert tables.row_of_page.tolist() == [-1, 64, 192, -1, 128]


def test_blocks_of_several_pages_with_pages_of_other_layers_between() -> None:
    tables = build_tables(table([2, 1]), [2], cache_pages=18, pages_per_block=2, page_stride=6)
    assert tables.slots[:, 0].tolist() == [12 * 64, 13 * 64, 6 * 64, 7 * 64]


def test_what_lies_past_a_context_in_its_block_table_stays_inside_the_cache() -> None:
    tables = build_tables(table([1, -7, 10**6]), [3], cache_pages=4)
    assert int(tables.slots.min()) >= 0
    assert int(tables.slots.max()) < 4 * 64


BOTH_FORMS = """
import torch
from hyv4_kvdequant.plans.remap import remap_slots_torch
from hyv4_kvdequant.plans.remap_triton import remap_slots_triton
generator = torch.Generator().manual_seed(0)
for pages, shape in ((1, (1, 1)), (7, (3, 5)), (50, (9, 333)), (50, (0, 4))):
    row_of_page = torch.randint(-1, 5, (pages,), generator=generator, dtype=torch.int32) * 64
    row_of_page[row_of_page < 0] = -1
    slots = torch.randint(-3, pages * 64 + 5, shape, generator=generator, dtype=torch.int32)
    if slots.numel() > 4:
        slots.view(-1)[:4] = torch.tensor([-(2**31), 2**31 - 1, pages * 64, pages * 64 - 1], dtype=torch.int32)
    expected, got = torch.full_like(slots, 77), torch.full_like(slots, 78)
    remap_slots_torch(slots, row_of_page, expected)
    if slots.numel():
        remap_slots_triton(slots, row_of_page, got)
        assert torch.equal(expected, got), (pages, shape)
print("equal")
"""


def test_the_triton_form_gives_the_same_bits() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", BOTH_FORMS], capture_output=True, text=True, env=env, check=False)
    assert "equal" in done.stdout, done.stderr
