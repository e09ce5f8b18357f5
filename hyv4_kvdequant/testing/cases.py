"""Inputs that break kernels: one generator, deterministic under a seed.

Each builder below makes one named `Case` of at most about 1000 rows. Caches are filled with random bytes (so every
e4m3 byte and many NaN occur), half of the tile scales are drawn from the record's hostile ones, and the memory between
blocks is filled with bytes that decode to NaN.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from hyv4_kvdequant.contract import FP8_DS_MLA, RecordLayout
from hyv4_kvdequant.records import put_parts, record_of

IntArray = npt.NDArray[np.int64]


# Slots that no cache of these cases has, on both sides.
UNFILLED_SLOTS = (-(2**31), -(2**31) + 1, -64, -2, -1, 2**30, 2**31 - 1)
_GAP_FILL = 0xFF


@dataclass(frozen=True, eq=False)
class Case:
    """One input of a gather call; `kv_cache` and `topk_indices` are as in `GatherCall`."""

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
    hostile = np.array(record_of(layout).hostile.scale, np.float32)
    scales = rng.choice(hostile, (num_blocks, block_size, layout.num_tiles))
    plain = rng.random(scales.shape) < 0.5
    scales[plain] = rng.lognormal(-4, 2, int(plain.sum())).astype(np.float32)
    put_parts(layout, torch.from_numpy(blocks), scale=torch.from_numpy(scales))
    pages = np.full((num_blocks, packed + gap), _GAP_FILL, np.uint8)
    pages[:, :packed] = blocks.reshape(num_blocks, packed)
    memory = torch.from_numpy(pages).to(device)
    return memory.as_strided((num_blocks, block_size, layout.row_bytes), (packed + gap, layout.row_bytes, 1))


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a builder makes its case from: a random generator of its own, the device, and the record."""

    rng: np.random.Generator
    device: torch.device
    layout: RecordLayout = FP8_DS_MLA
    name: str = ""

    def cache(self, num_blocks: int, block_size: int, gap: int = 0) -> torch.Tensor:
        return make_cache(self.rng, num_blocks, block_size, gap=gap, layout=self.layout, device=self.device)

    def draw(self, num_slots: int, shape: tuple[int, int], unfilled: float = 0.1) -> IntArray:
        slots = self.rng.integers(0, num_slots, shape)
        slots[self.rng.random(shape) < unfilled] = -1
        return slots

    def draw_shared(self, num_slots: int, shape: tuple[int, int], width: int) -> IntArray:
        """Slots of which the rows of one request share about 7/8, as the rows of a speculative step do."""
        common = np.repeat(self.rng.integers(0, num_slots, (shape[0] // width, shape[1])), width, axis=0)
        slots = np.where(self.rng.random(shape) < 7 / 8, common, self.rng.integers(0, num_slots, shape))
        slots[self.rng.random(shape) < 0.1] = -1
        for row in slots:
            self.rng.shuffle(row)
        return slots

    def case(self, kv_cache: torch.Tensor, slots: npt.ArrayLike, width: int = 1) -> Case:
        indices = torch.from_numpy(np.asarray(slots, np.int64).astype(np.int32)).to(self.device)
        return Case(self.name, kv_cache, indices, width, self.layout)


Builder = Callable[[Inputs], Case]
BUILDERS: dict[str, Builder] = {}


def _builder(function: Builder) -> Builder:
    BUILDERS[function.__name__] = function
    return function


# --- where records lie ---


@_builder
def random_slots(make: Inputs) -> Case:
    return make.case(make.cache(5, 64), make.draw(320, (5, 48)))


@_builder
def cache_of_one_slot(make: Inputs) -> Case:
    return make.case(make.cache(1, 1), [[0, -1, 1], [1, 0, 0]])


@_builder
def block_size_1(make: Inputs) -> Case:
    return make.case(make.cache(37, 1), make.draw(37, (3, 16)))


@_builder
def block_size_16(make: Inputs) -> Case:
    return make.case(make.cache(7, 16), make.draw(112, (3, 16)))


@_builder
def block_size_128(make: Inputs) -> Case:
    return make.case(make.cache(2, 128), make.draw(256, (3, 16)))


@_builder
def block_size_not_a_power_of_two(make: Inputs) -> Case:
    return make.case(make.cache(5, 48), make.draw(240, (3, 16)))


@_builder
def gaps_between_blocks(make: Inputs) -> Case:
    return make.case(make.cache(6, 16, gap=3 * make.layout.row_bytes), make.draw(96, (4, 32)))


@_builder
def gaps_that_are_not_whole_records(make: Inputs) -> Case:
    """Records are then 4-byte aligned and no more."""
    return make.case(make.cache(6, 16, gap=100), make.draw(96, (4, 32)))


@_builder
def block_edges_and_last_slot(make: Inputs) -> Case:
    edges = [slot for block in range(4) for slot in (block * 64, block * 64 + 63)]
    return make.case(make.cache(4, 64, gap=make.layout.row_bytes), [edges, edges[::-1]])


# --- what records hold ---


@_builder
def every_e4m3_byte(make: Inputs) -> Case:
    """All of the record's NoPE bytes under all of its hostile scales, in every tile."""
    cache, layout = make.cache(2, 64), make.layout
    hostile = record_of(layout).hostile
    num_records = 128
    values = np.resize(np.array(hostile.nope, np.uint8), layout.nope_dim)
    # The second half of the records has the bytes half a table further, so that each byte meets each scale.
    nope = np.where(np.arange(num_records)[:, None] < 64, values, np.roll(values, 128))
    tiles = np.arange(num_records)[:, None] + np.arange(layout.num_tiles)
    scales = np.array(hostile.scale, np.float32)[tiles % len(hostile.scale)]
    put_parts(
        layout,
        cache,
        nope=torch.from_numpy(nope).view(2, 64, -1),
        scale=torch.from_numpy(scales).view(2, 64, -1),
    )
    return make.case(cache, np.arange(num_records).reshape(4, 32))


@_builder
def rope_keeps_every_bit(make: Inputs) -> Case:
    """Quiet and signalling NaN with payloads, infinities, subnormals and both zeros."""
    cache, layout = make.cache(2, 16), make.layout
    odd = np.array(record_of(layout).hostile.rope, np.uint16)
    rope = np.resize(odd, layout.rope_dim).view(np.int16)
    put_parts(layout, cache, rope=torch.from_numpy(rope))
    return make.case(cache, make.draw(32, (2, 16)))


@_builder
def nan_in_records_nobody_selected(make: Inputs) -> Case:
    """Slot 0 is one of them: what reads it in place of an unfilled slot must still write zero bits."""
    cache = make.cache(4, 16)
    cache[::2] = _GAP_FILL
    return make.case(cache, make.rng.choice([*range(16, 32), *range(48, 64), -1, -1, -1], (4, 24)))


# --- which slots are selected ---


@_builder
def all_unfilled(make: Inputs) -> Case:
    return make.case(make.cache(2, 64), np.full((3, 20), -1))


@_builder
def one_filled(make: Inputs) -> Case:
    slots = np.full((2, 33), -1)
    slots[1, 32] = 127
    return make.case(make.cache(2, 64), slots)


@_builder
def short_context(make: Inputs) -> Case:
    """Filled entries first, then -1 to the end of each row; a different number of them in each."""
    slots = make.draw(128, (5, 40), unfilled=0)
    for token, filled in enumerate((0, 1, 17, 39, 40)):
        slots[token, filled:] = -1
    return make.case(make.cache(2, 64), slots)


@_builder
def out_of_range_on_both_sides(make: Inputs) -> Case:
    """Blocks of a larger cache: what lies on both sides is memory of ours, and decodes to numbers."""
    odd = [*UNFILLED_SLOTS, 96, 97, 160, 0, 95, 1]
    return make.case(make.cache(12, 16)[3:9], [odd, odd[::-1]])


@_builder
def duplicate_slots(make: Inputs) -> Case:
    return make.case(make.cache(2, 64), make.rng.integers(0, 3, (4, 40)))


# --- shapes ---


@_builder
def topk_not_a_power_of_two(make: Inputs) -> Case:
    return make.case(make.cache(2, 64), make.draw(128, (7, 37)))


@_builder
def topk_1(make: Inputs) -> Case:
    return make.case(make.cache(2, 64), make.draw(128, (9, 1), unfilled=0.3))


@_builder
def no_tokens(make: Inputs) -> Case:
    return make.case(make.cache(1, 64), np.zeros((0, 16)))


@_builder
def no_topk(make: Inputs) -> Case:
    return make.case(make.cache(1, 64), np.zeros((4, 0)))


@_builder
def many_rows(make: Inputs) -> Case:
    return make.case(make.cache(3, 64), make.draw(192, (3, 341)))


# --- request widths ---


@_builder
def width_2(make: Inputs) -> Case:
    return make.case(make.cache(4, 64), make.draw_shared(256, (6, 24), 2), width=2)


@_builder
def width_3(make: Inputs) -> Case:
    return make.case(make.cache(4, 16), make.draw_shared(64, (9, 17), 3), width=3)


@_builder
def width_4(make: Inputs) -> Case:
    slots = make.draw_shared(256, (12, 24), 4)
    return make.case(make.cache(4, 64, gap=2 * make.layout.row_bytes), slots, width=4)


@_builder
def width_4_with_an_empty_request(make: Inputs) -> Case:
    slots = make.draw_shared(128, (12, 16), 4)
    slots[4:8] = -1
    slots[:, 5] = make.rng.choice([*UNFILLED_SLOTS, 128], 12)
    return make.case(make.cache(2, 64), slots, width=4)


@_builder
def width_4_requests_without_common_slots(make: Inputs) -> Case:
    """Every request draws from a range of its own, so that a row found for a neighbouring request is wrong."""
    slots = make.rng.integers(0, 32, (12, 16)) + 32 * np.repeat(np.arange(3), 4)[:, None]
    return make.case(make.cache(2, 64), slots, width=4)


@_builder
def width_2_slots_that_differ_in_high_bits(make: Inputs) -> Case:
    """A hash table of up to 256 buckets sees one bucket."""
    slots = 256 * make.rng.integers(0, 5, (4, 8)) + 7
    return make.case(make.cache(81, 16), slots, width=2)


def make_cases(seed: int = 0, device: torch.device | str = "cpu", layout: RecordLayout = FP8_DS_MLA) -> Iterator[Case]:
    """Every named case, deterministic under `seed` (each case has a generator of its own).

    Shapes, strides and request widths do not depend on the seed; slots and records do.
    """
    for name in BUILDERS:
        yield make_case(name, seed, device, layout)


def make_case(name: str, seed: int = 0, device: torch.device | str = "cpu", layout: RecordLayout = FP8_DS_MLA) -> Case:
    """The case of one builder."""
    rng = np.random.default_rng([seed, *name.encode()])
    return BUILDERS[name](Inputs(rng, torch.device(device), layout, name))


# --- caches past 2**31 bytes; made only where they are asked for ---


def make_large_cases(
    seed: int = 0, device: torch.device | str = "cpu", layout: RecordLayout = FP8_DS_MLA
) -> Iterator[Case]:
    """Caches with slots past byte offset 2**31 (packed) and 2**32 (one layer's pages far apart in a shared pool).

    On a CPU a cache is a sparse file, of which only touched pages exist.
    """
    packed = 64 * layout.row_bytes
    # Whole records, so that it is about size alone; `gaps_that_are_not_whole_records` is a case of its own.
    apart = 96 * 2**20 // (16 * layout.row_bytes) * 16 * layout.row_bytes
    shapes = {
        "packed_past_2_gib": (2**31 // packed + 3, packed),
        # 96 MiB apart: block * stride passes 2**31 where slot * row_bytes is still small.
        "gapped_past_4_gib": (44, apart),
    }
    for name, (num_blocks, stride) in shapes.items():
        rng = np.random.default_rng([seed, *name.encode()])
        yield _large_case(Inputs(rng, torch.device(device), layout, name), num_blocks, stride)


def _large_case(make: Inputs, num_blocks: int, stride: int) -> Case:
    shape = (num_blocks, 64, make.layout.row_bytes)
    memory = _memory((num_blocks - 1) * stride + 64 * make.layout.row_bytes, make.device)
    cache = memory.as_strided(shape, (stride, make.layout.row_bytes, 1))
    # Of the packed cache's blocks, 0 and 1024 hold slots that are equal modulo 2**16.
    blocks = sorted({0, 1, min(1024, num_blocks // 2), num_blocks - 3, num_blocks - 2, num_blocks - 1})
    cache[torch.tensor(blocks, device=make.device)] = make.cache(len(blocks), 64)
    slots = make.rng.choice([64 * block + position for block in blocks for position in range(64)], (4, 24))
    slots[0, :4] = (num_blocks * 64 - 1, num_blocks * 64, 64 * blocks[2], 0)
    slots[1, :2] = (0, 64 * blocks[2])
    return make.case(cache, slots, width=2)


def _memory(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes of any content."""
    if device.type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(size)
        return torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)


def width_1(case: Case) -> Case:
    """The same call for requests of one query row each."""
    return replace(case, tokens_per_request=1)
