"""A third party's distribution beside our wheel: found, chosen, verified, used, uninstalled; and bad neighbours."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fresh_environment import ROOT, FreshEnvironment, fresh  # noqa: F401 - a fixture

GATE = "VLLM_HCU_HYV4_FP8_KV_DEQUANT"
GOLDEN_STEP = str(ROOT / "tests" / "data" / "hyv4_step.safetensors")
CHOSEN = {GATE: "1", f"{GATE}_BACKEND": "acme"}
BAD = ("broken_import", "future_api", "loud_import", "exiting_import")
NO_ACME = "No installed distribution registers a backend named 'acme'"


@pytest.fixture(scope="module")
def with_acme(fresh: FreshEnvironment) -> Iterator[FreshEnvironment]:  # noqa: F811
    with fresh.installed(*BAD), fresh.installed("acme"):
        yield fresh


def listed(env: FreshEnvironment, *arguments: str) -> dict[str, dict[str, Any]]:
    """What `list` shows, by backend name; its standard output must be JSON and nothing else."""
    shown = json.loads(env.succeed("hyv4-kvdequant", "list", "--json", "--device", "cpu", *arguments))
    return {row["name"]: row for row in shown["backends"]}


@pytest.fixture(scope="module")
def backends(with_acme: FreshEnvironment) -> dict[str, dict[str, Any]]:
    return listed(with_acme)


# --- a plugin that works ---


def test_our_wheel_is_used_and_not_the_checkout(with_acme: FreshEnvironment) -> None:
    imported = with_acme.succeed("python", "-c", "import hyv4_kvdequant as core; print(core.__file__)")
    assert imported.startswith(str(with_acme.folder / "env"))


def test_it_is_discovered(backends: dict[str, dict[str, Any]]) -> None:
    acme = backends["acme"]
    assert (acme["distribution"], acme["version"], acme["available"]) == ("acme", "2.5.0", True)
    assert acme["features"] == {"request_dedup": True, "mapping_reuse": False, "graph_safe": False}


def test_it_is_chosen_by_environment_variable(with_acme: FreshEnvironment) -> None:
    found = json.loads(with_acme.succeed("hyv4-kvdequant", "doctor", "--json", "--device", "cpu", **CHOSEN))
    assert found["chosen"]["backend"] == "acme"
    assert found["chosen"]["registered_by"] == "acme (acme 2.5.0)"
    assert f"{GATE}_BACKEND" in found["chosen"]["because"]


def test_it_is_verified(with_acme: FreshEnvironment) -> None:
    report = json.loads(with_acme.succeed("hyv4-kvdequant", "verify", "acme", "--device", "cpu", "--json"))
    assert report["ok"]
    assert sum(row["passed"] for row in report["clauses"]) >= 9


def test_it_does_the_main_job(with_acme: FreshEnvironment) -> None:
    shown = json.loads(with_acme.succeed("hyv4-kvdequant", "run", GOLDEN_STEP, "--device", "cpu", "--json", **CHOSEN))
    (run,) = shown["runs"]
    assert run["backend"] == "acme"
    assert run["ok"]
    assert run["rows_exact"] == run["rows"] > 0


# --- benchmarked, and A/B'd against ours ---


def test_it_is_benchmarked_beside_ours(with_acme: FreshEnvironment) -> None:
    shape = ("--tokens", "1,2", "--topk", "64", "--context", "1024", "--cache-slots", "1024")
    chosen = ("--backend", "acme", "--backend", "triton", "--backend", "torch", "--device", "cpu", "--runs", "5")
    picture = with_acme.work / "bench.png"
    command = ("hyv4-kvdequant", "bench", *shape, *chosen, "--json", "--plot", str(picture))
    shown = json.loads(with_acme.succeed(*command, TRITON_INTERPRET="1"))
    measured = [(row["backend"], row["num_tokens"]) for row in shown["measurements"] if row["mode"] == "eager"]
    assert {(name, tokens) for name in ("acme", "triton", "torch") for tokens in (1, 2)} <= set(measured)
    assert all(row["median_us"] > 0 for row in shown["measurements"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ours", ["torch", "triton"])
def test_it_is_compared_with_ours_on_a_recorded_call(ours: str, with_acme: FreshEnvironment) -> None:
    command = ("hyv4-kvdequant", "ab", "replay", GOLDEN_STEP, "--a", ours, "--b", "acme", "--device", "cpu")
    done = with_acme.run(*command, "--runs", "1", "--json", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["a"], result["b"], result["ok"]) == (ours, "acme", True)
    (call,) = result["calls"]
    assert call["counters"]["rows_compared"] == 6786
    assert call["ratio"]["eager"] > 0


# --- plugins that do not ---


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("broken", ["broken-import 0.1", "ModuleNotFoundError", "a_vendor_library_that_is_not_installed"]),
        ("future", ["future-api 7.0", "api_version 99", "speaks version 1"]),
        ("exiting", ["exiting-import 0.1", "SystemExit", "no licence found"]),
    ],
)
def test_each_bad_plugin_shows_its_message(name: str, expected: list[str], backends: dict[str, dict[str, Any]]) -> None:
    row = backends[name]
    assert row["available"] is False
    for part in [*expected, "What to do: "]:
        assert part in row["problem"]


def test_a_plugin_that_prints_does_not_reach_the_json(backends: dict[str, dict[str, Any]]) -> None:
    assert backends["loud"]["reasons"] == [
        "this plugin is for tests and serves nothing",
        "and it has a second reason",
    ]


def test_bad_plugins_harm_nobody_else(backends: dict[str, dict[str, Any]]) -> None:
    assert {name for name, row in backends.items() if row["available"]} >= {"acme", "torch"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("future", "api_version 99"), ("exiting", "no licence found"), ("loud", "and it has a second reason")],
)
def test_asking_for_a_bad_plugin_fails_closed(name: str, expected: str, with_acme: FreshEnvironment) -> None:
    done = with_acme.run("hyv4-kvdequant", "run", GOLDEN_STEP, "--backend", name, "--device", "cpu")
    assert done.returncode == 2
    assert done.stdout == ""
    assert expected in done.stderr


def test_a_plugin_that_hangs_is_given_up_on(with_acme: FreshEnvironment) -> None:
    with with_acme.installed("hanging_import"):
        start = time.monotonic()
        shown = listed(with_acme, "--timeout", "1")
        took = time.monotonic() - start
    assert took < 10
    assert "did not finish within 1 s" in shown["hanging"]["problem"]
    assert "hanging-import" in shown["hanging"]["problem"]
    assert shown["acme"]["available"]


# --- two of one name, and none ---


def test_a_second_distribution_with_its_name_is_a_conflict(with_acme: FreshEnvironment) -> None:
    with with_acme.installed("acme_rival"):
        shown = listed(with_acme)
        failed = with_acme.run("hyv4-kvdequant", "doctor", "--device", "cpu", **CHOSEN)
    for part in ("acme 2.5.0", "acme-rival 0.9", "registered more than once"):
        assert part in shown["acme"]["problem"]
        assert part in failed.stderr.replace("\n", " ")
    assert failed.returncode == 1
    assert shown["torch"]["available"]


def test_uninstalled_it_fails_closed(fresh: FreshEnvironment) -> None:  # noqa: F811
    with fresh.installed("acme"):
        pass
    done = fresh.run("hyv4-kvdequant", "doctor", "--device", "cpu", **CHOSEN)
    run = fresh.run("hyv4-kvdequant", "run", GOLDEN_STEP, "--device", "cpu", **CHOSEN)
    assert done.returncode == 1
    assert "A start-up would fail" in done.stderr
    assert f"asked for by the environment variable {GATE}_BACKEND" in done.stderr
    for said in (done.stderr, run.stderr):
        assert NO_ACME in said.replace("\n", " ")
    assert (run.returncode, run.stdout) == (2, "")
