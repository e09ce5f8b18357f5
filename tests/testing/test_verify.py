"""`verify`: what it prints, and failing inputs saved so that they fail again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mutants import GivesReasonAsString, IgnoresBlockStride, Mutant, Offsets32Bit, ReusesLastMapping
from typer.testing import CliRunner

from hyv4_kvdequant.cli.app import app
from hyv4_kvdequant.contract import ConfigurationError
from hyv4_kvdequant.registry import temporarily_registered
from hyv4_kvdequant.steps import load_step
from hyv4_kvdequant.testing import CLAUSES


def verify(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["verify", *arguments, "--device", "cpu"], catch_exceptions=False)
    return done.exit_code, done.stdout


def failures_of(mutant: Mutant, *arguments: str) -> dict[str, dict[str, object]]:
    with temporarily_registered(mutant):
        status, printed = verify(mutant.name, "--json", *arguments)
    assert status == 1
    return {row["clause"]: row for row in json.loads(printed)["clauses"] if row["failures"]}


def test_all_clauses_of_a_right_backend() -> None:
    status, printed = verify("torch", "--json", "--seed", "3")
    found = json.loads(printed)
    assert (status, found["ok"], found["seed"]) == (0, True, 3)
    assert [row["clause"] for row in found["clauses"]] == [clause.name for clause in CLAUSES]
    assert all(row["passed"] or row["not_run"] for row in found["clauses"])


def test_a_failing_input_is_saved_and_fails_again(tmp_path: Path) -> None:
    folder = tmp_path / "failures"
    found = failures_of(IgnoresBlockStride, "--clause", "filled_rows_are_exact", "--save-dir", str(folder))
    saved = Path(str(found["filled_rows_are_exact"]["saved_input"]))
    assert saved.parent == folder
    step = load_step(saved)
    assert step.kv_cache.stride(0) > step.kv_cache[0].numel()
    assert step.notes["clause"] == "filled_rows_are_exact"
    assert "filled_rows_are_exact" in failures_of(IgnoresBlockStride, "--step", str(saved))
    assert verify("torch", "--step", str(saved))[0] == 0


def test_the_message_says_how_to_repeat(tmp_path: Path) -> None:
    with temporarily_registered(IgnoresBlockStride):
        status, printed = verify("dissected", "--save-dir", str(tmp_path), "--clause", "filled_rows_are_exact")
    assert status == 1
    assert "broken" in printed
    assert "first at entry" in printed
    assert "replay it with: hyv4-kvdequant verify dissected --device cpu --step " in printed


@pytest.mark.parametrize(
    ("mutant", "clause"),
    [(Offsets32Bit, "offsets_past_2_gib"), (GivesReasonAsString, "availability_is_plain_facts")],
)
def test_an_input_too_large_or_missing_is_not_saved(mutant: Mutant, clause: str, tmp_path: Path) -> None:
    arguments = ["--clause", clause, "--save-dir", str(tmp_path / "new")]
    assert failures_of(mutant, *arguments)[clause]["saved_input"] is None
    assert not (tmp_path / "new").exists()
    with temporarily_registered(mutant):
        _, printed = verify("dissected", *arguments)
    assert f"input not saved; repeat with: hyv4-kvdequant verify dissected --device cpu --seed 0 --clause {clause}" in (
        printed
    )


def test_the_last_input_of_several_calls_is_saved(tmp_path: Path) -> None:
    clause = "reused_mapping_serves_new_contents"
    found = failures_of(ReusesLastMapping, "--clause", clause, "--save-dir", str(tmp_path))
    assert load_step(Path(str(found[clause]["saved_input"]))).notes["backend"] == "dissected"


def test_an_unknown_clause() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'filled_rows_are_exact'"):
        verify("torch", "--clause", "filled_rows_exact")


def test_two_runs_with_one_seed_say_the_same(tmp_path: Path) -> None:
    runs = [failures_of(IgnoresBlockStride, "--seed", "9", "--save-dir", str(tmp_path)) for _ in range(2)]
    assert runs[0] == runs[1]
