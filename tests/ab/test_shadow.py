"""The shadow on a CPU: finds each fault, says where, leaves what is served alone."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY
from shadowing import TOPK, make_call, observe, settings, shadow_of

import hyv4_kvdequant as h
from hyv4_kvdequant import selector
from hyv4_kvdequant.ab.compare import compare_torch, ordered
from hyv4_kvdequant.ab.counters import COLUMN, fresh_row, read_row
from hyv4_kvdequant.ab.report import merge, read_reports
from hyv4_kvdequant.ab.trace import make_recorder
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.steps import load_step
from hyv4_kvdequant.testing.cases import make_cases

pytestmark = pytest.mark.usefixtures("wrong_plugin", "fresh_instances")


@pytest.fixture
def fresh_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends read the fault when they are made, so every test makes its own."""
    monkeypatch.setattr(selector, "_instances", {})


# fault -> (rows that differ, indices that disagree, first element) on `make_call()`
FOUND = {
    "element": (1, 0, 7),
    "scale_tile": (104, 0, 128),
    "rope": (104, 0, 512),
    "index": (0, 24, -1),
    "slots_above": (None, 0, 7),
    "width_4": (1, 0, 7),
}


@pytest.mark.parametrize("fault", FOUND)
def test_every_fault_is_found_where_it_is(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_BACKEND_FAULT", fault)
    shadow = shadow_of(settings(tmp_path), run_id="run1")
    good, bad = make_call(1), make_call(2, width=4 if fault == "width_4" else 1)
    monkeypatch.setattr(shadow.backend, "fault", "")
    observe(shadow, good, "layer.0")
    monkeypatch.setattr(shadow.backend, "fault", fault)
    expected = h.gather_dequantize(bad.kv_cache, bad.topk_indices, backend="torch")
    observe(shadow, bad, "layer.1")
    assert torch.equal(bad.compact_kv.view(torch.int16), expected.compact_kv.view(torch.int16)), "served as it was"
    assert torch.equal(bad.compact_indices, expected.compact_indices)
    shadow.close()

    (report,) = read_reports(tmp_path)
    assert report.finished
    rows, indices, element = FOUND[fault]
    slots = bad.topk_indices.view(-1)
    if rows is None:
        rows = int((slots > 100).sum())
    assert report.layers["layer.0"].mismatches == 0
    found = report.layers["layer.1"]
    assert (found.rows_differ, found.index_disagreements) == (rows, indices)
    assert found.rows_compared == int((slots >= 0).sum())
    first = found.first
    assert first is not None
    assert (first.call, first.element) == (0, element)
    entry = first.token * TOPK + first.k
    assert first.slot == int(slots[entry])
    if fault in ("element", "width_4"):
        assert (first.token, first.k, found.largest_ulp, found.elements_differ) == (0, 3, 1, 1)
        assert (first.shadow_bits - first.primary_bits) & 0xFFFF == 1
    if fault == "index":
        assert (first.k, first.primary_bits, first.shadow_bits) == (1, -1, 0)
    assert not merge([report]).ok


def test_two_right_backends_agree_over_ten_thousand_calls_and_the_golden_step(golden_step: Path) -> None:
    shadow = shadow_of(settings(shadow="dedup"))
    rng = np.random.default_rng(0)
    memory = make_call(0)
    for number in range(10_000):
        width = (1, 2, 4)[number % 3]
        shape = (width * int(rng.integers(1, 3)), int(rng.integers(1, 6)))
        slots = torch.from_numpy(rng.integers(-2, 260, shape).astype(np.int32))
        kv = torch.empty(slots.numel(), 576, dtype=torch.bfloat16)
        call = h.GatherCall(memory.kv_cache, slots, kv, torch.empty_like(slots), h.FP8_DS_MLA, width)
        observe(shadow, call, f"layer.{number % 5}")
    step = load_step(golden_step)
    kv = torch.empty(step.topk_indices.numel(), 576, dtype=torch.bfloat16)
    observe(shadow, h.GatherCall(step.kv_cache, step.topk_indices, kv, torch.empty_like(step.topk_indices)), "golden")
    shadow.close()
    layers = shadow.snapshot()
    assert sum(counters.calls for counters in layers.values()) == 10_001
    assert sum(counters.rows_compared for counters in layers.values()) > 30_000
    assert all(counters.mismatches == 0 for counters in layers.values())


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
    shadow.counters[0, : COLUMN["largest_ulp"]] = 2**31 - 1
    observe(shadow, make_call())
    shadow.close()
    counters = shadow.snapshot()["layer.0"]
    assert (counters.calls, counters.rows_differ, counters.elements_differ) == (2**31, 2**31, 2**31)


def test_a_shadow_that_raises_is_switched_off_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WRONG_BACKEND_FAULT", "raises")
    shadow = shadow_of(settings(tmp_path))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            observe(shadow, make_call())
    shadow.close()
    (report,) = read_reports(tmp_path)
    assert len(report.errors) == 1
    assert "no kernel image" in report.errors[0]
    assert len([r for r in caplog.records if "switched off" in r.message]) == 1
    assert not merge([report]).ok


def test_every_nth_call_of_each_layer_is_compared() -> None:
    shadow = shadow_of(settings(shadow="dedup", shadow_every=3))
    compared = [
        [observe(shadow, make_call(), layer) is not None for layer in ("layer.0", "layer.1", "layer.2")]
        for _ in range(7)
    ]
    shadow.close()
    assert compared == [[turn % 3 == 0] * 3 for turn in range(7)]


def test_the_first_mismatch_is_logged_once_with_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WRONG_BACKEND_FAULT", "element")
    with caplog.at_level(logging.INFO):
        shadow = shadow_of(settings(), rank=5)
        observe(shadow, make_call(), "model.layers.7.attn")
        shadow._tell(finished=False)
        observe(shadow, make_call(), "model.layers.8.attn")
        shadow.close()
    starts = [r.message for r in caplog.records if r.message.startswith("Shadow is on")]
    assert len(starts) == 1
    assert "wrong (wrong-kvdequant 0.1.0) beside torch (hyv4-kvdequant" in starts[0]
    mismatches = [r.message for r in caplog.records if "Shadow mismatch" in r.message]
    assert len(mismatches) == 1
    assert "layer model.layers.7.attn, rank 5" in mismatches[0]
    assert "element=7" in mismatches[0]
    assert any("2 rows differ" in r.message for r in caplog.records)


def test_metrics_carry_backend_role_rank_and_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_BACKEND_FAULT", "element")
    shadow = shadow_of(settings(), rank=3)
    labels = {"backend": "wrong", "role": "shadow", "rank": "3", "layer": "metrics.layer"}
    for turn in (1, 2):
        observe(shadow, make_call(), "metrics.layer")
        shadow._tell(finished=False)
        assert REGISTRY.get_sample_value("hyv4_kvdequant_shadow_rows_differ_total", labels) == turn
    shadow.close()
    assert REGISTRY.get_sample_value("hyv4_kvdequant_shadow_largest_ulp", labels) == 1


def test_a_shadow_equal_to_the_primary_proves_nothing() -> None:
    with pytest.raises(h.ConfigurationError, match="would prove nothing"):
        shadow_of(settings(shadow="torch"))


def test_a_shadow_that_cannot_be_had_stops_the_start_up() -> None:
    with pytest.raises(h.UnknownBackendError, match="nobody"):
        shadow_of(settings(shadow="nobody"))


def test_the_report_folder_is_made_or_refused_at_start_up(tmp_path: Path) -> None:
    shadow = shadow_of(settings(tmp_path / "a" / "b"))
    assert len(read_reports(tmp_path / "a" / "b")) == 1
    shadow.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(h.ConfigurationError, match="cannot be written"):
        shadow_of(settings(tmp_path / "file"))


def test_runs_in_one_folder_are_told_apart_and_ranks_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_BACKEND_FAULT", "element")
    for run_id, rank in (("old", 0), ("new", 0), ("new", 1)):
        shadow = shadow_of(settings(tmp_path), rank=rank, run_id=run_id)
        observe(shadow, make_call())
        shadow.close()
    reports = read_reports(tmp_path)
    verdict = merge(reports)
    assert verdict.run_id == "new"
    assert [report.rank for report in verdict.ranks] == [0, 1]
    assert verdict.layers["layer.0"].rows_differ == 2
    assert merge(reports, "old").total.calls == 1
    with pytest.raises(h.ConfigurationError, match="holds new, old"):
        merge(reports, "other")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format": "other", "version": 1}', '{"format": "hyv4_kvdequant.shadow_report", "version": 99}'],
)
def test_a_file_that_is_no_report_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "shadow-x-rank0.json").write_text(content)
    with pytest.raises(h.ConfigurationError, match=r"shadow-x-rank0\.json"):
        read_reports(tmp_path)


# One process imports PyTorch, then has a child write into each folder until the child is killed.
WRITERS = """
import os, sys
from pathlib import Path
from hyv4_kvdequant.ab.counters import LayerCounters
from hyv4_kvdequant.ab.report import Report, write_report
layers = {f"layer.{i}": LayerCounters(calls=i) for i in range(80)}
for folder in sys.argv[1:]:
    writer, number = os.fork(), 0
    while writer == 0:
        number += 1
        write_report(Path(folder), Report("run", 0, float(number), False, "a", "b", "cpu", number, layers=layers))
        if number == 1:
            print(os.getpid(), flush=True)
    os.waitpid(writer, 0)
"""


def test_a_process_killed_at_any_point_leaves_a_complete_report(tmp_path: Path) -> None:
    delays = np.random.default_rng(0).uniform(0, 0.02, 50)
    folders = [tmp_path / f"kill{turn}" for turn in range(len(delays))]
    for folder in folders:
        folder.mkdir()
    seen = 0
    command = [sys.executable, "-c", WRITERS, *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for folder, delay in zip(folders, delays, strict=True):
            writer = int(process.stdout.readline())
            time.sleep(delay)
            os.kill(writer, signal.SIGKILL)
            (report,) = read_reports(folder)
            assert len(report.layers) == 80
            assert report.every == report.updated
            seen = max(seen, report.every)
    assert process.returncode == 0
    assert seen > 1


def test_traces_replay_on_a_cpu_and_hold_only_the_selected_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_plugin: Path
) -> None:
    monkeypatch.setenv("WRONG_BACKEND_FAULT", "slots_above")
    given = settings(tmp_path, trace_on_mismatch=True, trace=2)
    shadow, recorder = (
        shadow_of(given, run_id="r"),
        make_recorder(h.load_backend("torch")(h.Target.detect("cpu")), given, 0, "r"),
    )
    assert recorder is not None
    monkeypatch.setattr(shadow.backend, "fault", "")
    for fault, seed in (("", 1), ("slots_above", 2), ("", 3), ("slots_above", 4), ("slots_above", 5)):
        monkeypatch.setattr(shadow.backend, "fault", fault)
        call = make_call(seed)
        recorder.record(call, "model.layers.3", None, observe(shadow, call, "model.layers.3"))
    recorder.close()
    shadow.close()
    assert len(recorder.written) == 2
    step = load_step(recorder.written[0])
    assert step.notes["layer"] == "model.layers.3"
    assert "query" not in step.tensors
    original = make_call(2)
    unique = original.topk_indices[original.topk_indices >= 0].unique()
    assert step.kv_cache.shape == (len(unique), 1, 656)
    again = h.gather_dequantize(step.kv_cache, step.topk_indices, backend="torch")
    before = h.gather_dequantize(original.kv_cache, original.topk_indices, backend="torch")
    assert torch.equal(again.compact_kv.view(torch.int16), before.compact_kv.view(torch.int16))

    env = {**os.environ, "PYTHONPATH": str(wrong_plugin), "WRONG_BACKEND_FAULT": "element", "COLUMNS": "200"}
    command = [sys.executable, "-m", "hyv4_kvdequant", "ab", "replay", *map(str, recorder.written), "--a", "torch"]
    done = subprocess.run(
        [*command, "--b", "wrong", "--json", "--device", "cpu", "--runs", "3"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    evidence = result["calls"][0]["evidence"]
    assert (evidence["b"] - evidence["a"]) & 0xFFFF == 1
    assert evidence["expected"] == evidence["a"]
    assert len(evidence["record"]) == 2 * 656
    assert result["ratio"]["eager"]["low"] <= result["ratio"]["eager"]["median"] <= result["ratio"]["eager"]["high"]
    done = subprocess.run(
        [*command, "--b", "dedup", "--device", "cpu", "--runs", "2"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "95 % interval" in done.stdout


def test_the_first_calls_are_recorded_within_count_and_bytes(tmp_path: Path) -> None:
    backend = h.load_backend("torch")(h.Target.detect("cpu"))
    recorder = make_recorder(backend, settings(tmp_path, trace=3, trace_queries=True), 1)
    assert recorder is not None
    query = torch.zeros(8, 2, 576, dtype=torch.bfloat16)
    for seed in range(6):
        recorder.record(make_call(seed), "layer", query)
        time.sleep(0.05)
    recorder.close()
    assert len(recorder.written) == 3
    assert load_step(recorder.written[0]).tensors["query"].shape == (8, 2, 576)
    small = make_recorder(backend, settings(tmp_path / "small", trace=3, trace_mb=1), 1)
    assert small is not None
    small.record(make_call(tokens=128), "layer")  # 128 x 16 records are 1.3 MB
    small.close()
    assert small.written == []


def test_a_folder_that_fails_while_recording_stops_the_recording_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "traces"
    recorder = make_recorder(h.load_backend("torch")(h.Target.detect("cpu")), settings(folder, trace=5), 0)
    assert recorder is not None
    folder.rmdir()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            recorder.record(make_call(), "layer")
        time.sleep(0.3)
        recorder.record(make_call(), "layer")
        recorder.close()
    assert len([r for r in caplog.records if "Recording stops" in r.message]) == 1


def test_recording_without_a_folder_or_a_shadow_is_told() -> None:
    backend = h.load_backend("torch")(h.Target.detect("cpu"))
    with pytest.raises(h.ConfigurationError, match="_REPORT_DIR is not"):
        make_recorder(backend, settings(trace=1), 0)
    with pytest.raises(h.ConfigurationError, match="no shadow would find"):
        make_recorder(backend, h.load_settings({"trace_on_mismatch": True}), 0)
    assert make_recorder(backend, settings(), 0) is None


@pytest.mark.parametrize("field", ["shadow_every", "trace_mb"])
def test_counts_that_cannot_be_are_told(field: str) -> None:
    with pytest.raises(h.ConfigurationError, match="cannot be read"):
        settings(**{field: 0})


def test_a_host_may_build_its_layers_with_another_default_device() -> None:
    # vLLM builds models under torch.device("cuda") and a default dtype of bf16.
    with torch.device("meta"):
        shadow = shadow_of(settings())
    observe(shadow, make_call())
    shadow.close()
    assert shadow.snapshot()["layer.0"].calls == 1


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
    shadow.close()
    assert shadow.snapshot()["layer.0"].mismatches == 0
