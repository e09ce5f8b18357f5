"""The command line as a person and a script meet it: output, JSON, exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_folder import PluginFolder, backend_source
from safetensors.torch import load_file, save_file

GATE = "VLLM_HCU_HYV4_FP8_KV_DEQUANT"


def cli(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hyv4_kvdequant", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", **(env or {})},
        check=False,
    )


def test_list_shows_torch_with_its_distribution() -> None:
    done = cli("list", "--json", "--device", "cpu")
    assert done.returncode == 0
    (torch_row,) = [row for row in json.loads(done.stdout)["backends"] if row["name"] == "torch"]
    assert torch_row["distribution"] == "hyv4-kvdequant"
    assert torch_row["available"] is True
    assert "torch" in cli("list", "--device", "cpu").stdout


def test_doctor_says_what_would_be_chosen() -> None:
    done = cli("doctor", "--json", "--device", "cpu", env={GATE: "1"})
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["chosen"]["backend"] == "torch"
    assert "platform 'cpu'" in found["chosen"]["because"]
    assert found["versions"]["torch"]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({GATE: "1", GATE + "_BACKEND": "torhc"}, "Did you mean 'torch'?"),
        ({GATE: "1", GATE + "_BACKEND": ""}, "it is set but empty"),
        ({GATE: "ture"}, "'ture', which cannot be read"),
        ({GATE + "_BACKND": "torch"}, f"Did you mean '{GATE}_BACKEND'?"),
        ({GATE: "1", "VLLM_PLUGINS": "other"}, "add hyv4_kvdequant to VLLM_PLUGINS"),
    ],
)
def test_doctor_fails_where_a_start_up_would(env: dict[str, str], expected: str) -> None:
    done = cli("doctor", "--device", "cpu", env=env)
    assert done.returncode == 1
    assert expected in done.stderr.replace("\n", " ")


def test_doctor_with_the_gate_off_is_content() -> None:
    done = cli("doctor", "--device", "cpu", env={GATE + "_BACKEND": "torhc"})
    assert done.returncode == 0
    assert "The gate is off" in done.stdout


def test_verify_holds_torch_to_the_contract() -> None:
    done = cli("verify", "torch", "--json", "--device", "cpu")
    assert done.returncode == 0
    assert all(clause["passed"] or clause["not_run"] for clause in json.loads(done.stdout)["clauses"])


def test_verify_names_the_broken_clause_and_saves_the_input(plugins: PluginFolder, tmp_path: Path) -> None:
    plugins.install("zero-kernels", "zero_plugin", backend_source("zero"), "zero")
    env = {"PYTHONPATH": str(plugins.folder)}
    done = cli("verify", "zero", "--json", "--device", "cpu", "--save-dir", str(tmp_path / "failures"), env=env)
    assert done.returncode == 1
    clauses = {clause["clause"]: clause for clause in json.loads(done.stdout)["clauses"]}
    assert clauses["filled_rows_are_exact"]["failures"]
    assert clauses["unfilled_index_is_minus_one"]["passed"]
    saved = clauses["filled_rows_are_exact"]["saved_input"]
    assert cli("run", saved, "--backend", "torch").returncode == 0
    assert cli("run", saved, "--backend", "zero", env=env).returncode == 1


def test_run_does_the_main_job_on_the_golden_step(golden_step: Path) -> None:
    done = cli("run", str(golden_step), "--json", "--backend", "torch", "--device", "cpu")
    assert done.returncode == 0
    (report,) = json.loads(done.stdout)["runs"]
    assert report["rows_exact"] == report["rows"] == 6786
    assert report["errors"]["fp8_out"] < 2e-3
    assert report["errors"]["fp8_lse"] < 1e-3


def test_run_sees_a_result_that_is_not_the_recorded_one(golden_step: Path, tmp_path: Path) -> None:
    tensors = load_file(golden_step)
    tensors["fp8_out"] = tensors["fp8_out"] * 1.01
    save_file(tensors, tmp_path / "bent", {"softmax_scale": "0.041666666666666664"})
    assert cli("run", str(tmp_path / "bent"), "--backend", "torch").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "nothing.safetensors"], "nothing.safetensors does not exist"),
        (["run", "tests/data/hyv4_step.safetensors", "--backend", "nope"], "named 'nope'"),
        (["verify", "nope"], "named 'nope'"),
        (["verify", "torch", "--device", "gpu9"], "--device gpu9"),
    ],
)
def test_what_cannot_be_carried_out_is_status_2(arguments: list[str], expected: str) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
