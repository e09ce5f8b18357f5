"""The shadow on a GPU: in replayed graphs, exactly counted, and what it costs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

import hyv4_kvdequant as h
from hyv4_kvdequant import selector
from hyv4_kvdequant.ab.shadow import Shadow
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.timing import time_graph

sys.path.insert(0, str(Path(__file__).parents[1] / "ab"))

from shadowing import make_call, settings, shadow_of

pytestmark = pytest.mark.gpu

PLUGIN = Path(__file__).parents[1] / "plugins" / "wrong_backend"
FAULTS = {"element": 7, "scale_tile": 128, "rope": 512, "index": -1, "slots_above": 7, "width_4": 7}


@pytest.fixture(scope="module")
def plugin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin as a distribution on disk: what pip would install, written by hand where pip has no build backend."""
    folder = tmp_path_factory.mktemp("wrong_backend")
    info = folder / "wrong_kvdequant-0.1.0.dist-info"
    info.mkdir()
    (folder / "wrong_kvdequant.py").write_text((PLUGIN / "wrong_kvdequant.py").read_text())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-kvdequant\nVersion: 0.1.0\n")
    points = "wrong = wrong_kvdequant:WrongBackend\ndedup = wrong_kvdequant:DedupBackend\n"
    (info / "entry_points.txt").write_text("[hyv4_kvdequant.backends]\n" + points)
    return folder


@pytest.fixture(autouse=True)
def _plugin(plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(plugin_folder))
    monkeypatch.setattr(selector, "_instances", {})


def captured(shadow: Shadow, call: h.GatherCall, layer: str) -> torch.cuda.CUDAGraph:
    """The primary's call and the shadow's beside it, in a graph."""
    kv, indices = torch.empty_like(call.compact_kv), torch.empty_like(call.compact_indices)
    row = shadow.layer_index(layer)
    run_call(shadow.primary, call)
    shadow.observe(call, kv, indices, row)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_call(shadow.primary, call)
        shadow.observe(call, kv, indices, row)
    return graph


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_inside_a_replayed_graph(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_BACKEND_FAULT", fault)
    shadow = shadow_of(settings(tmp_path), "cuda", "triton")
    call = make_call(3, width=4 if fault == "width_4" else 1, device="cuda")
    expected = h.gather_dequantize(call.kv_cache, call.topk_indices, backend="torch")
    graph = captured(shadow, call, "layer.9")
    for _ in range(4):
        graph.replay()
    shadow.monitor.close()
    found = shadow.monitor.snapshot()["layer.9"]
    assert found.calls == 5
    assert found.mismatches > 0
    assert found.mismatches % 5 == 0
    assert found.first is not None
    assert found.first.element == FAULTS[fault]
    filled = call.topk_indices >= 0
    rows = call.compact_kv.view(torch.int16)[call.compact_indices[filled].long()]
    right = expected.compact_kv.view(torch.int16)[expected.compact_indices[filled].long()]
    assert torch.equal(rows, right), "what is served is the primary's"
    assert shadow.captured == {"8": True}


def test_a_thousand_replays_are_counted_exactly_while_the_counters_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_BACKEND_FAULT", "element")
    shadow = shadow_of(settings(), "cuda", "triton", read_every_s=0.01)
    call = make_call(4, device="cuda")
    graph = captured(shadow, call, "layer.0")
    for _ in range(1000):
        graph.replay()
    time.sleep(0.1)
    seen_while_open = shadow.monitor.snapshot()["layer.0"].calls
    shadow.monitor.close()
    found = shadow.monitor.snapshot()["layer.0"]
    assert seen_while_open > 0
    filled = int((call.topk_indices >= 0).sum())
    assert (found.calls, found.rows_compared, found.rows_differ) == (1001, 1001 * filled, 1001)


def test_captures_are_not_broken_by_the_reading_thread() -> None:
    shadow = shadow_of(settings(shadow="dedup"), "cuda", "triton", read_every_s=0.001)
    for seed in range(20):
        call = make_call(seed, device="cuda", tokens=4 * (seed + 1))
        captured(shadow, call, f"layer.{seed}").replay()
    torch.cuda.synchronize()
    shadow.monitor.close()
    assert all(counters.mismatches == 0 for counters in shadow.monitor.snapshot().values())


def test_right_backends_agree_over_random_calls() -> None:
    shadow = shadow_of(settings(shadow="dedup"), "cuda", "triton")
    for seed in range(500):
        call = make_call(seed, device="cuda", width=(1, 2, 4)[seed % 3])
        kv, indices = torch.empty_like(call.compact_kv), torch.empty_like(call.compact_indices)
        run_call(shadow.primary, call)
        shadow.observe(call, kv, indices, shadow.layer_index(f"layer.{seed % 7}"))
    shadow.monitor.close()
    layers = shadow.monitor.snapshot()
    assert sum(counters.calls for counters in layers.values()) == 500
    assert all(counters.mismatches == 0 for counters in layers.values())


def test_what_shadowing_costs_at_64_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not asserted: the ratio for the documentation."""
    device = torch.device("cuda", torch.cuda.current_device())
    cache = torch.randint(0, 0x70, (16384, 64, 656), dtype=torch.uint8, device=device)
    slots = torch.randint(0, 16384 * 64, (64, 2048), dtype=torch.int32, device=device)
    kv = torch.empty(slots.numel(), 576, dtype=torch.bfloat16, device=device)
    call = h.GatherCall(cache, slots, kv, torch.empty_like(slots))
    shadow = shadow_of(settings(shadow="dedup"), str(device), "triton")
    shadow.backend = h.load_backend("triton")(shadow.primary.target)
    other_kv, other_indices = torch.empty_like(kv), torch.empty_like(slots)
    row = shadow.layer_index("layer.0")

    def both() -> None:
        run_call(shadow.primary, call)
        shadow.observe(call, other_kv, other_indices, row)

    alone = time_graph(lambda: run_call(shadow.primary, call), device)
    shadowed = time_graph(both, device)
    shadow.monitor.close()
    with capsys.disabled():
        print(
            f"\nshadowing at 64 tokens of 2048 slots: {alone.median_us:.1f} us alone, {shadowed.median_us:.1f} us with "
            f"triton as its shadow, ratio {shadowed.median_us / alone.median_us:.2f}"
        )
    assert shadow.monitor.snapshot()["layer.0"].mismatches == 0
