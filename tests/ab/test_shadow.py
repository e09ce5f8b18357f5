"""The shadow on a CPU: finds each fault, says where, leaves what is served alone."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY
from shadowing import TOPK, make_call, observe, settings, shadow_of

import hyv4_kvdequant as h
from hyv4_kvdequant.ab.report import Reports, read_reports
from hyv4_kvdequant.ab.verdict import merge
from hyv4_kvdequant.steps import load_step

pytestmark = pytest.mark.usefixtures("wrong_plugin", "fresh_instances")


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
    shadow.monitor.close()

    (report,) = read_reports(tmp_path).readable
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
    assert not merge(Reports([report])).ok


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
    shadow.monitor.close()
    layers = shadow.monitor.snapshot()
    assert sum(counters.calls for counters in layers.values()) == 10_001
    assert sum(counters.rows_compared for counters in layers.values()) > 30_000
    assert all(counters.mismatches == 0 for counters in layers.values())


def test_a_shadow_that_raises_is_switched_off_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WRONG_BACKEND_FAULT", "raises")
    shadow = shadow_of(settings(tmp_path))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            observe(shadow, make_call())
    shadow.monitor.close()
    (report,) = read_reports(tmp_path).readable
    assert len(report.errors) == 1
    assert "no kernel image" in report.errors[0]
    assert len([r for r in caplog.records if "switched off" in r.message]) == 1
    assert not merge(Reports([report])).ok


def test_every_nth_call_of_each_layer_is_compared() -> None:
    shadow = shadow_of(settings(shadow="dedup", shadow_every=3))
    compared = [
        [observe(shadow, make_call(), layer) is not None for layer in ("layer.0", "layer.1", "layer.2")]
        for _ in range(7)
    ]
    shadow.monitor.close()
    assert compared == [[turn % 3 == 0] * 3 for turn in range(7)]


def test_the_first_mismatch_is_logged_once_with_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WRONG_BACKEND_FAULT", "element")
    with caplog.at_level(logging.INFO):
        shadow = shadow_of(settings(), rank=5)
        observe(shadow, make_call(), "model.layers.7.attn")
        shadow.monitor.tell(finished=False)
        observe(shadow, make_call(), "model.layers.8.attn")
        shadow.monitor.close()
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
        shadow.monitor.tell(finished=False)
        assert REGISTRY.get_sample_value("hyv4_kvdequant_shadow_rows_differ_total", labels) == turn
    shadow.monitor.close()
    assert REGISTRY.get_sample_value("hyv4_kvdequant_shadow_largest_ulp", labels) == 1


def test_a_shadow_equal_to_the_primary_proves_nothing() -> None:
    with pytest.raises(h.ConfigurationError, match="would prove nothing"):
        shadow_of(settings(shadow="torch"))


def test_a_shadow_that_cannot_be_had_stops_the_start_up() -> None:
    with pytest.raises(h.UnknownBackendError, match="nobody"):
        shadow_of(settings(shadow="nobody"))


def test_a_host_may_build_its_layers_with_another_default_device() -> None:
    # vLLM builds models under torch.device("cuda") and a default dtype of bf16.
    with torch.device("meta"):
        shadow = shadow_of(settings())
    observe(shadow, make_call())
    shadow.monitor.close()
    assert shadow.monitor.snapshot()["layer.0"].calls == 1
