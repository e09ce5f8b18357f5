"""The choice of plan: prefill goes by context, decode by slot, and every token belongs to one segment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hyv4_kvdequant import FP8_DS_MLA
from hyv4_kvdequant.plans.choice import BatchSizes, choose_segments

CAPACITY = 900_000


def plans(query_lens: list[int], context_rows: list[int], topk: int = 2048, capacity: int = CAPACITY) -> list[str]:
    sizes = BatchSizes(tuple(query_lens), tuple(context_rows))
    return [f"{s.plan}:{s.first}-{s.last}" for s in choose_segments(sizes, topk, capacity, FP8_DS_MLA)]


def test_one_long_prefill_goes_by_context() -> None:
    assert plans([8192], [32768]) == ["context:0-1"]
    assert plans([2048], [131072]) == ["context:0-1"]


def test_decode_goes_by_slot() -> None:
    assert plans([1] * 64, [131072] * 64) == ["slot:0-64"]
    assert plans([4] * 64, [32768] * 64) == ["slot:0-64"]


def test_a_short_prefill_beside_a_long_context_goes_by_slot() -> None:
    assert plans([16], [131072]) == ["slot:0-1"]


def test_decodes_before_prefills_are_split_where_both_win() -> None:
    assert plans([1] * 32 + [4096], [131072] * 32 + [32768]) == ["slot:0-32", "context:32-33"]


def test_a_context_that_does_not_fit_goes_by_slot() -> None:
    assert plans([8192], [32768], capacity=30_000) == ["slot:0-1"]


def test_contexts_that_do_not_fit_together_go_in_groups() -> None:
    assert plans([4096] * 3, [32768] * 3, capacity=70_000) == ["context:0-2", "context:2-3"]
    mixed = plans([4096] * 3, [32768, 90_000, 32768], capacity=70_000)
    assert mixed == ["context:0-1", "slot:1-2", "context:2-3"]


@given(
    lens=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), min_size=1, max_size=12),
    capacity=st.integers(1, 200_000),
    topk=st.sampled_from([1, 512, 2048]),
)
def test_segments_cover_every_token_once_and_fit(lens: list[tuple[int, int]], capacity: int, topk: int) -> None:
    sizes = BatchSizes(tuple(q for q, _ in lens), tuple(c * 64 for _, c in lens))
    segments = choose_segments(sizes, topk, capacity, FP8_DS_MLA)
    covered = [token for segment in segments for token in range(segment.start, segment.stop)]
    assert covered == list(range(sum(sizes.query_lens)))
    for segment in segments:
        assert sum(sizes.query_lens[segment.first : segment.last]) == segment.stop - segment.start
        if segment.plan == "context":
            assert sum(sizes.context_rows[segment.first : segment.last]) <= capacity
