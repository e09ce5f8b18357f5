"""The context plan's tables: any block size and gap, layers with other strides, and what changes under a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hyv4_kvdequant as h
from hyv4_kvdequant.hosts import intercept as intercept_module
from hyv4_kvdequant.hosts.intercept import AttentionCall, Batch, HostFacts, Intercept
from hyv4_kvdequant.plans.choice import BatchSizes, Segment
from hyv4_kvdequant.reference import sparse_attention, write_cache

TOPK, HEADS, ROW = 16, 2, 656


class _Step:
    """Stands for the host's metadata object."""


def make_intercept(topk: int = TOPK) -> Intercept:
    facts = HostFacts(torch.device("cpu"), topk, 64, 128)
    return Intercept(h.load_settings({"backend": "torch", "workspace_mb": 64}), facts)


def attention(query: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return sparse_attention(query, kv, indices, 0.04)


def flat_call(
    seed: int, lens: list[tuple[int, int]], block_rows: int, gap: int, *, step: object, num_blocks: int | None = None
) -> AttentionCall:
    """A batch on a cache whose blocks lie `gap` bytes apart.

    Blocks of 64 slots are handed over as they are, larger ones as the run of 64-slot pages between the first and the
    last, as hosts do, where the gaps allow it.
    """
    rng = np.random.default_rng(seed)
    most = max(-(-context // block_rows) for _, context in lens)
    # 64 blocks and one more: then any gap of whole records leaves a whole number of 64-slot pages.
    blocks = num_blocks or 65
    stride = block_rows * ROW + gap
    memory = torch.zeros((blocks - 1) * stride + block_rows * ROW, dtype=torch.uint8)
    cache = memory.as_strided((blocks, block_rows, ROW), (stride, ROW, 1))
    table = torch.from_numpy(np.stack([rng.permutation(blocks)[:most] for _ in lens]).astype(np.int32))
    used = np.unique(table.numpy())
    slots = torch.from_numpy((used[:, None] * block_rows + np.arange(block_rows)).ravel())
    kv = torch.from_numpy(rng.normal(size=(len(slots), 512)).astype(np.float32)).bfloat16()
    pe = torch.from_numpy(rng.normal(size=(len(slots), 64)).astype(np.float32)).bfloat16()
    write_cache(kv, pe, cache, slots)
    flat = block_rows > 64 and stride % ROW == 0 and memory.numel() % (64 * ROW) == 0
    apart = stride // ROW if flat else block_rows
    rows = []
    for request, (query, context) in enumerate(lens):
        positions = rng.integers(0, context, (query, TOPK))
        chosen = table[request].numpy()[positions // block_rows] * apart + positions % block_rows
        chosen[rng.random(chosen.shape) < 0.15] = -1
        rows.append(chosen)
    selected = torch.from_numpy(np.concatenate(rows).astype(np.int32))
    query = torch.from_numpy(rng.normal(size=(len(selected), HEADS, 576)).astype(np.float32)).bfloat16()
    sizes = BatchSizes(tuple(q for q, _ in lens), tuple(-(-c // block_rows) * block_rows for _, c in lens))
    stride_rows = None if stride % ROW else stride // ROW
    return AttentionCall(
        query,
        memory.view(-1, 64, ROW) if flat else cache,
        selected,
        1,
        "layer",
        step=step,
        batch=Batch(sizes, table, block_rows, stride_rows),
    )


def run(intercept: Intercept, call: AttentionCall) -> tuple[torch.Tensor, Any]:
    memory = torch.full((intercept.workspace_bytes,), 0xFF, dtype=torch.uint8)
    return intercept.attend(call, attention, lambda _: memory)


@pytest.fixture(autouse=True)
def _context_plan_wherever_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_context(sizes: BatchSizes, *_: Any) -> list[Segment]:
        return [Segment("context", 0, len(sizes.query_lens), 0, sum(sizes.query_lens))]

    monkeypatch.setattr(intercept_module, "choose_segments", by_context)


def assert_as_per_slot(intercept: Intercept, call: AttentionCall) -> None:
    expected = run(make_intercept(), replace(call, batch=None))
    got = run(intercept, call)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    lens=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 300)), min_size=1, max_size=3),
    block_rows=st.sampled_from([64, 128, 256]),
    gap=st.one_of(st.integers(0, 64).map(lambda rows: rows * ROW), st.integers(0, 600).map(lambda n: n * 4)),
)
def test_any_block_size_and_gap_give_what_the_per_slot_plan_gives(
    seed: int, lens: list[tuple[int, int]], block_rows: int, gap: int
) -> None:
    intercept = make_intercept()
    assert_as_per_slot(intercept, flat_call(seed, lens, block_rows, gap, step=_Step()))
    assert int(intercept.lost_counter("layer")) == 0


@pytest.mark.parametrize("gap_rows", [1, 13, 32])
def test_a_gap_that_is_no_whole_number_of_pages(gap_rows: int) -> None:
    intercept = make_intercept()
    assert_as_per_slot(intercept, flat_call(1, [(6, 300), (5, 128)], 128, gap_rows * ROW, step=_Step()))
    assert intercept.plans_taken["context"] == 1


@pytest.mark.parametrize("others", [(128, 64), (64, 0)])
def test_layers_with_other_strides_in_one_step(others: tuple[int, int]) -> None:
    step, intercept = _Step(), make_intercept()
    first = flat_call(2, [(6, 300), (5, 128)], 128, 0, step=step)
    # Same blocks of the same requests; another layer's cache lies differently.
    second = flat_call(2, [(6, 300), (5, 128)], 128, others[1] * ROW, step=step)
    assert first.batch is not None
    second = replace(second, batch=replace(second.batch, block_table=first.batch.block_table), layer="second")
    for call in (first, second, first):
        assert_as_per_slot(intercept, call)


def test_pages_of_another_size_than_announced() -> None:
    for pages in (32, 128):
        call = flat_call(3, [(6, 300)], pages, 0, step=_Step())
        assert_as_per_slot(make_intercept(), call)


def test_a_block_table_changed_in_place_under_the_same_step_object() -> None:
    step, intercept = _Step(), make_intercept()
    first = flat_call(4, [(6, 300), (5, 128)], 64, 0, step=step)
    second = flat_call(5, [(6, 300), (5, 128)], 64, 0, step=step)
    assert_as_per_slot(intercept, first)
    assert first.batch is not None
    assert second.batch is not None
    first.batch.block_table.copy_(second.batch.block_table)
    assert_as_per_slot(intercept, replace(second, batch=replace(second.batch, block_table=first.batch.block_table)))


def test_other_lengths_under_the_same_step_object() -> None:
    step, intercept = _Step(), make_intercept()
    assert_as_per_slot(intercept, flat_call(6, [(6, 300), (5, 128)], 64, 0, step=step))
    assert_as_per_slot(intercept, flat_call(7, [(5, 128), (6, 300)], 64, 0, step=step))


# --- filled entries that get lost ---


def test_lengths_that_are_too_small_are_counted() -> None:
    intercept = make_intercept()
    call = flat_call(8, [(6, 300), (5, 128)], 64, 0, step=_Step())
    assert call.batch is not None
    short = replace(call.batch, sizes=BatchSizes((6, 5), (64, 128)))
    run(intercept, replace(call, batch=short))
    first_request = call.topk_indices[:6]
    held = first_request // 64 == call.batch.block_table[0, 0]
    second = (first_request.unsqueeze(-1) // 64 == call.batch.block_table[1, :2]).any(-1)
    expected = int(((first_request >= 0) & ~held & ~second).sum())
    assert expected > 0
    assert int(intercept.lost_counter("layer")) == expected


WRONG = {
    "queries": ((6, 4), (320, 128), slice(None)),
    "contexts": ((6, 5), (320,), slice(None)),
    "more rows than the block table is wide": ((6, 5), (320 + 64, 128), slice(None)),
    "no whole blocks": ((6, 5), (300, 128), slice(None)),
    "fewer rows in the block table": ((6, 5), (320, 128), slice(0, 1)),
}


@pytest.mark.parametrize("kind", WRONG)
def test_lists_that_do_not_fit_the_batch_take_the_per_slot_plan(kind: str) -> None:
    query_lens, context_rows, table_rows = WRONG[kind]
    call = flat_call(9, [(6, 300), (5, 128)], 64, 0, step=_Step())
    assert call.batch is not None
    wrong = replace(
        call.batch, sizes=BatchSizes(query_lens, context_rows), block_table=call.batch.block_table[table_rows]
    )
    intercept = make_intercept()
    assert_as_per_slot(intercept, replace(call, batch=wrong))
    assert intercept.plans_taken == {"slot": 1}


# --- calls that were not expected ---


def test_a_wider_selection_than_reserved_says_which_number_came_from_where() -> None:
    call = flat_call(10, [(6, 300)], 64, 0, step=_Step())
    with pytest.raises(h.InvalidCallError, match=r"16 entries a token, but the workspace was reserved for 8"):
        run(make_intercept(topk=8), call)


def test_a_narrower_selection_is_served_with_a_kept_mapping_too() -> None:
    call = flat_call(11, [(6, 300)], 64, 0, step=_Step())
    intercept = make_intercept(topk=2 * TOPK)
    intercept.keep_mappings()
    assert_as_per_slot(intercept, call)


@pytest.mark.parametrize("change", ["dtype", "rows"])
def test_indices_of_another_form(change: str) -> None:
    call = flat_call(12, [(6, 300)], 64, 0, step=_Step())
    slots = call.topk_indices.long() if change == "dtype" else call.topk_indices[:5]
    with pytest.raises(h.InvalidCallError, match="expected int32, \\(6, topk\\)"):
        run(make_intercept(), replace(call, topk_indices=slots))
