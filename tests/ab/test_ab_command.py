"""`hyv4-kvdequant ab report` and `ab replay` as a person and a script meet them: output, JSON, PNG, exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from shadowing import make_call, observe, settings, shadow_of

import hyv4_kvdequant as h
from hyv4_kvdequant import selector
from hyv4_kvdequant.ab.counters import FirstMismatch, LayerCounters
from hyv4_kvdequant.ab.report import Report, write_report
from hyv4_kvdequant.ab.trace import make_recorder
from hyv4_kvdequant.cli import console, main

PNG = b"\x89PNG\r\n\x1a\n"
FIRST = FirstMismatch(call=0, token=2, k=3, element=7, slot=70, primary_bits=0x3F80, shadow_bits=0x3F81)
AGREED = LayerCounters(calls=10, rows_compared=1280)
DIFFERED = LayerCounters(10, 1280, 2, 2, 1, 0, FIRST)


class Done(NamedTuple):
    """What a command ended with."""

    status: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def ab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line in this process: a new one would import PyTorch anew for each test."""
    monkeypatch.setattr(console.out, "width", 160)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["hyv4-kvdequant", "ab", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return run


def write(
    folder: Path, layer_one: LayerCounters, *, run: str = "run", rank: int = 0, updated: float = 1.0, error: str = ""
) -> None:
    layers = {"layer.0": AGREED, "layer.1": layer_one}
    errors = [error] if error else []
    write_report(folder, Report(run, rank, updated, True, "torch", "wrong", "cpu", 1, {"64": True}, errors, layers))


# --- report ---


def test_agreement_is_status_0(ab: Command, tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, AGREED, rank=rank)
    done = ab("report", str(tmp_path))
    assert done.status == 0, done.stderr
    assert "the backends agree" in done.stdout
    for shown in ("rank 0 on cpu", "rank 1 on cpu", "64 tokens compared", "5,120"):
        assert shown in done.stdout


def test_a_mismatch_on_one_rank_is_status_1_with_its_place(ab: Command, tmp_path: Path) -> None:
    write(tmp_path, AGREED, rank=0)
    write(tmp_path, DIFFERED, rank=3)
    done = ab("report", str(tmp_path))
    assert done.status == 1
    assert "not safe" in done.stdout
    assert "first mismatch in layer.1, rank 3: FirstMismatch(call=0, token=2, k=3, element=7, slot=70" in done.stdout


def test_json_has_total_layers_and_ranks(ab: Command, tmp_path: Path) -> None:
    write(tmp_path, DIFFERED, rank=0)
    write(tmp_path, DIFFERED, rank=1)
    done = ab("report", str(tmp_path), "--json")
    verdict = json.loads(done.stdout)
    assert done.status == 1
    assert verdict["ok"] is False
    assert (verdict["total"]["calls"], verdict["total"]["rows_differ"]) == (40, 4)
    assert verdict["layers"]["layer.0"]["rows_differ"] == 0
    assert verdict["layers"]["layer.1"]["first"]["slot"] == 70
    assert [rank["rank"] for rank in verdict["ranks"]] == [0, 1]


def test_the_report_is_drawn(ab: Command, tmp_path: Path) -> None:
    write(tmp_path, DIFFERED)
    picture = tmp_path / "mismatches.png"
    assert ab("report", str(tmp_path), "--plot", str(picture)).status == 1
    assert picture.read_bytes().startswith(PNG)


def test_the_run_updated_last_is_shown_unless_one_is_named(ab: Command, tmp_path: Path) -> None:
    write(tmp_path, DIFFERED, run="before", updated=1.0)
    write(tmp_path, AGREED, run="after", updated=2.0)
    assert ab("report", str(tmp_path)).status == 0
    assert ab("report", str(tmp_path), "--run", "before").status == 1


@pytest.mark.parametrize(
    ("counters", "error", "shown"),
    [(AGREED, "RuntimeError: no kernel image", "switched off: RuntimeError"), (None, "", "nothing was compared")],
)
def test_what_proves_nothing_is_status_1(
    ab: Command, counters: LayerCounters | None, error: str, shown: str, tmp_path: Path
) -> None:
    if counters is None:
        write_report(tmp_path, Report("run", 0, 1.0, True, "torch", "wrong", "cpu", 1))
    else:
        write(tmp_path, counters, error=error)
    done = ab("report", str(tmp_path))
    assert done.status == 1
    assert shown in done.stdout


def test_a_rank_without_a_report_is_status_1(ab: Command, tmp_path: Path) -> None:
    layers = {"layer.0": AGREED}
    report = Report("run", 0, 1.0, True, "torch", "wrong", "cpu", 1, layers=layers, world_size=2)
    write_report(tmp_path, report)
    done = ab("report", str(tmp_path))
    assert done.status == 1
    assert "rank 1 of 2: no report" in done.stdout
    write_report(tmp_path, replace(report, rank=1))
    assert ab("report", str(tmp_path)).status == 0


@pytest.mark.parametrize("run", [None, "other"])
def test_no_report_to_show_is_status_2(ab: Command, run: str | None, tmp_path: Path) -> None:
    if run:
        write(tmp_path, AGREED)
    done = ab("report", str(tmp_path), *(["--run", run] if run else []))
    assert (done.status, done.stdout) == (2, "")
    assert ("the folder holds run" if run else "holds no shadow report") in done.stderr


# --- replay ---


@pytest.fixture
def traces(tmp_path: Path, wrong_plugin: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two calls in which the shadow was wrong, as recorded while serving."""
    monkeypatch.setattr(selector, "_instances", {})
    monkeypatch.setenv("WRONG_BACKEND_FAULT", "element")
    given = settings(tmp_path / "reports", trace_on_mismatch=True, trace=2)
    shadow = shadow_of(given, run_id="r")
    recorder = make_recorder(h.load_backend("torch")(h.Target.detect("cpu")), given, 0, "r")
    assert recorder is not None
    for seed in (1, 2):
        call = make_call(seed)
        recorder.record(call, "layer.5", None, observe(shadow, call, "layer.5"))
    recorder.close()
    shadow.close()
    return [str(path) for path in recorder.written]


def test_a_recorded_mismatch_is_there_again_with_its_evidence(ab: Command, traces: list[str]) -> None:
    done = ab("replay", *traces, "--a", "torch", "--b", "wrong", "--device", "cpu", "--runs", "0")
    assert done.status == 1, done.stderr
    assert done.stdout.count("first mismatch at slot") == 2
    assert "expected: 0x" in done.stdout
    assert "record: " in done.stdout


def test_replay_as_json_and_drawn(ab: Command, traces: list[str], tmp_path: Path) -> None:
    picture = tmp_path / "times.png"
    more = ["--device", "cpu", "--runs", "3", "--json", "--plot", str(picture)]
    done = ab("replay", *traces, "--a", "torch", "--b", "dedup", *more)
    assert done.status == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["a"], result["b"], result["device"], result["ok"]) == ("torch", "dedup", "cpu", True)
    assert [call["layer"] for call in result["calls"]] == ["layer.5", "layer.5"]
    assert result["ratio"]["eager"]["low"] <= result["ratio"]["eager"]["median"] <= result["ratio"]["eager"]["high"]
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["--b", "torch"], "proves nothing"),
        (["--b", "nobody"], "asked for by --b"),
        (["--b", "dedup", "--runs", "0", "--plot", "times.png"], "--runs 0 takes none"),
    ],
)
def test_a_replay_that_cannot_be_is_status_2(ab: Command, changed: list[str], expected: str, traces: list[str]) -> None:
    done = ab("replay", *traces, "--a", "torch", "--device", "cpu", *changed)
    assert (done.status, done.stdout) == (2, "")
    assert expected in done.stderr.replace("\n", " ")


@pytest.mark.parametrize("damage", ["truncated", "foreign"])
def test_a_trace_that_cannot_be_read_is_named_and_nothing_is_shown(ab: Command, damage: str, traces: list[str]) -> None:
    last = Path(traces[-1])
    last.write_bytes(last.read_bytes()[:-100] if damage == "truncated" else b"not a trace")
    done = ab("replay", *traces, "--a", "torch", "--b", "dedup", "--device", "cpu", "--runs", "0")
    assert (done.status, done.stdout) == (2, "")
    assert last.name in done.stderr.replace("\n", "")
