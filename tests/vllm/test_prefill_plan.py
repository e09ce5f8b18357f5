"""The context plan on the real attention class: same bits as the per-slot plan, over ragged batches."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from batches import forward, make_batch

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_process")]

TOPK = 128


@pytest.fixture(autouse=True)
def _context_plan_pays_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the sizes of a test, launches outweigh bytes; without that term the model chooses as for long prompts."""
    monkeypatch.setattr("hyv4_kvdequant.plans.choice.CONTEXT_OVERHEAD_BYTES", 0)
    monkeypatch.setattr("hyv4_kvdequant.plans.choice.SEGMENT_OVERHEAD_BYTES", 0)


BATCHES: dict[str, dict[str, Any]] = {
    "one_prefill": {"lens": [(20, 20)]},
    "continued_prefill": {"lens": [(20, 150)]},
    "several": {"lens": [(20, 150), (9, 64), (11, 65)]},
    "shared_prefix": {"lens": [(20, 150), (20, 130)], "shared_prefix": 2},
    "decode_before_prefill": {"lens": [(1, 200), (1, 64), (20, 150)]},
    "block_edges": {"lens": [(10, 63), (10, 64), (10, 65), (10, 128)]},
    "width_4": {"lens": [(4, 100)] * 4},
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("workspace_mb", [1024, 1])
def test_plans_give_the_same_bits(name: str, workspace_mb: int) -> None:
    config = harness.make_config({"hyv4_kvdequant": {"workspace_mb": workspace_mb}})
    impl = harness.build_impl(config, topk=TOPK, sinks=torch.zeros(8))
    batch = make_batch(BATCHES[name]["lens"], topk=TOPK, shared_prefix=BATCHES[name].get("shared_prefix", 0))
    taken = impl._hyv4_kvdequant_layer.intercept.plans_taken
    before = taken["context"]
    out, lse = forward(impl, batch)
    assert taken["context"] > before
    slot_out, slot_lse = forward(impl, batch, batch.without_sizes())
    assert torch.equal(out, slot_out)
    assert torch.equal(lse, slot_lse)


def test_the_builder_keeps_the_sizes_it_gets_on_the_cpu() -> None:
    from types import SimpleNamespace

    from vllm.models.hy_v4.nvidia.flashmla_sparse import HYV4FlashMLASparseBackend
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

    from hyv4_kvdequant.hosts.vllm_mainline import _lens

    common = SimpleNamespace(
        query_start_loc_cpu=torch.tensor([0, 1, 4]), seq_lens_cpu_upper_bound=torch.tensor([70, 3])
    )
    assert _lens(common) == ([1, 3], [70, 3])
    ours, theirs = HYV4FlashMLASparseBackend.get_builder_cls(), FlashMLASparseBackend.get_builder_cls()
    assert issubclass(ours, theirs)
    assert ours is HYV4FlashMLASparseBackend.get_builder_cls()
    assert not hasattr(theirs.build, "__wrapped__"), "other models keep vLLM's builder"


def test_a_ranks_shard_of_the_context_under_dcp() -> None:
    from types import SimpleNamespace

    from hyv4_kvdequant.hosts.vllm_mainline import batch_of

    metadata = SimpleNamespace(
        hyv4_kvdequant_lens=([4], [1000]),
        block_size=64,
        block_table=torch.zeros(1, 20, dtype=torch.int32),
        cp_kv_cache_interleave_size=1,
    )
    cache = torch.zeros(2, 64, 656, dtype=torch.uint8)
    for ranks, rows in ((1, 1024), (2, 512), (4, 256)):
        batch = batch_of(SimpleNamespace(dcp_world_size=ranks), metadata, cache)
        assert batch is not None
        assert batch.sizes.context_rows == (rows,)
