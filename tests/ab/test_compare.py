"""The comparison itself, in PyTorch and in Triton: by the contract, not by the buffers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shadowing import make_call, observe, settings, shadow_of

import hyv4_kvdequant as h
from hyv4_kvdequant.ab.compare import compare_torch, ordered
from hyv4_kvdequant.ab.counters import COLUMN, fresh_row, read_row
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.testing.cases import make_cases

pytestmark = pytest.mark.usefixtures("wrong_plugin", "fresh_instances")


def test_nan_equals_nan_in_the_nope_part_only() -> None:
    call = make_call()
    run_call(h.load_backend("torch")(h.Target.detect("cpu")), call)
    other = call.compact_kv.clone()
    bits, other_bits = call.compact_kv.view(torch.int16), other.view(torch.int16)
    bits[0, 5], other_bits[0, 5] = 0x7FC0, 0x7F81
    bits[0, 575], other_bits[0, 575] = 0x7FC0, 0x7F81
    row = torch.tensor(fresh_row())
    compare_torch(call, other, call.compact_indices.clone(), row)
    counters = read_row(row.tolist())
    assert (counters.rows_differ, counters.elements_differ) == (1, 1)
    assert counters.first is not None
    assert counters.first.element == 575


def test_an_index_outside_the_rows_is_never_read_through() -> None:
    call = make_call()
    run_call(h.load_backend("torch")(h.Target.detect("cpu")), call)
    indices = call.compact_indices.clone()
    indices[0, 0], indices[0, 2] = 2**30, -5
    row = torch.tensor(fresh_row())
    compare_torch(call, call.compact_kv.clone(), indices, row)
    assert read_row(row.tolist()).index_disagreements == 2


def test_steps_between_bf16_values_are_counted_across_zero() -> None:
    bits = torch.tensor([0x0001, 0x0000, -0x8000, 0x8001 - 0x10000, 0x3F80, 0x3F81], dtype=torch.int16)
    assert ordered(bits).tolist() == [1, 0, 0, -1, 0x3F80, 0x3F81]


def test_counters_do_not_overflow_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_BACKEND_FAULT", "element")
    shadow = shadow_of(settings())
    shadow.monitor.counters[0, : COLUMN["largest_ulp"]] = 2**31 - 1
    observe(shadow, make_call())
    shadow.monitor.close()
    counters = shadow.monitor.snapshot()["layer.0"]
    assert (counters.calls, counters.rows_differ, counters.elements_differ) == (2**31, 2**31, 2**31)


BOTH_FORMS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from dataclasses import replace
from shadowing import make_call
import hyv4_kvdequant as h
from hyv4_kvdequant.ab.compare import compare_torch
from hyv4_kvdequant.ab.compare_triton import compare_triton
from hyv4_kvdequant.ab.counters import fresh_row
from hyv4_kvdequant.gather import run_call
backend = h.load_backend("torch")(h.Target.detect("cpu"))
rows = [torch.tensor(fresh_row()) for _ in range(2)]
generator = torch.Generator().manual_seed(0)
for turn in range(6):
    call = make_call(turn, tokens=3)
    run_call(backend, call)
    kv, indices = call.compact_kv.clone(), call.compact_indices.clone()
    if turn > 1:
        bits = kv.view(torch.int16)
        for _ in range(turn):
            row, element = (torch.randint(0, most, (1,), generator=generator) for most in (48, 576))
            bits[row, element] = torch.randint(-(2**15), 2**15, (1,), generator=generator).short()
        for element in (3, 520):  # two NaN: equal in NoPE, not in RoPE
            call.compact_kv.view(torch.int16)[0, element], bits[0, element] = 0x7FC0, 0x7FC1
    if turn > 3:
        indices.view(-1)[turn], indices.view(-1)[turn + 7] = 2**30, 3
    for form, row in zip((compare_torch, compare_triton), rows):
        form(call, kv, indices, row)
    assert torch.equal(rows[0], rows[1]), (turn, rows)
print("equal", rows[0].tolist())
"""


def test_the_triton_form_counts_the_same(wrong_plugin: Path) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", BOTH_FORMS, here], capture_output=True, text=True, env=env, check=False
    )
    assert done.stdout.startswith("equal"), done.stderr


def test_contract_cases_compare_equal_between_right_backends() -> None:
    shadow = shadow_of(settings(shadow="dedup"))
    for case in make_cases():
        if case.topk_indices.numel() and case.topk_indices.numel() < 4000:
            kv = torch.empty(case.topk_indices.numel(), 576, dtype=torch.bfloat16)
            indices = torch.empty_like(case.topk_indices)
            observe(
                shadow,
                h.GatherCall(case.kv_cache, case.topk_indices, kv, indices, case.layout, case.tokens_per_request),
            )
    shadow.monitor.close()
    assert shadow.monitor.snapshot()["layer.0"].mismatches == 0
