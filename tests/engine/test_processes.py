"""What the engine suite starts ends with it, and what it leaves running is seen."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from configurations import CONFIGURATIONS, PREFIX, without_ours
from processes import run_to_the_end
from run import Suite, run


def python(code: str, log: Path, seconds: float = 30.0) -> object:
    return run_to_the_end([sys.executable, "-c", code], dict(os.environ), log, seconds)


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(") ", 1)[1][0] != "Z"


SLEEPER = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "


def test_a_process_that_leaves_nothing(tmp_path: Path) -> None:
    ended = python("print('hello'); raise SystemExit(3)", tmp_path / "log")
    assert (ended.exit_status, ended.left_running) == (3, [])
    assert (tmp_path / "log").read_text() == "hello\n"


def test_a_process_left_running_is_named_and_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("processes.LINGER_SECONDS", 0.5)
    ended = python(SLEEPER + "print(p.pid)", tmp_path / "log")
    assert len(ended.left_running) == 1
    time.sleep(0.2)
    assert not is_running(int((tmp_path / "log").read_text()))


def test_what_takes_too_long_is_killed_with_what_it_started(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        python(SLEEPER + "print(p.pid, flush=True); p.wait()", tmp_path / "log", seconds=2.0)
    time.sleep(0.2)
    assert not is_running(int((tmp_path / "log").read_text()))


def test_a_gate_in_the_shell_does_not_reach_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX, "1")
    monkeypatch.setenv(PREFIX + "_WORKSPACE_MB", "2048")
    assert not [name for name in without_ours() if name.startswith(PREFIX)]


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no tritn-eager"):
        run(Suite(tmp_path, 1.0, 1.0), ["tritn-eager"], 1)


def test_once_the_budget_is_spent_nothing_is_started_and_all_is_recorded(tmp_path: Path) -> None:
    suite = Suite(tmp_path, 1.0, -1.0)
    run(suite, [], 2)
    assert all("not_run" in result for result in suite.results.values())
    assert {one.name for one in CONFIGURATIONS} < set(suite.results)
