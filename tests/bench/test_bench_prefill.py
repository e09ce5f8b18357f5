"""`hyv4-kvdequant bench prefill` on a CPU, with shapes that take no time."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from hyv4_kvdequant import ConfigurationError
from hyv4_kvdequant.bench.prefill import BatchShape, measure_step
from hyv4_kvdequant.cli.app import app
from hyv4_kvdequant.plans import choice

CPU = torch.device("cpu")
SMALL = ["--new-tokens", "8", "--context", "96", "--topk", "4", "--cache-slots", "256", "--runs", "5"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", "prefill", *SMALL, "--backend", "torch", "--device", "cpu", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_has_the_parts_and_what_was_measured() -> None:
    report = json.loads(run("--requests", "2", "--json"))
    assert [part["part"] for part in report["parts"]] == ["copy", "per slot", "chosen: slot"]
    assert report["parts"][0]["rows"] == 2 * 128
    assert report["parts"][1]["rows"] == 2 * 8 * 4
    assert "2 request(s) of 8 new tokens over a context of 96" in report["measured"]
    assert (report["backend"], report["device"]) == ("torch", "cpu")


def test_the_table_has_the_floor_and_the_choice() -> None:
    printed = run()
    for part in ("copy (floor)", "chosen: slot", "of per slot", "CPU"):
        assert part in printed


def test_a_context_plan_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "CONTEXT_OVERHEAD_BYTES", 0)
    shape = BatchShape(64, 128, topk=32, num_slots=1024)
    names = [part.name.strip() for part in measure_step("torch", shape, CPU, runs=5)]
    assert names == ["copy", "per slot", "chosen: context", "tables, once a step", "gather", "remap"]


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ({"new_tokens": 0, "context": 64}, "at least 1"),
        ({"new_tokens": 65, "context": 64}, "more than the context"),
        ({"new_tokens": 1, "context": 2**21}, "more than the cache"),
        ({"new_tokens": 1, "context": 64, "num_slots": 100}, "multiple of 64"),
    ],
)
def test_a_batch_that_cannot_be_made_is_an_error(shape: dict[str, int], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        BatchShape(**shape)


def test_tokens_select_what_they_see() -> None:
    from hyv4_kvdequant.bench.prefill import _select

    shape = BatchShape(6, 10, topk=8, num_slots=256)
    table = torch.tensor([3], dtype=torch.int32)
    selected = _select(shape, table, torch.Generator().manual_seed(0))
    for token, row in enumerate(selected):
        seen = 10 - 6 + token + 1
        filled = row[row >= 0]
        assert filled.unique().numel() == min(seen, 8)
        assert filled.min() >= 3 * 64
        assert filled.max() < 3 * 64 + seen
