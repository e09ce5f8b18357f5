"""The monitor: what was counted reaches a report, whatever happens to the folder; lost entries are seen without a
shadow."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prometheus_client import REGISTRY
from shadowing import make_call, observe, settings, shadow_of

import hyv4_kvdequant as h
from hyv4_kvdequant.ab import report as reports
from hyv4_kvdequant.ab.monitor import Monitor
from hyv4_kvdequant.ab.report import begin_report, read_report, read_reports, write_report
from hyv4_kvdequant.ab.verdict import merge
from hyv4_kvdequant.hosts.intercept import HostFacts, Intercept
from hyv4_kvdequant.steps import load_step

pytestmark = pytest.mark.usefixtures("wrong_plugin", "fresh_instances")

HERE = str(Path(__file__).parent)


def bare(folder: Path | None = None, **more: object) -> Monitor:
    """A monitor without a shadow."""
    given = settings(folder, shadow=None)
    return Monitor("torch", given, device=torch.device("cpu"), **more)  # type: ignore[arg-type]


# --- writing goes on ---


def test_a_folder_moved_for_a_moment_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WRONG_BACKEND_FAULT", "element")
    folder, away = tmp_path / "reports", tmp_path / "away"
    shadow = shadow_of(settings(folder))
    monkeypatch.setattr(shadow.backend, "fault", "")
    observe(shadow, make_call())
    folder.rename(away)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            shadow.monitor.tell(finished=False)
        # Rows go on to differ in memory, and the log says so: once more, not at every read.
        monkeypatch.setattr(shadow.backend, "fault", "element")
        observe(shadow, make_call())
        for _ in range(3):
            shadow.monitor.tell(finished=False)
        said = [r.message for r in caplog.records if "cannot be written" in r.message]
        assert len(said) == 2
        assert "rows_differ=0" in said[0]
        assert "rows_differ=1" in said[1]
        away.rename(folder)
        shadow.monitor.tell(finished=False)
    assert any("is written again" in r.message for r in caplog.records)
    assert merge(read_reports(folder)).outcome == "differ"
    shadow.monitor.close()
    (report,) = read_reports(folder).readable
    assert (report.finished, report.total.calls, report.total.rows_differ) == (True, 2, 1)


def test_a_folder_that_comes_back_for_the_last_attempt_only(tmp_path: Path) -> None:
    folder, away = tmp_path / "reports", tmp_path / "away"
    shadow = shadow_of(settings(folder, shadow="dedup"))
    folder.rename(away)
    observe(shadow, make_call())
    shadow.monitor.tell(finished=False)
    away.rename(folder)
    shadow.monitor.close()
    assert merge(read_reports(folder)).outcome == "agree"


def test_a_folder_that_never_comes_back_is_no_agreement(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "reports"
    shadow = shadow_of(settings(folder, shadow="dedup"))
    observe(shadow, make_call())
    shadow.monitor.tell(finished=False)
    folder.rename(tmp_path / "away")
    folder.write_text("a file where the folder was: nobody can write below it, root neither")
    with caplog.at_level(logging.ERROR):
        shadow.monitor.close()
    assert "this was the last attempt" in caplog.text
    verdict = merge(read_reports(tmp_path / "away"))
    assert verdict.outcome == "inconclusive"
    assert verdict.total.calls == 1


DISK = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from shadowing import make_call, observe, settings, shadow_of

shadow = shadow_of(settings(Path(sys.argv[2]), shadow="dedup"))
observe(shadow, make_call())
shadow.monitor.tell(finished=False)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # nothing longer than 100 bytes can be written
observe(shadow, make_call())
shadow.monitor.tell(finished=False)
print(Path(shadow.monitor.report_file).read_text(), flush=True)
if sys.argv[3] == "clears":
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
shadow.monitor.close()
"""


@pytest.mark.parametrize(("disk", "outcome"), [("clears", "agree"), ("stays full", "inconclusive")])
def test_a_full_disk(disk: str, outcome: str, tmp_path: Path, wrong_plugin_folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(wrong_plugin_folder)}
    command = [sys.executable, "-c", DISK, HERE, str(tmp_path), disk]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # While it was full, the last complete state stayed.
    assert json.loads(done.stdout)["report"]["layers"]["layer.0"]["calls"] == 1
    verdict = merge(read_reports(tmp_path))
    assert verdict.outcome == outcome
    assert verdict.total.calls == (2 if disk == "clears" else 1)
    assert len(list(tmp_path.iterdir())) == 1, "no temporary file is left"


def test_a_home_that_cannot_be_written_does_not_matter(tmp_path: Path, wrong_plugin_folder: Path) -> None:
    (tmp_path / "file").write_text("")
    home = str(tmp_path / "file" / "home")
    env = {**os.environ, "PYTHONPATH": str(wrong_plugin_folder), "HOME": home, "XDG_CACHE_HOME": home}
    folder = tmp_path / "reports"
    command = [sys.executable, "-c", DISK, HERE, str(folder), "clears"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert merge(read_reports(folder)).total.calls == 2
    # Reports that are to lie in it stop the start-up instead of being lost.
    done = subprocess.run([*command[:4], home, "clears"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr


# --- whose report it is ---


WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from shadowing import make_call, observe, settings, shadow_of

shadow = shadow_of(settings(Path(sys.argv[2])), rank=0, run_id="run")
observe(shadow, make_call())
shadow.monitor.close()
"""


def test_two_processes_that_write_one_run_and_rank_keep_both_reports(tmp_path: Path, wrong_plugin_folder: Path) -> None:
    writers = []
    for fault in ("element", ""):
        env = {**os.environ, "PYTHONPATH": str(wrong_plugin_folder), "WRONG_BACKEND_FAULT": fault}
        writers.append(subprocess.Popen([sys.executable, "-c", WRITER, HERE, str(tmp_path)], env=env))
        if fault:
            assert writers[0].wait() == 0  # the one that agrees is the last to write
    assert [writer.wait() for writer in writers] == [0, 0]
    found = read_reports(tmp_path)
    assert sorted(report.total.rows_differ for report in found.readable) == [0, 1]
    verdict = merge(found)
    assert verdict.outcome == "differ"
    assert "2 processes reported as rank 0" in " ".join(verdict.gaps)


def test_runs_are_ordered_though_the_clock_steps_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG_BACKEND_FAULT", "element")
    clean = shadow_of(settings(tmp_path, shadow="dedup"), run_id="clean")
    observe(clean, make_call())
    clean.monitor.close()
    now = time.time()
    monkeypatch.setattr("hyv4_kvdequant.ab.monitor.time.time", lambda: now - 7200)
    bad = shadow_of(settings(tmp_path), run_id="bad")
    observe(bad, make_call())
    bad.monitor.close()
    verdict = merge(read_reports(tmp_path), now=now)
    assert (verdict.run_id, verdict.outcome, verdict.other_runs) == ("bad", "differ", ["clean"])


def test_no_two_runs_take_one_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_beginning", _NoLock())  # as in processes of their own
    shadow = shadow_of(settings(None))
    shadow.monitor.close()
    one = shadow.monitor._report(finished=True, number=1)

    def begin(turn: int) -> tuple[int, str]:
        mine = replace(one, run_id=f"run{turn % 10}", rank=turn, process=f"{turn}-00000000")
        return begin_report(tmp_path, mine).number, mine.run_id

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(begin, range(40)))
    owner: dict[int, str] = {}
    for number, run in taken:
        assert owner.setdefault(number, run) == run
    assert len(read_reports(tmp_path).readable) == 40


class _NoLock:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_a_link_planted_at_a_reports_name_is_not_followed(tmp_path: Path) -> None:
    shadow = shadow_of(settings(tmp_path, shadow="dedup"))
    path = shadow.monitor.report_file
    assert path is not None
    target = tmp_path / "target"
    target.write_text("precious")
    path.unlink()
    path.symlink_to(target)
    shadow.monitor.close()
    assert target.read_text() == "precious"
    assert read_report(path).finished


@pytest.mark.parametrize(("readable", "mode"), [(False, 0o600), (True, 0o640)])
def test_reports_are_for_their_owner_unless_a_setting_says_otherwise(readable: bool, mode: int, tmp_path: Path) -> None:
    shadow = shadow_of(settings(tmp_path / "new", shadow="dedup", report_group_readable=readable))
    shadow.monitor.close()
    (path,) = (tmp_path / "new").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) & 0o007 == 0


def test_a_layer_of_any_name_is_in_a_report_that_can_be_read(tmp_path: Path) -> None:
    names = ["[/]l0", "\ud800", "x" * 5000, "", "a\0b", "é"]
    shadow = shadow_of(settings(tmp_path, shadow="dedup"))
    for name in names:
        observe(shadow, make_call(), name)
    shadow.monitor.close()
    (report,) = read_reports(tmp_path).readable
    assert list(report.layers) == ["[/]l0", "\\ud800", "x" * 5000, "", "a\0b", "é"]
    assert merge(read_reports(tmp_path)).outcome == "agree"


# --- lost entries ---


def test_lost_entries_are_told_without_a_shadow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = bare(tmp_path, rank=7, world_size=8)
    counter = monitor.lost_counter("lost.layer")
    assert (counter.shape, counter.dtype) == ((1,), torch.int64)
    assert counter.data_ptr() == monitor.lost_counter("lost.layer").data_ptr()
    assert counter.data_ptr() != monitor.lost_counter("another").data_ptr()
    monitor.tell(finished=False)
    with caplog.at_level(logging.ERROR):
        assert not caplog.records
        for _ in range(2):
            counter += 5
            monitor.tell(finished=False)
        assert len([r for r in caplog.records if "lost.layer" in r.message and "rank 7" in r.message]) == 1
        labels = {"backend": "torch", "rank": "7", "layer": "lost.layer"}
        assert REGISTRY.get_sample_value("hyv4_kvdequant_lost_entries_total", labels) == 10
        monitor.close()
    assert "10 filled entries in all" in caplog.text
    (report,) = read_reports(tmp_path).readable
    assert (report.shadow, report.finished) == (None, True)
    assert {name: one.lost_entries for name, one in report.layers.items()} == {"lost.layer": 10, "another": 0}
    assert merge(read_reports(tmp_path)).outcome == "differ"


def test_the_monitor_reads_on_its_own(tmp_path: Path) -> None:
    monitor = bare(tmp_path, read_every_s=0.01)
    monitor.lost_counter("layer").add_(3)
    ends = time.monotonic() + 20
    while time.monotonic() < ends and read_reports(tmp_path).readable[0].total.lost_entries != 3:
        time.sleep(0.01)
    verdict = merge(read_reports(tmp_path))
    monitor.close()
    assert verdict.outcome == "differ"


def test_the_intercept_has_a_monitor_with_and_without_a_shadow(tmp_path: Path) -> None:
    facts = HostFacts(torch.device("cpu"), topk=16, block_size=64, max_tokens=8, run_id="run")
    for shadow in (None, "dedup"):
        given = h.load_settings({"backend": "torch", "shadow": shadow, "report_dir": tmp_path / str(shadow)})
        intercept = Intercept(given, facts)
        intercept.lost_counter("layer.3").add_(1)
        assert (intercept.shadow is None) is (shadow is None)
        if intercept.shadow is not None:
            assert intercept.shadow.monitor is intercept.monitor
        intercept.monitor.close()
        assert merge(read_reports(tmp_path / str(shadow))).layers["layer.3"].lost_entries == 1


# --- a device that fails ---


def test_counters_that_cannot_be_read_are_no_agreement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shadow = shadow_of(settings(tmp_path, shadow="dedup"))
    observe(shadow, make_call())
    shadow.monitor.tell(finished=False)
    # What any operation does once a kernel failed an assertion on the device.
    monkeypatch.setattr(torch.Tensor, "copy_", _raise)
    with caplog.at_level(logging.ERROR):
        shadow.monitor.close()
    assert "cannot be read" in caplog.text
    verdict = merge(read_reports(tmp_path))
    assert verdict.outcome == "inconclusive"
    assert verdict.total.calls == 1


def _raise(*_: object, **__: object) -> None:
    raise RuntimeError("CUDA error: device-side assert triggered")


# --- traces ---


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from shadowing import make_call, settings
import hyv4_kvdequant as h
from hyv4_kvdequant.ab.trace import make_recorder
recorder = make_recorder(h.load_backend("torch")(h.Target.detect("cpu")), settings(Path(sys.argv[2]), trace=10**6), 0)
call = make_call(tokens=64)
print("ready", flush=True)
while True:
    recorder.record(call, "layer")
"""


def test_a_process_killed_while_it_writes_traces_leaves_whole_ones(tmp_path: Path, wrong_plugin_folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(wrong_plugin_folder)}
    whole = 0
    for turn in range(5):
        folder = tmp_path / str(turn)
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, HERE, str(folder)], stdout=subprocess.PIPE, text=True, env=env
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            while not list(folder.glob("trace-*")):
                time.sleep(0.001)
            time.sleep(0.013 * turn)
            os.kill(writer.pid, signal.SIGKILL)
        for path in folder.glob("trace-*"):
            assert load_step(path).topk_indices.shape == (64, 16)
            whole += 1
    assert whole >= 5


def test_write_report_needs_no_lock_to_be_read(tmp_path: Path) -> None:
    """A reader that looks again and again never sees half a report."""
    monitor = bare(None)
    monitor.close()
    report = replace(monitor._report(finished=True, number=1), layers={})
    write_report(tmp_path, report)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [write_report(tmp_path, report) for _ in range(200)])
        while not writing.done():
            assert not read_reports(tmp_path).unreadable


# prometheus-client reads the variable when it is imported, so this takes a process of its own.
NO_METRICS = """
import logging, os, shutil, sys, threading
from pathlib import Path
import torch
import hyv4_kvdequant as h
from hyv4_kvdequant.ab.monitor import Monitor
logging.basicConfig()
folder, series = Path(sys.argv[1]), Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
monitor = Monitor("torch", h.load_settings({"report_dir": str(folder)}), device=torch.device("cpu"), read_every_s=0.02)
monitor.lost_counter("layer.0").add_(4)
for _ in range(3):
    monitor.tell(finished=False)
assert monitor._thread.is_alive()
series.mkdir()
monitor.tell(finished=False)
monitor.close()
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
registry = CollectorRegistry()
MultiProcessCollector(registry, str(series))
labels = {"backend": "torch", "rank": "0", "layer": "layer.0"}
print([sample.value for metric in registry.collect() for sample in metric.samples if "lost" in sample.name])
"""


def test_metrics_that_cannot_be_written_keep_neither_log_nor_report_from_what_was_lost(tmp_path: Path) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "later")}
    command = [sys.executable, "-c", NO_METRICS, str(tmp_path / "reports")]
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[4.0]\n", "once the folder is there the series has all, and nothing twice"
    assert done.stderr.count("The metrics cannot be brought up to date") == 1
    assert "Attention lost rows: 4 filled entries of layer layer.0" in done.stderr
    (report,) = read_reports(tmp_path / "reports").readable
    assert (report.finished, report.total.lost_entries) == (True, 4)


def test_a_run_without_a_name_gets_one_for_its_report_and_its_traces(tmp_path: Path) -> None:
    given = settings(tmp_path, shadow=None, trace=1)
    intercept = Intercept(given, HostFacts(torch.device("cpu"), topk=16, block_size=64, max_tokens=8))
    assert intercept.recorder is not None
    assert intercept.recorder.run_id == intercept.monitor.run_id
    intercept.recorder.close()
    intercept.monitor.close()
