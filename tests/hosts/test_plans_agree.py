"""Both plans through the whole intercept: same attention output and LSE, bit for bit, over ragged batches."""

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

TOPK, PAGES, HEADS = 16, 24, 2


def make_intercept(workspace_rows: int | None = None) -> Intercept:
    intercept = Intercept(h.load_settings({"backend": "torch"}), HostFacts(torch.device("cpu"), TOPK, 64, 128))
    if workspace_rows is not None:
        intercept.plan = intercept_module.plan_workspace(1, TOPK, workspace_rows // TOPK, 1, h.FP8_DS_MLA)
        intercept.workspace = intercept_module.Workspace(intercept.plan.rows, 1, h.FP8_DS_MLA)
    return intercept


def make_call(seed: int, lens: list[tuple[int, int]], *, shared_prefix: int = 0, gap: int = 0) -> AttentionCall:
    """Requests of (query tokens, context slots) whose rows select from their own context, some entries unfilled."""
    rng = np.random.default_rng(seed)
    memory = torch.zeros(PAGES, 64 * 656 + gap, dtype=torch.uint8)
    cache = memory.as_strided((PAGES, 64, 656), (64 * 656 + gap, 656, 1))
    total = PAGES * 64
    kv = torch.from_numpy(rng.normal(size=(total, 512)).astype(np.float32)).bfloat16()
    pe = torch.from_numpy(rng.normal(size=(total, 64)).astype(np.float32)).bfloat16()
    write_cache(kv, pe, cache, torch.arange(total))
    most = max(-(-context // 64) for _, context in lens)
    table = torch.from_numpy(np.stack([rng.permutation(PAGES)[:most] for _ in lens]).astype(np.int32))
    table[:, :shared_prefix] = table[0, :shared_prefix]
    rows = []
    for request, (query, context) in enumerate(lens):
        positions = rng.integers(0, max(context, 1), (query, TOPK))
        slots = table[request].numpy()[positions // 64] * 64 + positions % 64
        slots[rng.random(slots.shape) < 0.15] = rng.choice([-1, -2, total, total + 64])
        rows.append(slots)
    slots = torch.from_numpy(np.concatenate(rows).astype(np.int32))
    query = torch.from_numpy(rng.normal(size=(len(slots), HEADS, 576)).astype(np.float32)).bfloat16()
    sizes = BatchSizes(tuple(q for q, _ in lens), tuple(-(-context // 64) * 64 for _, context in lens))
    batch = Batch(sizes, table, block_rows=64, block_stride_rows=64)
    return AttentionCall(query, cache, slots, 1, "layer", step=_Step(), batch=batch)


class _Step:
    """Stands for the host's metadata object: what matters is which one it is."""


def attention(query: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return sparse_attention(query, kv, indices, 0.04)


def run(intercept: Intercept, call: AttentionCall, segments: list[Segment]) -> tuple[torch.Tensor, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intercept_module, "choose_segments", lambda *_: segments)
        memory = torch.full((intercept.workspace_bytes,), 0xFF, dtype=torch.uint8)
        return intercept.attend(call, attention, lambda _: memory)


def every_way(call: AttentionCall) -> dict[str, list[Segment]]:
    assert call.batch is not None
    lens = call.batch.sizes.query_lens
    edges = np.cumsum([0, *lens]).tolist()
    total, count = edges[-1], len(lens)
    return {
        "slot": [Segment("slot", 0, count, 0, total)],
        "context": [Segment("context", 0, count, 0, total)],
        "split": [Segment("slot", 0, 1, 0, edges[1]), Segment("context", 1, count, edges[1], total)],
        "each": [Segment("context", i, i + 1, edges[i], edges[i + 1]) for i in range(count)],
    }


def assert_all_agree(call: AttentionCall, intercept: Intercept) -> None:
    ways = every_way(call)
    expected_out, expected_lse = run(intercept, call, ways.pop("slot"))
    for name, segments in ways.items():
        before = intercept.plans_taken["context"]
        # A step of its own: within one, the first way's segments would be kept.
        out, lse = run(intercept, replace(call, step=_Step()), [s for s in segments if s.stop > s.start])
        assert intercept.plans_taken["context"] > before, name
        assert torch.equal(out, expected_out), name
        assert torch.equal(lse, expected_lse), name


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    lens=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 200)), min_size=2, max_size=4),
    prefix=st.integers(0, 2),
    gap=st.sampled_from([0, 64 * 656 * 2, 128]),
)
def test_plans_agree_on_ragged_batches(seed: int, lens: list[tuple[int, int]], prefix: int, gap: int) -> None:
    assert_all_agree(make_call(seed, lens, shared_prefix=prefix, gap=gap), make_intercept())


@pytest.mark.parametrize("context", [63, 64, 65, 128, 129])
def test_contexts_at_block_edges(context: int) -> None:
    assert_all_agree(make_call(1, [(5, context), (5, context)]), make_intercept())


def test_plans_agree_in_a_workspace_that_cuts_the_tokens() -> None:
    # 12 tokens at a time: contexts of 3 pages fit, 30 tokens do not.
    assert_all_agree(make_call(2, [(15, 100), (15, 60)]), make_intercept(workspace_rows=192))


def test_the_choice_is_the_cost_models_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    intercept = make_intercept()
    call = make_call(3, [(12, 200), (12, 200)])
    memory = torch.empty(intercept.workspace_bytes, dtype=torch.uint8)
    intercept.attend(call, attention, lambda _: memory)
    assert intercept.plans_taken == {"slot": 1}
    monkeypatch.setattr("hyv4_kvdequant.plans.choice.CONTEXT_OVERHEAD_BYTES", -(10**9))
    intercept.attend(replace(call, step=object()), attention, lambda _: memory)
    assert intercept.plans_taken == {"slot": 1, "context": 1}


@pytest.mark.parametrize("plan", ["slot", "context"])
def test_layers_that_share_an_indexer_reuse_the_mapping_and_no_others(
    monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    remapped: list[int] = []
    real = intercept_module.remap_slots

    def counting(slots: torch.Tensor, *others: Any) -> None:
        remapped.append(len(slots))
        real(slots, *others)

    monkeypatch.setattr(intercept_module, "remap_slots", counting)
    intercept = make_intercept()
    intercept.keep_mappings()
    full = make_call(4, [(6, 100), (6, 150)])
    other = make_call(5, [(6, 100), (6, 150)])
    shared = replace(full, shares_indices=True, kv_cache=other.kv_cache, layer="shared")
    next_step = replace(shared, step=_Step())
    segments = every_way(full)[plan]
    expected = {id(call): run(make_intercept(), call, segments) for call in (full, shared)}
    remapped.clear()
    for call, made in ((full, 1), (shared, 1), (shared, 1), (next_step, 2), (full, 3), (shared, 3)):
        out, lse = run(intercept, call, segments)
        reference = expected.get(id(call), expected[id(shared)])
        assert torch.equal(out, reference[0])
        assert torch.equal(lse, reference[1])
        assert len(remapped) == (made if plan == "context" else 0)
