"""Inputs that break kernels: one generator, deterministic under a seed.

Each builder below makes one named `Case`. Caches are filled with random bytes (so every e4m3 byte and many NaN
occur), tile scales are drawn from `SCALES`, and the memory between blocks is filled with bytes that decode to NaN.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hyv4_kvdequant.contract import FP8_DS_MLA, RecordLayout

# Scales that make ties (odd multiples of 2**-8 next to 1), overflow, subnormal products, and the special values.
SCALES = (
    1.0,
    1.0 + 2.0**-8,
    1.0 + 3 * 2.0**-8,
    1.0 + 2.0**-8 + 2.0**-20,
    1.0 + 2.0**-8 - 2.0**-20,
    -(1.0 + 5 * 2.0**-8),
    0.0123456789,
    3.0 / 448,
    1e38,
    3.4e38,
    1e-38,
    2.0**-126,
    2.0**-133,
    1e-42,
    2.0**-149,
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
)
_GAP_FILL = 0xFF
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True, eq=False)
class Case:
    """One input of a gather call: `kv_cache` and `topk_indices` as in `GatherCall`, and what it is meant to catch."""

    name: str
    kv_cache: torch.Tensor
    topk_indices: torch.Tensor
    tokens_per_request: int = 1
    layout: RecordLayout = FP8_DS_MLA

    @property
    def num_slots(self) -> int:
        return self.kv_cache.shape[0] * self.kv_cache.shape[1]

    def records(self, slots: torch.Tensor) -> torch.Tensor:
        """The records of valid slots (n,): (n, row_bytes) uint8 on the CPU."""
        block_size = self.kv_cache.shape[1]
        slots = slots.long().to(self.kv_cache.device)
        return self.kv_cache[slots // block_size, slots % block_size].cpu()


def make_cache(
    rng: np.random.Generator,
    num_blocks: int,
    block_size: int,
    *,
    gap: int = 0,
    layout: RecordLayout = FP8_DS_MLA,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A cache of random records with `gap` bytes between blocks: (num_blocks, block_size, row_bytes) uint8."""
    packed = block_size * layout.row_bytes
    blocks = rng.integers(0, 256, (num_blocks, block_size, layout.row_bytes), dtype=np.uint8)
    scales = rng.choice(np.array(SCALES, np.float32), (num_blocks, block_size, layout.num_tiles))
    plain = rng.random(scales.shape) < 0.5
    scales[plain] = rng.lognormal(-4, 2, int(plain.sum())).astype(np.float32)
    end = layout.scale_offset + 4 * layout.num_tiles
    blocks[..., layout.scale_offset : end] = scales.astype("<f4").view(np.uint8)
    pages = np.full((num_blocks, packed + gap), _GAP_FILL, np.uint8)
    pages[:, :packed] = blocks.reshape(num_blocks, packed)
    memory = torch.from_numpy(pages).to(device)
    return memory.as_strided((num_blocks, block_size, layout.row_bytes), (packed + gap, layout.row_bytes, 1))


def _slots(values: object, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.int64).astype(np.int32)).to(device)


def _draw(rng: np.random.Generator, num_slots: int, shape: tuple[int, int], unfilled: float = 0.1) -> np.ndarray:
    slots = rng.integers(0, num_slots, shape)
    slots[rng.random(shape) < unfilled] = -1
    return slots


Builder = Callable[[np.random.Generator, torch.device], Case]
BUILDERS: dict[str, Builder] = {}


def _builder(function: Builder) -> Builder:
    BUILDERS[function.__name__] = function
    return function


@_builder
def random_slots(rng: np.random.Generator, device: torch.device) -> Case:
    return Case("", make_cache(rng, 5, 64, device=device), _slots(_draw(rng, 320, (5, 48)), device))


@_builder
def block_size_1(rng: np.random.Generator, device: torch.device) -> Case:
    return Case("", make_cache(rng, 37, 1, device=device), _slots(_draw(rng, 37, (3, 16)), device))


@_builder
def block_size_16(rng: np.random.Generator, device: torch.device) -> Case:
    return Case("", make_cache(rng, 7, 16, device=device), _slots(_draw(rng, 112, (3, 16)), device))


@_builder
def block_size_128(rng: np.random.Generator, device: torch.device) -> Case:
    return Case("", make_cache(rng, 2, 128, device=device), _slots(_draw(rng, 256, (3, 16)), device))


@_builder
def block_size_not_a_power_of_two(rng: np.random.Generator, device: torch.device) -> Case:
    return Case("", make_cache(rng, 5, 48, device=device), _slots(_draw(rng, 240, (3, 16)), device))


@_builder
def gaps_between_blocks(rng: np.random.Generator, device: torch.device) -> Case:
    cache = make_cache(rng, 6, 16, gap=3 * 656, device=device)
    return Case("", cache, _slots(_draw(rng, 96, (4, 32)), device))


@_builder
def gaps_that_are_not_whole_records(rng: np.random.Generator, device: torch.device) -> Case:
    cache = make_cache(rng, 6, 16, gap=100, device=device)
    return Case("", cache, _slots(_draw(rng, 96, (4, 32)), device))


@_builder
def block_edges_and_last_slot(rng: np.random.Generator, device: torch.device) -> Case:
    edges = [slot for block in range(4) for slot in (block * 64, block * 64 + 63)]
    return Case("", make_cache(rng, 4, 64, gap=656, device=device), _slots([edges, edges[::-1]], device))


@_builder
def every_e4m3_byte(rng: np.random.Generator, device: torch.device) -> Case:
    cache = make_cache(rng, 2, 64, device=device)
    every = torch.arange(256, dtype=torch.uint8, device=device)
    cache[..., :256] = every
    cache[..., 256:512] = every
    ties = np.resize(np.array(SCALES, np.float32), (2, 64, 4)).astype("<f4")
    cache[..., 512:528] = torch.from_numpy(ties.view(np.uint8).copy()).to(device)
    return Case("", cache, _slots(np.arange(128).reshape(4, 32), device))


@_builder
def rope_keeps_every_bit(rng: np.random.Generator, device: torch.device) -> Case:
    cache = make_cache(rng, 2, 16, device=device)
    # Quiet and signalling NaN with payloads, infinities, subnormals, both zeros.
    odd = np.resize(np.array([0x7FC1, 0x7F81, 0xFFFF, 0x7F80, 0xFF80, 0x0001, 0x8000, 0x3F80], "<u2"), (64,))
    cache[..., 528:656] = torch.from_numpy(odd.view(np.uint8).copy()).to(device)
    return Case("", cache, _slots(_draw(rng, 32, (2, 16)), device))


@_builder
def all_unfilled(rng: np.random.Generator, device: torch.device) -> Case:
    return Case("", make_cache(rng, 2, 64, device=device), _slots(np.full((3, 20), -1), device))


@_builder
def one_filled(rng: np.random.Generator, device: torch.device) -> Case:
    slots = np.full((2, 33), -1)
    slots[1, 32] = 127
    return Case("", make_cache(rng, 2, 64, device=device), _slots(slots, device))


@_builder
def out_of_range_on_both_sides(rng: np.random.Generator, device: torch.device) -> Case:
    odd = [-1, -2, -64, _INT32_MIN, 96, 97, 160, 2**30, _INT32_MAX, 0, 95, 1]
    # Blocks of a larger cache: what lies past the last block is memory of ours, and decodes to numbers.
    cache = make_cache(rng, 12, 16, device=device)[3:9]
    return Case("", cache, _slots([odd, odd[::-1]], device))


@_builder
def nan_in_records_nobody_selected(rng: np.random.Generator, device: torch.device) -> Case:
    cache = make_cache(rng, 4, 16, device=device)
    cache[::2] = _GAP_FILL
    slots = rng.choice([*range(16, 32), *range(48, 64), -1, -1, -1], (4, 24))
    return Case("", cache, _slots(slots, device))


@_builder
def duplicate_slots(rng: np.random.Generator, device: torch.device) -> Case:
    return Case("", make_cache(rng, 2, 64, device=device), _slots(rng.integers(0, 3, (4, 40)), device))


@_builder
def topk_not_a_power_of_two(rng: np.random.Generator, device: torch.device) -> Case:
    return Case("", make_cache(rng, 2, 64, device=device), _slots(_draw(rng, 128, (7, 37)), device))


@_builder
def topk_1(rng: np.random.Generator, device: torch.device) -> Case:
    return Case("", make_cache(rng, 2, 64, device=device), _slots(_draw(rng, 128, (9, 1), 0.3), device))


@_builder
def no_tokens(rng: np.random.Generator, device: torch.device) -> Case:
    return Case("", make_cache(rng, 1, 64, device=device), _slots(np.zeros((0, 16)), device))


@_builder
def no_topk(rng: np.random.Generator, device: torch.device) -> Case:
    return Case("", make_cache(rng, 1, 64, device=device), _slots(np.zeros((4, 0)), device))


def _shared_by_request(rng: np.random.Generator, num_slots: int, shape: tuple[int, int], width: int) -> np.ndarray:
    """Slots of which the rows of one request share about 7/8, as the rows of a speculative step do."""
    common = np.repeat(rng.integers(0, num_slots, (shape[0] // width, shape[1])), width, axis=0)
    own = rng.integers(0, num_slots, shape)
    slots = np.where(rng.random(shape) < 7 / 8, common, own)
    slots[rng.random(shape) < 0.1] = -1
    for row in slots:
        rng.shuffle(row)
    return slots


@_builder
def width_2(rng: np.random.Generator, device: torch.device) -> Case:
    slots = _shared_by_request(rng, 256, (6, 24), 2)
    return Case("", make_cache(rng, 4, 64, device=device), _slots(slots, device), tokens_per_request=2)


@_builder
def width_4(rng: np.random.Generator, device: torch.device) -> Case:
    slots = _shared_by_request(rng, 256, (12, 24), 4)
    return Case("", make_cache(rng, 4, 64, gap=1312, device=device), _slots(slots, device), tokens_per_request=4)


@_builder
def width_4_requests_without_common_slots(rng: np.random.Generator, device: torch.device) -> Case:
    """Every request draws from a range of its own, so that a row found in a neighbouring request is wrong."""
    slots = rng.integers(0, 32, (12, 16)) + 32 * np.repeat(np.arange(3), 4)[:, None]
    return Case("", make_cache(rng, 2, 64, device=device), _slots(slots, device), tokens_per_request=4)


@_builder
def more_rows_than_one_pass(rng: np.random.Generator, device: torch.device) -> Case:
    return Case("", make_cache(rng, 3, 64, device=device), _slots(_draw(rng, 192, (3, 341)), device))


def make_cases(seed: int = 0, device: torch.device | str = "cpu") -> Iterator[Case]:
    """Every named case, deterministic under `seed` (each case has a generator of its own)."""
    for name in BUILDERS:
        yield make_case(name, seed, device)


def make_case(name: str, seed: int = 0, device: torch.device | str = "cpu") -> Case:
    """The case of one builder."""
    rng = np.random.default_rng([seed, *name.encode()])
    case = BUILDERS[name](rng, torch.device(device))
    return Case(name, case.kv_cache, case.topk_indices, case.tokens_per_request, case.layout)


def make_large_case(seed: int = 0, device: torch.device | str = "cpu", *, past: int = 2**31) -> Case:
    """A cache whose last slots lie past byte offset `past`. On a CPU it is a sparse file: only touched pages exist."""
    layout = FP8_DS_MLA
    rng = np.random.default_rng([seed, past])
    num_blocks = past // (64 * layout.row_bytes) + 3
    size = num_blocks * 64 * layout.row_bytes
    if torch.device(device).type == "cpu":
        with tempfile.NamedTemporaryFile() as file:
            file.truncate(size)
            memory = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
    else:
        memory = torch.zeros(size, dtype=torch.uint8, device=device)
    cache = memory.view(num_blocks, 64, layout.row_bytes)
    filled = torch.tensor([0, 1, num_blocks - 3, num_blocks - 2, num_blocks - 1])
    cache[filled.to(cache.device)] = make_cache(rng, len(filled), 64, device=device)
    candidates = (filled[:, None] * 64 + torch.arange(64)).flatten().numpy()
    slots = rng.choice(candidates, (4, 16))
    slots[0, 0], slots[3, 3] = num_blocks * 64 - 1, num_blocks * 64
    return Case(f"offsets_past_{past}", cache, _slots(slots, torch.device(device)))
