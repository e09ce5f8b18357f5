"""Workspace size and chunks: whole waves, within the bound, requests kept together."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyv4_kvdequant import FP8_DS_MLA, ConfigurationError
from hyv4_kvdequant.plans.chunks import WorkspacePlan, chunk_bounds, plan_workspace


def test_the_default_bound_on_an_h200() -> None:
    plan = plan_workspace(1024, 2048, 8192, 132, FP8_DS_MLA)
    assert plan.rows * 1156 <= 1024 * 2**20
    assert plan.chunk_tokens == 453


def test_the_workspace_is_no_larger_than_useful() -> None:
    assert plan_workspace(1024, 512, 64, 132, FP8_DS_MLA).rows == 64 * 512


def test_a_shadow_halves_what_fits() -> None:
    alone = plan_workspace(1024, 2048, 8192, 132, FP8_DS_MLA)
    assert plan_workspace(1024, 2048, 8192, 132, FP8_DS_MLA, copies=2).rows == alone.rows // 2


def test_a_bound_below_one_wave_says_the_least_that_works() -> None:
    with pytest.raises(ConfigurationError, match="set it to 299 or more"):
        plan_workspace(298, 2048, 8192, 132, FP8_DS_MLA)
    assert plan_workspace(299, 2048, 8192, 132, FP8_DS_MLA).chunk_tokens >= 132


@given(
    tokens=st.integers(1, 9000),
    wave=st.sampled_from([1, 108, 132, 148]),
    waves=st.integers(1, 8),
    extra=st.integers(0, 131),
    width=st.sampled_from([1, 2, 3, 4, 16]),
)
def test_chunks_cover_every_token_once(tokens: int, wave: int, waves: int, extra: int, width: int) -> None:
    tokens = -(-tokens // width) * width
    chunk_tokens = max(wave * waves + extra % wave, width)
    chunks = chunk_bounds(tokens, WorkspacePlan(chunk_tokens * 8, chunk_tokens, wave), width)
    assert chunks[0][0] == 0
    assert chunks[-1][1] == tokens
    assert all(before[1] == after[0] for before, after in pairwise(chunks))
    sizes = [stop - start for start, stop in chunks]
    assert max(sizes) <= chunk_tokens
    assert all(size % width == 0 for size in sizes)
    if chunk_tokens >= -(-wave // width) * width:
        assert all(size >= wave for size in sizes[:-1]), "only the last chunk may be less than a wave"


def test_chunks_are_balanced() -> None:
    # 8192 tokens are 63 waves of 132; three waves fit at once, so 21 chunks of three waves each.
    sizes = [stop - start for start, stop in chunk_bounds(8192, WorkspacePlan(453 * 2048, 453, 132), 1)]
    assert set(sizes[:-1]) == {396}
    assert len(sizes) == 21
