"""Clauses 1 to 4 on the `torch` backend, and on one that dedups, over drawn inputs. The same inputs every time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st
from mutants import Dissected, E4m3SubnormalsAsZero, Mutant, ReadsSlotNumSlots, StrideInRecords

from hyv4_kvdequant import FP8_DS_MLA, GatherDequantBackend, Target, gather_dequantize, load_backend
from hyv4_kvdequant.testing import Case, check_case, expected_rows, rows_equal, strategies

TARGET = Target.detect("cpu")
BACKENDS = [load_backend("torch")(TARGET), Dissected(TARGET)]
SAME_EVERY_TIME = settings(derandomize=True, deadline=None, database=None, max_examples=60)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_every_clause_on_any_call(backend: GatherDequantBackend) -> None:
    @SAME_EVERY_TIME
    @given(strategies.cases())
    def hold(case: Case) -> None:
        assert check_case(backend, case) == []

    hold()


@SAME_EVERY_TIME
@given(st.lists(strategies.records(), min_size=1, max_size=8), strategies.block_gaps())
def test_any_record_is_dequantized_bit_for_bit(records: list[torch.Tensor], gap: int) -> None:
    """Any fp32 scale, any byte, any RoPE bits, at any distance of blocks, through the public call."""
    stride = FP8_DS_MLA.row_bytes + gap
    memory = torch.full((len(records), stride), 0xFF, dtype=torch.uint8)
    memory[:, : FP8_DS_MLA.row_bytes] = torch.stack(records)
    cache = memory.as_strided((len(records), 1, FP8_DS_MLA.row_bytes), (stride, FP8_DS_MLA.row_bytes, 1))
    slots = torch.arange(len(records), dtype=torch.int32).unsqueeze(0)
    result = gather_dequantize(cache, slots, backend="torch")
    expected = expected_rows(torch.stack(records), FP8_DS_MLA)
    assert bool(rows_equal(result.compact_kv.view(torch.int16), expected, FP8_DS_MLA).all())


@pytest.mark.parametrize("mutant", [E4m3SubnormalsAsZero, ReadsSlotNumSlots, StrideInRecords])
def test_the_strategies_find_faults_too(mutant: Mutant) -> None:
    backend = mutant(TARGET)
    found = find(strategies.cases(), lambda case: bool(check_case(backend, case)), settings=SAME_EVERY_TIME)
    assert check_case(backend, found)


@SAME_EVERY_TIME
@given(strategies.caches(), strategies.request_widths(), st.data())
def test_strategies_draw_what_the_contract_allows(cache: torch.Tensor, width: int, data: st.DataObject) -> None:
    num_blocks, block_size, row_bytes = cache.shape
    num_slots = num_blocks * block_size
    assert (cache.stride(1), cache.stride(2), row_bytes) == (656, 1, 656)
    assert num_blocks == 1 or cache.stride(0) >= block_size * row_bytes
    slots = data.draw(strategies.slots(num_slots, 2 * width, width))
    assert slots.dtype == torch.int32
    assert slots.shape[0] == 2 * width
    gather_dequantize(cache, slots, backend="torch", tokens_per_request=width)
