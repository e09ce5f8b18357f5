"""Hypothesis strategies for gather calls, part by part and whole. Needs the `testing` extra.

@given(cases())
def test_mine(case):
    assert check_case(backend, case) == []
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from hyv4_kvdequant.contract import FP8_DS_MLA, RecordLayout
from hyv4_kvdequant.records import put_parts
from hyv4_kvdequant.records.fp8_ds_mla import SCALES
from hyv4_kvdequant.testing.cases import UNFILLED_SLOTS, Case, make_cache

_RNG_SEEDS = st.integers(0, 2**32 - 1)


def scales() -> st.SearchStrategy[float]:
    """Any fp32 tile scale, the awkward ones often."""
    any_float = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
    return st.one_of(st.sampled_from(SCALES), any_float)


@st.composite
def records(draw: st.DrawFn, layout: RecordLayout = FP8_DS_MLA) -> torch.Tensor:
    """One record (row_bytes,) uint8: a few drawn bytes, scales and RoPE bits, repeated over its fields."""
    nope = draw(st.lists(st.integers(0, 255), min_size=1, max_size=16))
    tiles = draw(st.lists(scales(), min_size=1, max_size=layout.num_tiles))
    rope = draw(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=8))
    record = torch.zeros(layout.row_bytes, dtype=torch.uint8, device="cpu")
    put_parts(
        layout,
        record,
        nope=torch.from_numpy(np.resize(np.array(nope, np.uint8), layout.nope_dim)),
        scale=torch.from_numpy(np.resize(np.array(tiles, np.float32), layout.num_tiles)),
        rope=torch.from_numpy(np.resize(np.array(rope, np.uint16), layout.rope_dim).view(np.int16)),
    )
    return record


def block_sizes() -> st.SearchStrategy[int]:
    """Slots in a block."""
    return st.sampled_from([64, 1, 16, 128])


def block_gaps(layout: RecordLayout = FP8_DS_MLA) -> st.SearchStrategy[int]:
    """Bytes between two blocks: none, whole records, or any multiple of the record's alignment."""
    odd = st.integers(1, 1024).map(lambda count: count * layout.alignment)
    return st.one_of(st.just(0), st.integers(1, 5).map(lambda count: count * layout.row_bytes), odd)


def request_widths() -> st.SearchStrategy[int]:
    """Query rows of one request."""
    return st.one_of(st.just(1), st.integers(2, 5))


@st.composite
def caches(draw: st.DrawFn, layout: RecordLayout = FP8_DS_MLA) -> torch.Tensor:
    """A cache (num_blocks, block_size, row_bytes) uint8 of 1 to 4 blocks: random records, with drawn ones among them.

    The drawn records stand at the first slots, at the last one, and on both sides of a block edge.
    """
    block_size = draw(block_sizes())
    rng = np.random.default_rng(draw(_RNG_SEEDS))
    cache = make_cache(rng, draw(st.integers(1, 4)), block_size, gap=draw(block_gaps(layout)), layout=layout)
    drawn = draw(st.lists(records(layout), min_size=1, max_size=4))
    num_slots = cache.shape[0] * block_size
    places = (0, num_slots - 1, block_size % num_slots, block_size - 1)
    for place, record in zip(places, drawn, strict=False):
        cache[place // block_size, place % block_size] = record
    return cache


@st.composite
def slots(draw: st.DrawFn, num_slots: int, num_tokens: int, width: int = 1) -> torch.Tensor:
    """Selected slots (num_tokens, topk) int32 of a cache of `num_slots`: edges often, unfilled on both sides.

    Rows of one request (`width` adjacent ones) share most of their slots.
    """
    topk = draw(st.sampled_from([16, 1, 2, 7, 33, 5, 24, 0]))
    rng = np.random.default_rng(draw(_RNG_SEEDS))
    edges = [0, num_slots - 1, num_slots // 2, num_slots, num_slots + 1, *UNFILLED_SLOTS]
    pool = np.array([*edges, *rng.integers(0, num_slots, 2 * len(edges))], np.int64)
    common = np.repeat(rng.choice(pool, (num_tokens // width, topk)), width, axis=0)
    chosen = np.where(rng.random(common.shape) < 7 / 8, common, rng.choice(pool, common.shape))
    chosen[rng.random(chosen.shape) < draw(st.sampled_from([0.0, 0.1, 0.5, 0.9]))] = -1
    return torch.from_numpy(chosen.astype(np.int32))


@st.composite
def cases(draw: st.DrawFn, layout: RecordLayout = FP8_DS_MLA) -> Case:
    """A whole call: cache, strides, slots and request width."""
    cache = draw(caches(layout))
    width = draw(request_widths())
    num_tokens = width * draw(st.sampled_from([1, 2, 3, 4, 5, 0]))
    selected = draw(slots(cache.shape[0] * cache.shape[1], num_tokens, width))
    return Case("drawn", cache, selected, width, layout)
