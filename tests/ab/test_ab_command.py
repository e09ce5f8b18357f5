"""`hyv4-kvdequant ab report` and `ab replay` as a person and a script meet them: output, JSON, PNG, exit status."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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


def make(layer_one: LayerCounters = AGREED, **changes: Any) -> Report:
    """A report of a finished rank of a run of one, whose layer.0 agreed; `changes` to it."""
    layers = {"layer.0": AGREED, "layer.1": layer_one}
    report = Report("run", 0, time.time(), True, "torch", "wrong", "cpu", 1, {"64": True}, [], layers)
    return replace(report, **{"process": f"{changes.get('rank', 0) + 1}-00000000", **changes})


def write(folder: Path, *reports: Report) -> None:
    for report in reports:
        write_report(folder, report)


# --- report ---


def test_agreement_is_status_0(ab: Command, tmp_path: Path) -> None:
    write(tmp_path, *(make(rank=rank, world_size=2) for rank in (0, 1)))
    done = ab("report", str(tmp_path))
    assert done.status == 0, done.stdout
    assert "the backends agree" in done.stdout
    for shown in ("rank 0 on cpu", "rank 1 on cpu", "64 tokens compared", "5,120"):
        assert shown in done.stdout


def test_a_mismatch_on_one_rank_is_status_1_with_its_place(ab: Command, tmp_path: Path) -> None:
    write(tmp_path, make(), make(DIFFERED, rank=3, world_size=4))
    done = ab("report", str(tmp_path))
    assert done.status == 1
    assert "not safe" in done.stdout
    assert "first mismatch in layer.1, rank 3: FirstMismatch(call=0, token=2, k=3, element=7, slot=70" in done.stdout


def test_json_has_total_layers_and_ranks(ab: Command, tmp_path: Path) -> None:
    write(tmp_path, *(make(DIFFERED, rank=rank, world_size=2) for rank in (0, 1)))
    done = ab("report", str(tmp_path), "--json")
    verdict = json.loads(done.stdout)
    assert done.status == 1
    assert (verdict["verdict"], verdict["ok"]) == ("differ", False)
    assert (verdict["total"]["calls"], verdict["total"]["rows_differ"]) == (40, 4)
    assert verdict["layers"]["layer.0"]["rows_differ"] == 0
    assert verdict["layers"]["layer.1"]["first"]["slot"] == 70
    assert [rank["rank"] for rank in verdict["ranks"]] == [0, 1]


def test_the_report_is_drawn(ab: Command, tmp_path: Path) -> None:
    write(tmp_path, make(DIFFERED, layers={"layer.0": AGREED, "$\\frac{$": DIFFERED, "l" * 5000: DIFFERED}))
    picture = tmp_path / "mismatches.png"
    assert ab("report", str(tmp_path), "--plot", str(picture)).status == 1
    assert picture.read_bytes().startswith(PNG)


def test_the_run_begun_last_is_shown_whatever_the_clock_says_and_the_others_are_named(
    ab: Command, tmp_path: Path
) -> None:
    write(tmp_path, make(run_id="before", number=1, updated=2000.0), make(DIFFERED, run_id="after", number=2))
    write(tmp_path, make(run_id="first", number=1, updated=3000.0, process="9-00000000"))
    done = ab("report", str(tmp_path))
    assert done.status == 1
    assert "This is run after" in done.stdout
    assert "before, first" in done.stdout
    assert ab("report", str(tmp_path), "--run", "before").status == 0


# Ages below are counted from here; a test shifts them to when it runs.
_READ_AT = time.time()
INCONCLUSIVE: dict[str, tuple[list[Report], str]] = {
    "stale": ([make(finished=False, updated=time.time() - 30 * 86400)], "30 days old"),
    "running": ([make(finished=False)], "still running: agree so far"),
    "a clock ahead": ([make(finished=False, updated=time.time() + 9000)], "from the future"),
    "a rank that compared nothing": (
        [make(world_size=2), make(rank=1, world_size=2, layers={})],
        "rank 1: nothing was",
    ),
    "no layer": ([make(layers={})], "nothing was compared"),
    "calls but no rows": ([make(layers={"l": LayerCounters(calls=10)})], "10 calls compared not one row"),
    "a layer without rows": ([make(LayerCounters(calls=3))], "not one row of layer layer.1"),
    "mixed pairs": ([make(world_size=2), make(rank=1, world_size=2, shadow="other")], "not compare the same backends"),
    "two processes as one rank": ([make(), make(process="7-00000000")], "2 processes reported as rank 0"),
    "a missing rank": ([make(world_size=2)], "of 2 ranks these have no report in this folder: 1"),
    "other numbers of ranks": ([make(), make(rank=1, world_size=2)], "different numbers of ranks"),
    "more ranks than there are": ([make(), make(rank=3)], "beyond the number of ranks that they name: 3"),
    "a shadow switched off": ([make(errors=["RuntimeError: no kernel"])], "switched off: RuntimeError: no kernel"),
    "no shadow": ([make(shadow=None, layers={"l": LayerCounters()})], "no shadow ran"),
    "two folders in one": ([make(), make(run_id="b", process="8-00000000")], "is the newer one cannot be told"),
}


@pytest.mark.parametrize("case", INCONCLUSIVE)
def test_what_proves_nothing_is_status_3_with_its_reason(ab: Command, case: str, tmp_path: Path) -> None:
    reports, reason = INCONCLUSIVE[case]
    since = time.time() - _READ_AT
    write(tmp_path, *(replace(report, updated=report.updated + since) for report in reports))
    done = ab("report", str(tmp_path))
    assert done.status == 3, done.stdout
    assert reason in done.stdout.replace("\n", " ")
    assert "Verdict: inconclusive" in done.stdout
    assert "agree\n" not in done.stdout
    as_json = ab("report", str(tmp_path), "--json")
    assert as_json.status == 3
    assert json.loads(as_json.stdout)["verdict"] == "inconclusive"


@pytest.mark.parametrize("case", [case for case in INCONCLUSIVE if case not in ("no layer", "two folders in one")])
def test_a_mismatch_differs_however_little_else_is_proved(ab: Command, case: str, tmp_path: Path) -> None:
    reports, _ = INCONCLUSIVE[case]
    last = reports[-1]
    write(tmp_path, *reports[:-1], replace(last, layers={**last.layers, "layer.9": DIFFERED}))
    assert ab("report", str(tmp_path)).status == 1


def test_the_same_rank_in_two_parts_of_one_process_is_one_rank(ab: Command, tmp_path: Path) -> None:
    write(tmp_path, make(number=1), make(number=2))
    assert ab("report", str(tmp_path)).status == 0


@pytest.mark.parametrize("shadow", ["wrong", None])
def test_lost_entries_are_status_1_with_the_layer(ab: Command, shadow: str | None, tmp_path: Path) -> None:
    write(tmp_path, make(replace(AGREED, lost_entries=17), shadow=shadow))
    done = ab("report", str(tmp_path))
    assert done.status == 1
    assert "attention lost rows: 17 filled entries of layer layer.1" in done.stdout
    assert json.loads(ab("report", str(tmp_path), "--json").stdout)["layers"]["layer.1"]["lost_entries"] == 17


def test_a_damaged_report_among_good_ones_is_named_and_proves_nothing(ab: Command, tmp_path: Path) -> None:
    write(tmp_path, make(run_id="other", number=1), make(number=2))
    good = ab("report", str(tmp_path))
    assert good.status == 0, good.stdout
    (tmp_path / "report-000003-run-rank1-5-00000000.json").write_text("{")
    done = ab("report", str(tmp_path))
    assert done.status == 3
    assert "report-000003-run-rank1-5-00000000.json" in done.stdout.replace("\n", "")
    assert ab("report", str(tmp_path), "--run", "other").status == 0
    (tmp_path / "report-of nobody.json").write_text("[]")
    assert ab("report", str(tmp_path), "--run", "other").status == 3


def test_a_newer_run_of_which_nothing_can_be_read_does_not_show_the_older_one(ab: Command, tmp_path: Path) -> None:
    write(tmp_path, make(number=1))
    (tmp_path / "report-000002-new-rank0-5-00000000.json").write_text("")
    done = ab("report", str(tmp_path))
    assert done.status == 3
    assert "no report of this run can be read" in done.stdout
    assert ab("report", str(tmp_path), "--run", "run").status == 0


def test_names_from_files_are_printed_literally(ab: Command, tmp_path: Path) -> None:
    layers = {"[/]l0": DIFFERED, "[bold]x[/bold]": AGREED, "bell\a\x1b[2J": LayerCounters(calls=1)}
    write(tmp_path, make(layers=layers, primary="[red]", device="[/]", errors=["[/]"], run_id="[/] :smile:"))
    done = ab("report", str(tmp_path))
    assert done.status == 1, done.stderr
    for shown in (
        "[/]l0",
        "[bold]x[/bold]",
        "bell\\x07\\x1b[2J",
        "beside [red]",
        "on [/]",
        "switched off: [/]",
        ":smile:",
    ):
        assert shown in done.stdout, shown
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("run", [None, "other"])
def test_no_report_to_show_is_status_2(ab: Command, run: str | None, tmp_path: Path) -> None:
    if run:
        write(tmp_path, make())
    done = ab("report", str(tmp_path), *(["--run", run] if run else []))
    assert (done.status, done.stdout) == (2, "")
    assert ("the folder holds run" if run else "holds no report") in done.stderr


def test_a_folder_of_damaged_reports_is_status_2(ab: Command, tmp_path: Path) -> None:
    (tmp_path / "report-x.json").write_text(
        '{"format": "hyv4_kvdequant.report", "version": 2, "report": {"\\u001b": 0}}'
    )
    done = ab("report", str(tmp_path))
    assert (done.status, done.stdout) == (2, "")
    assert "report-x.json is damaged" in done.stderr
    assert "\x1b" not in done.stderr


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
    shadow.monitor.close()
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
