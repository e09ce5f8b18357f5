"""The command line as a person and a script meet it: output, JSON, exit status."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plugin_folder import PluginFolder, backend_source
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hyv4_kvdequant
from hyv4_kvdequant.cli.console import printable

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


# --- for a bug report ---


def test_version_is_what_a_bug_report_asks_for() -> None:
    about = json.loads(cli("version", "--json").stdout)
    assert about["hyv4-kvdequant"] == hyv4_kvdequant.__version__
    assert about["torch"] == torch.__version__
    assert {"triton", "vllm", "vllm-hcu", "lightop"} <= about.keys()
    assert platform.python_version() in about["python"]
    assert about["platform"] == platform.platform()
    assert len(about["GPU"]) == torch.cuda.device_count()
    assert f"torch (hyv4-kvdequant {hyv4_kvdequant.__version__})" in about["backends"]
    printed = cli("version").stdout
    for name in about:
        assert re.search(rf"^{name} +\S", printed, re.MULTILINE), name


# --- at 80 columns ---

LONGEST = GATE + "_TRACE_ON_MISMATCH"


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("command", ["list", "doctor"])
def test_nothing_is_wider_than_the_terminal_and_no_word_is_cut(command: str, columns: int) -> None:
    wide, narrow = (
        cli(command, "--device", "cpu", env={"COLUMNS": str(width), GATE: "1", GATE + "_BACKEND": "torch"}).stdout
        for width in (1000, columns)
    )
    assert wide.split() == narrow.split()
    words = set(wide.split())
    for line in narrow.splitlines():
        assert len(line.rstrip()) <= columns or line.strip() in words, line
    if command == "doctor":
        assert LONGEST in narrow


def test_list_shows_a_block_for_each_backend(plugins: PluginFolder) -> None:
    plugins.install("far-kernels", "far_plugin", backend_source("far", reasons=("It is far away.", "And busy.")), "far")
    shown = cli("list", "--device", "cpu", env={"PYTHONPATH": str(plugins.folder)}).stdout
    assert "far  unavailable\n  far-kernels 1.2\n  features: graph_safe\n  - It is far away.\n  - And busy.\n" in shown
    assert "torch  available\n  hyv4-kvdequant " in shown


# --- what others wrote is printed as it is ---

ODD = "[/]l0 [red]x[/red] :warning: \x1b[31m\u202e"


def test_a_layer_of_any_name_is_printed_as_it_is(golden_step: Path, tmp_path: Path) -> None:
    trace = tmp_path / "[red]trace[bold].safetensors"
    with safe_open(golden_step, "pt") as file:
        save_file(load_file(golden_step), trace, {**file.metadata(), "layer": ODD})
    done = cli(
        *("ab", "replay", str(trace), "--a", "torch", "--b", "triton", "--runs", "0", "--device", "cpu"),
        env={"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "[/]l0 [red]x[/red] :warning: \\x1b[31m\\u202e" in done.stdout
    assert "[red]trace[bold].safetensors" in done.stdout
    assert "\x1b" not in done.stdout
    done = cli("run", str(trace), "--backend", "torch", "--device", "cpu")
    assert "[red]trace[bold].safetensors on cpu" in done.stdout


@pytest.mark.parametrize("command", ["list", "run", "doctor", "verify"])
def test_a_reason_of_any_text_is_printed_as_it_is(command: str, plugins: PluginFolder, golden_step: Path) -> None:
    plugins.install("odd-kernels", "odd_plugin", backend_source("odd", reasons=(ODD,)), "odd")
    arguments = {"run": (str(golden_step), "--all"), "verify": ("odd",)}.get(command, ())
    env = {"PYTHONPATH": str(plugins.folder), GATE: "1", GATE + "_BACKEND": "odd"}
    done = cli(command, *arguments, "--device", "cpu", env=env)
    assert printable(ODD) in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["[/]", "[red]x[/]", "\x1b[31mx"])
@pytest.mark.parametrize("command", [("verify",), ("run", "{step}", "--backend"), ("run",)])
def test_an_argument_of_any_text_is_printed_as_it_is(command: tuple[str, ...], name: str, golden_step: Path) -> None:
    done = cli(*(str(golden_step) if word == "{step}" else word for word in command), name)
    assert done.returncode == 2
    assert name.replace("\x1b", "\\x1b") in done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr


def test_a_file_name_that_is_no_text_is_printed_too() -> None:
    done = cli("run", os.fsdecode(b"\xff.safetensors"))
    assert done.returncode == 2
    assert "\\udcff.safetensors does not exist" in done.stderr


def test_no_command_writes_markup() -> None:
    """The consoles print it as it is, so it would be seen."""
    for path in Path(hyv4_kvdequant.__path__[0], "cli").glob("*.py"):
        assert not re.search(r"\[/?(green|red|yellow|bold|dim)?\]", path.read_text().replace("[]", "")), path
