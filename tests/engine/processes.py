"""Processes with a log, that leave nothing running: neither when they end nor when their time is up."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LINGER_SECONDS = 10.0

_started: set[int] = set()


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        exit_status: of the process.
        left_running: command names of its descendants that were still there some seconds later; they were killed.
    """

    exit_status: int
    left_running: list[str]


def start(command: list[str], environ: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts a process in a group of its own, all its output in a file."""
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    _started.add(process.pid)
    return process


def wait(process: subprocess.Popen[bytes], seconds: float) -> Ended:
    """Waits for a process and for all that it started; what is still there after that is killed.

    Raises:
        subprocess.TimeoutExpired: the process itself did not end in time.
    """
    try:
        status = process.wait(seconds)
    except BaseException:
        # Also when somebody interrupts: a signal to our group does not reach theirs.
        _kill(process.pid)
        process.wait()
        raise
    give_up = time.monotonic() + LINGER_SECONDS
    while (left := _running_in(process.pid)) and time.monotonic() < give_up:
        time.sleep(0.2)
    _kill(process.pid)
    return Ended(status, left)


def run_to_the_end(command: list[str], environ: dict[str, str], log: Path, seconds: float) -> Ended:
    """`start` and `wait`."""
    return wait(start(command, environ, log), seconds)


def kill_all() -> None:
    """Kills whatever was started and has not ended."""
    for group in list(_started):
        _kill(group)


def _kill(group: int) -> None:
    _started.discard(group)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _running_in(group: int) -> list[str]:
    """Command names of a process group's members, without those that have ended and wait to be reaped."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = stat.read_text().split("(", 1)[1].rsplit(") ", 1)
        except OSError:
            continue
        state, _, its_group = fields.split()[:3]
        if int(its_group) == group and state not in "ZX":
            found.append(name)
    return sorted(found)
