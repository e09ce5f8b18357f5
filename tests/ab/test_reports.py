"""Reports: whole whenever a process dies, told apart by run, merged by rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from shadowing import make_call, observe, settings, shadow_of

import hyv4_kvdequant as h
from hyv4_kvdequant.ab.report import read_reports
from hyv4_kvdequant.ab.verdict import merge

pytestmark = pytest.mark.usefixtures("wrong_plugin", "fresh_instances")


def test_the_report_folder_is_made_or_refused_at_start_up(tmp_path: Path) -> None:
    shadow = shadow_of(settings(tmp_path / "a" / "b"))
    assert len(read_reports(tmp_path / "a" / "b").readable) == 1
    shadow.monitor.close()
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(h.ConfigurationError, match="cannot be written"):
            shadow_of(settings(folder))


def test_runs_in_one_folder_are_told_apart_and_ranks_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_BACKEND_FAULT", "element")
    for run_id, rank in (("old", 0), ("new", 0), ("new", 1)):
        shadow = shadow_of(settings(tmp_path), rank=rank, run_id=run_id, world_size=2)
        observe(shadow, make_call())
        shadow.monitor.close()
    reports = read_reports(tmp_path)
    verdict = merge(reports)
    assert (verdict.run_id, verdict.other_runs) == ("new", ["old"])
    assert [report.rank for report in verdict.ranks] == [0, 1]
    assert verdict.layers["layer.0"].rows_differ == 2
    assert merge(reports, "old").total.calls == 1
    with pytest.raises(h.ConfigurationError, match="holds new, old"):
        merge(reports, "other")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": "other", "version": 2}',
        '{"format": "hyv4_kvdequant.report", "version": 99}',
        '{"format": "hyv4_kvdequant.report", "version": 2}',
        '{"format": "hyv4_kvdequant.report", "version": 2, "report": ' + "[" * 100_000,
        "\udcff",
    ],
)
def test_a_file_that_is_no_report_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "report-x.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(h.ConfigurationError, match=r"report-x\.json"):
        read_reports(tmp_path)


def test_what_lies_there_and_is_no_file_is_told_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report-pipe.json")
    (tmp_path / "report-folder.json").mkdir()
    with pytest.raises(h.ConfigurationError, match=r"report-folder\.json(.|\n)*report-pipe\.json"):
        read_reports(tmp_path)


# One process imports PyTorch, then has a child write into each folder until the child is killed.
WRITERS = """
import os, sys
from pathlib import Path
from hyv4_kvdequant.ab.counters import LayerCounters
from hyv4_kvdequant.ab.report import Report, write_report
from hyv4_kvdequant.files import process_name
layers = {f"layer.{i}": LayerCounters(calls=i) for i in range(80)}
for folder in sys.argv[1:]:
    writer, number = os.fork(), 0
    while writer == 0:
        number += 1
        report = Report("run", 0, number, False, "a", "b", "cpu", number, layers=layers, process=process_name())
        write_report(Path(folder), report)
        if number == 1:
            print(os.getpid(), flush=True)
    os.waitpid(writer, 0)
"""


def test_a_process_killed_at_any_point_leaves_a_complete_report(tmp_path: Path) -> None:
    delays = np.random.default_rng(0).uniform(0, 0.02, 50)
    folders = [tmp_path / f"kill{turn}" for turn in range(len(delays))]
    for folder in folders:
        folder.mkdir()
    seen = 0
    command = [sys.executable, "-c", WRITERS, *map(str, folders)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for folder, delay in zip(folders, delays, strict=True):
            writer = int(process.stdout.readline())
            time.sleep(delay)
            os.kill(writer, signal.SIGKILL)
            (report,) = read_reports(folder).readable
            assert len(report.layers) == 80
            assert report.every == report.updated
            seen = max(seen, report.every)
    assert process.returncode == 0
    assert seen > 1


LEFT_OPEN = """
import multiprocessing, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from shadowing import make_call, observe, settings, shadow_of

def serve(rank):
    shadow = shadow_of(settings(Path(sys.argv[2]), shadow="dedup"), rank=rank, run_id="run")
    observe(shadow, make_call())

worker = multiprocessing.get_context("fork").Process(target=serve, args=(1,))
worker.start()
worker.join()
serve(0)
"""


def test_reports_are_finished_by_whatever_kind_of_process(tmp_path: Path, wrong_plugin_folder: Path) -> None:
    """Nobody closes the shadow: one is in a forked worker, which does not run what `atexit` holds."""
    env = {**os.environ, "PYTHONPATH": str(wrong_plugin_folder)}
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", LEFT_OPEN, here, str(tmp_path)], env=env, check=True)
    reports = {report.rank: report for report in read_reports(tmp_path).readable}
    assert {rank: report.finished for rank, report in reports.items()} == {0: True, 1: True}
    assert all(report.total.calls == 1 for report in reports.values())
