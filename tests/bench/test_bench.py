"""`hyv4-kvdequant bench` on a CPU, with shapes that take no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hyv4_kvdequant import ConfigurationError, Target, load_backend
from hyv4_kvdequant.bench.gather import FLOOR, GatherShape, count_measurements, make_call, measure_gather
from hyv4_kvdequant.cli import bench
from hyv4_kvdequant.timing import time_eager

CPU = torch.device("cpu")
SMALL = ["--topk", "8", "--context", "128", "--cache-slots", "256", "--runs", "5", "--device", "cpu"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(bench.app, ["--backend", "torch", *SMALL, *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_table_shows_backends_beside_the_floor_and_says_what_was_measured() -> None:
    printed = run("--tokens", "1,3")
    for part in ("torch", FLOOR, "eager", "CPU", "topk 8", "context 128 of 256 slots", "caches cold", "First call"):
        assert part in printed.replace("\n", " ")


def test_json_has_every_measurement() -> None:
    report = json.loads(run("--tokens", "2,4", "--width", "2", "--json"))
    rows = report["measurements"]
    first = rows.pop(1)
    assert (first["backend"], first["mode"], first["runs"]) == ("torch", "first", 1)
    assert [(row["backend"], row["num_tokens"], row["mode"]) for row in rows] == [
        (name, count, "eager") for count in (2, 4) for name in (FLOOR, "torch")
    ]
    assert all(row["p10_us"] <= row["median_us"] <= row["p90_us"] for row in rows)
    assert all(row["of_floor"] == 1 for row in rows if row["backend"] == FLOOR)
    assert report["device"] == "cpu"
    assert "torch" in report["versions"]


def test_the_plot_is_written(tmp_path: Path) -> None:
    run("--tokens", "1,2", "--plot", str(tmp_path / "bench.png"))
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    arguments = ["--backend", "torch", *SMALL, "--tokens", "1", "--plot", str(tmp_path / "bench.word")]
    error = CliRunner().invoke(bench.app, arguments).exception
    assert isinstance(error, ConfigurationError)
    assert "bench.word" in str(error)


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ({"num_tokens": 0}, "at least 1"),
        ({"num_tokens": 3, "tokens_per_request": 2}, "must divide"),
        ({"num_tokens": 1, "context": 2**21}, "more than the cache"),
        ({"num_tokens": 1, "context": 100}, "multiples of 64"),
        ({"num_tokens": 1, "topk": 256, "context": 128}, "more slots than the context"),
    ],
)
def test_a_shape_that_cannot_be_made_is_an_error(shape: dict[str, int], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        GatherShape(**shape)


def test_token_counts_that_cannot_be_read_are_an_error() -> None:
    error = CliRunner().invoke(bench.app, ["--tokens", "1;4"]).exception
    assert isinstance(error, ConfigurationError)
    assert "1;4" in str(error)


def test_slots_come_from_the_context_and_requests_share_seven_eighths() -> None:
    shape = GatherShape(8, topk=64, context=512, num_slots=4096, tokens_per_request=4)
    cache = torch.zeros((64, 64, 656), dtype=torch.uint8)
    call = make_call(shape, cache, torch.Generator().manual_seed(0))
    assert all(row.unique().numel() == 64 for row in call.topk_indices)
    for request in call.topk_indices.view(2, -1):
        assert request.unique().numel() == 56 + 4 * 8
    assert (call.topk_indices // 64).unique().numel() <= 512 // 64


def test_the_bytes_are_those_of_the_facts() -> None:
    assert GatherShape(1).num_bytes == 2048 * (656 + 1152 + 8)


def test_measurements_are_counted_ahead() -> None:
    backends = [load_backend("torch")(Target.detect(CPU))]
    shapes = [GatherShape(count, topk=4, context=64, num_slots=128) for count in (1, 2, 3)]
    found = list(measure_gather(backends, shapes, CPU, runs=5))
    assert len(found) == count_measurements(backends, shapes, CPU) == 7


def test_timing_is_of_the_function() -> None:
    timing = time_eager(lambda: torch.ones(2**20).sum(), CPU, runs=7)
    assert timing.runs == 7
    assert 0 < timing.p10_us <= timing.median_us <= timing.p90_us
