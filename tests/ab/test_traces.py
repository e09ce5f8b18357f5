"""Traces: bounded, only the selected records, replayed on a CPU."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from shadowing import make_call, observe, settings, shadow_of

import hyv4_kvdequant as h
from hyv4_kvdequant.ab.trace import make_recorder
from hyv4_kvdequant.steps import load_step

pytestmark = pytest.mark.usefixtures("wrong_plugin", "fresh_instances")


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
    shadow.monitor.close()
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
    assert len([r for r in caplog.records if "Recording of layer layer stops" in r.message]) == 1


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


def test_one_layers_failure_stops_that_layer_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = make_recorder(h.load_backend("torch")(h.Target.detect("cpu")), settings(tmp_path, trace=4), 0)
    assert recorder is not None
    blocked = tmp_path / f"trace-{recorder.run_id}-rank0-{recorder._writer}-00001-bad.safetensors"
    blocked.mkdir()  # no file can take its place
    with caplog.at_level(logging.ERROR):
        for seed, layer in enumerate(["bad", "bad", "[/]l0", "x" * 5000, "../\ud800", ""]):
            recorder.record(make_call(seed), layer)
            time.sleep(0.1)
        recorder.close()
    assert len([r for r in caplog.records if "stops" in r.message]) == 1
    assert [load_step(path).notes["layer"] for path in recorder.written] == ["[/]l0", "x" * 5000, "../\\ud800", ""]
    assert {path.parent for path in recorder.written} == {tmp_path}
    assert sorted(tmp_path.iterdir()) == sorted([*recorder.written, blocked])


def test_no_memory_for_a_snapshot_stops_that_layer_and_not_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = make_recorder(h.load_backend("torch")(h.Target.detect("cpu")), settings(tmp_path, trace=4), 0)
    assert recorder is not None
    call, clone = make_call(), torch.Tensor.clone

    def fails(self: torch.Tensor) -> torch.Tensor:
        if self is call.topk_indices:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return clone(self)

    monkeypatch.setattr(torch.Tensor, "clone", fails)
    with caplog.at_level(logging.ERROR):
        recorder.record(call, "layer.0")
        recorder.record(make_call(1), "layer.1")
        recorder.close()
    assert [load_step(path).notes["layer"] for path in recorder.written] == ["layer.1"]
    assert "layer.0 stops" in caplog.text


@pytest.mark.parametrize(("readable", "mode"), [(False, 0o600), (True, 0o640)])
def test_traces_are_for_their_owner_unless_a_setting_says_otherwise(readable: bool, mode: int, tmp_path: Path) -> None:
    given = settings(tmp_path, trace=1, report_group_readable=readable)
    recorder = make_recorder(h.load_backend("torch")(h.Target.detect("cpu")), given, 0)
    assert recorder is not None
    recorder.record(make_call(), "layer")
    recorder.close()
    assert stat.S_IMODE(recorder.written[0].stat().st_mode) == mode


def test_two_recorders_of_one_run_and_rank_keep_each_others_traces(tmp_path: Path) -> None:
    backend = h.load_backend("torch")(h.Target.detect("cpu"))
    for seed in (1, 2):
        recorder = make_recorder(backend, settings(tmp_path, trace=1), 0, "run")
        assert recorder is not None
        recorder.record(make_call(seed), "layer")
        recorder.close()
    steps = [load_step(path) for path in tmp_path.iterdir()]
    assert len(steps) == 2
    assert not torch.equal(steps[0].topk_indices, steps[1].topk_indices)
