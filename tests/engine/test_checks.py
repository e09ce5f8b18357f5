"""The engine suite's judge on a CPU: a claim that is broken is seen to be broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checks import judge
from configurations import CONFIGURATIONS, PREFIX
from prompts import BATCH, long_prompts, short_prompts, traffic
from safetensors.torch import load_file
from tiny_model import INDEXERS, LAYERS, make_config, write_checkpoint

SHORT = {"first": [[[5, 6], [[[5, -0.5]], [[6, -0.25]]]]], "again": [[[5, 6], [[[5, -0.5]], [[6, -0.25]]]]]}
ASKED = {"gate": True, "graphs": False, "heads": 8, "mtp": False, "ranks": 1}
COUNTED = {"rows_differ": 0, "index_disagreements": 0, "rows_compared": 9, "calls": 3}
GOOD: dict[str, dict[str, Any]] = {
    "off-eager": {
        "short": SHORT,
        "teacher": [[-1.0, -2.0]],
        "memory": {"kv_blocks": 9, "kv_cache_bytes": 3 * 2**30, "peak_allocated": 5, "workspace_bytes": 0},
    },
    "triton-eager": {
        "short": SHORT,
        "teacher": [[-1.01, -2.0]],
        "asked": ASKED,
        "named_in_log": 1,
        "left_running": [],
        "left": {"threads": [], "files": []},
        "on_off": {
            "shapes": {"decode: q (1, 8, 8, 576)": 2},
            "prefill": {"calls": 2, "out": 5e-4, "lse": 1e-6, "infinite_lse_differs": 0},
            "decode": {"calls": 2, "out": 2e-3, "lse": 1e-6, "infinite_lse_differs": 0},
        },
        "memory": {"kv_blocks": 6, "kv_cache_bytes": 2 * 2**30, "peak_allocated": 5, "workspace_bytes": 2**30},
    },
    "torch-eager": {"short": SHORT},
    "heads32-mtp-eager": {
        "asked": {**ASKED, "heads": 32, "mtp": True},
        "on_off": {
            "shapes": {"decode: q (8, 4, 32, 576)": 2},
            "decode": {"calls": 2, "out": 2e-3, "lse": 1e-6, "infinite_lse_differs": 0},
        },
    },
    "off-graphs": {"asked": {**ASKED, "gate": False}, "named_in_log": 0},
    "shadow-graphs": {
        "exit_status": 0,
        "asked": {**ASKED, "graphs": True},
        "memory": {"plans": {"slot": 2}},
        "shadow_report": {
            "exit_status": 0,
            "total": COUNTED,
            "captured": [1],
            "finished": True,
            "ranks": 1,
            "left_in_folder": ["shadow-x-rank0.json"],
        },
    },
    "soak": {
        "soak": {
            "seconds": 3.0,
            **dict.fromkeys(("requests", "finished", "aborted", "steps", "prompt_tokens"), 4),
            **dict.fromkeys(("aborted_before_a_token", "preemptions", "prefix_hit_tokens"), 2),
            "tenths": {"first": [1e9, 70, 4], "last": [1e9, 70, 4]},
        }
    },
    "start-up: unknown backend": {"exit_status": 1, "message": "no such backend", "seconds": 9.0},
    "serve": {"generated": 16, "ready_seconds": 3.0, "series": 5, "shadow_calls": 80.0, "named_in_log": 1},
}


def broken(path: str, value: Any) -> list[str]:
    """The claims that do not hold once one value is another."""
    results = json.loads(json.dumps(GOOD))  # a deep copy without shared parts
    *parents, last = path.split("/")
    place: Any = results
    for key in parents:
        place = place[int(key) if isinstance(place, list) else key]
    place[int(last) if isinstance(place, list) else last] = value
    return [line.claim for line in judge(results) if line.holds is False]


def test_what_is_right_holds() -> None:
    assert [line for line in judge(GOOD) if not line.holds] == []


@pytest.mark.parametrize(
    ("path", "value", "claim"),
    [
        ("torch-eager/short/first/0/0/1", 7, "torch-eager and triton-eager"),
        ("torch-eager/short/again/0/1/0/0/1", -0.5000001, "torch-eager: a second run"),
        ("triton-eager/teacher/0/0", -1.5, "teacher-forced"),
        ("triton-eager/on_off/decode/out", 5e-3, "decode agrees"),
        ("triton-eager/on_off/decode/lse", 2e-5, "decode agrees"),
        ("triton-eager/on_off/decode/infinite_lse_differs", 1, "decode agrees"),
        ("triton-eager/memory/kv_cache_bytes", 3 * 2**30, "makes room"),
        ("triton-eager/on_off", {"error": "Traceback\nRuntimeError: out of memory"}, "triton-eager runs"),
        ("shadow-graphs/shadow_report/total/rows_differ", 1, "no mismatch"),
        ("shadow-graphs/shadow_report/total/rows_compared", 0, "no mismatch"),
        ("shadow-graphs/shadow_report/finished", False, "ends in order"),
        ("shadow-graphs/shadow_report/left_in_folder", ["a.json", "b.partial"], "ends in order"),
        ("soak/soak/preemptions", 0, "preemptions"),
        ("soak/soak/tenths/last", [1.02e9, 70, 4], "memory stay flat"),
        ("soak/soak/tenths/last", [1e9, 71, 4], "open files stay flat"),
        ("start-up: unknown backend/exit_status", 0, "stops the start-up"),
        ("start-up: unknown backend/message", None, "stops the start-up"),
        ("serve/shadow_calls", 0.0, "/metrics"),
        ("serve/named_in_log", 2, "serve: each worker names its backend once"),
        ("off-graphs/named_in_log", 1, "off-graphs: each worker"),
        ("triton-eager/left_running", ["EngineCore"], "leaves no process"),
        ("triton-eager/left/threads", ["hyv4-kvdequant-shadow-0"], "no thread"),
        ("triton-eager/on_off", {"shapes": {}}, "decode agrees"),
        ("heads32-mtp-eager/on_off/shapes", {"decode: q (8, 1, 32, 576)": 2}, "rows of requests"),
        ("shadow-graphs/shadow_report/total/calls", 2, "replays are compared"),
        ("shadow-graphs/shadow_report/captured", [], "replays are compared"),
    ],
)
def test_what_is_broken_is_seen(path: str, value: Any, claim: str) -> None:
    assert any(claim in found for found in broken(path, value))


def test_configurations_differ_by_variables_and_by_nothing_else() -> None:
    names = [one.name for one in CONFIGURATIONS]
    assert len(set(names)) == len(names)
    for one in CONFIGURATIONS:
        assert all(variable.startswith(PREFIX) for variable in one.environ("reports"))
        assert bool(one.environ("reports")) == (one.backend is not None)


def test_short_contexts_never_pass_topk_and_long_ones_do() -> None:
    assert len(short_prompts(512, 24)) == len(long_prompts()) == BATCH
    assert max(map(len, short_prompts(512, 24))) + 24 <= 512
    assert min(map(len, long_prompts())) > 512
    assert short_prompts(512, 24) == short_prompts(512, 24)


def test_traffic_is_the_same_every_time() -> None:
    first, again = traffic(3), traffic(3)
    assert [next(first) for _ in range(50)] == [next(again) for _ in range(50)]


def test_the_checkpoint_has_sinks_and_both_kinds_of_indexers(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path, 8)
    assert config == make_config(8)
    weights = load_file(tmp_path / "model.safetensors")
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.self_attn."
        assert weights[prefix + "learnable_sink_param"].shape == (8,)
        assert (prefix + "indexer.wk.weight" in weights) == (INDEXERS[layer] == "full")
