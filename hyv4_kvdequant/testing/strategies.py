"""Hypothesis strategies for gather calls. Needs the `testing` extra."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from hyv4_kvdequant.testing.cases import SCALES, Case, make_cache

_EDGE_INTS = (-(2**31), -2, -1, 2**30, 2**31 - 1)


def scales() -> st.SearchStrategy[float]:
    """Any fp32 tile scale, the awkward ones often."""
    any_float = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
    return st.one_of(st.sampled_from(SCALES), any_float)


def request_widths() -> st.SearchStrategy[int]:
    """Tokens per request."""
    return st.sampled_from([1, 1, 2, 3, 4])


def block_strides() -> st.SearchStrategy[int]:
    """Bytes between two blocks beyond the packed ones."""
    return st.sampled_from([0, 0, 4, 64, 100, 656, 4096])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A whole call: cache, strides, slots and request width."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    block_size = draw(st.sampled_from([1, 16, 64, 128]))
    num_blocks = draw(st.integers(1, 4))
    cache = make_cache(rng, num_blocks, block_size, gap=draw(block_strides()))
    drawn = np.array(draw(st.lists(scales(), min_size=1, max_size=8)), np.float32)
    tiles = np.resize(drawn, (num_blocks, block_size, 4)).astype("<f4")
    cache[..., 512:528] = _as_bytes(tiles)
    width = draw(request_widths())
    shape = (width * draw(st.integers(0, 3)), draw(st.sampled_from([0, 1, 2, 7, 16, 33])))
    num_slots = num_blocks * block_size
    slots = rng.integers(0, num_slots, shape, dtype=np.int64)
    odd = rng.random(shape) < draw(st.sampled_from([0.0, 0.1, 0.9, 1.0]))
    slots[odd] = rng.choice([*_EDGE_INTS, num_slots, num_slots - 1], int(odd.sum()))
    return Case("drawn", cache, _as_slots(slots), width)


def _as_bytes(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.view(np.uint8).copy())


def _as_slots(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))
