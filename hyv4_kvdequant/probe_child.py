"""The child process of `probe`: imports PyTorch once, then looks at each backend in a process forked from itself.

Forked, because PyTorch's import is nearly all of what a look costs; no accelerator is touched before that. The looks
run side by side, each with standard output turned to standard error and the same time limit, and are killed at its end
with all that they started.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyv4_kvdequant.contract import Target

_GRACE_S = 1.0  # between a process closing its files and having an exit status


def serve(answer: int) -> None:
    """Reads one request from standard input (pickled origins, target, seconds) and writes one line of JSON.

    Args:
        answer: the file descriptor to write to: {name: what `probe.look` returned, or `stage` and `ended`}, where
            `ended` is the exit status, a signal's number below 0, or None when time was up.
    """
    os.set_inheritable(answer, False)
    from hyv4_kvdequant import probe, selector  # noqa: F401 - before the fork, PyTorch with it

    try:
        origins, target, timeout_s = pickle.load(sys.stdin.buffer)
    except EOFError:
        return  # nobody asks any more
    try:
        found = look_at_all(origins, target, timeout_s, answer)
    except KeyboardInterrupt:
        return
    with contextlib.suppress(BrokenPipeError), os.fdopen(answer, "w") as file:
        file.write(json.dumps(found) + "\n")


def look_at_all(origins: dict[str, str], target: Target | None, timeout_s: float, answer: int) -> dict[str, Any]:
    """What each look found, by name; returns within about `timeout_s` seconds."""
    looks: list[_Look] = []
    try:
        for name, origin in origins.items():
            looks.append(_Look(name, origin, target, [answer, *(look.pipe for look in looks)]))
        _wait_for(looks, time.monotonic() + timeout_s)
    finally:
        for look in looks:
            look.end()
    return {look.name: look.found() for look in looks}


def _wait_for(looks: list[_Look], deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
        for look in looks:
            selector.register(look.pipe, selectors.EVENT_READ, look)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if not key.data.read():
                    selector.unregister(key.fd)


class _Look:
    """One look, in a process forked from this one, which is the leader of a group of its own."""

    def __init__(self, name: str, origin: str, target: Target | None, not_its: list[int]) -> None:
        """`not_its` are file descriptors that it must not hold open."""
        self.name = name
        self.pipe, its_end = os.pipe()
        self.lines: list[dict[str, Any]] = []
        self._rest, self._over = b"", False
        self.status: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's idle threads know of forks
            self._pid = os.fork()
        if self._pid == 0:
            _become_look(name, origin, target, its_end, [self.pipe, *not_its])
        with contextlib.suppress(OSError):
            os.setpgid(self._pid, self._pid)  # it does the same; whoever comes first
        os.close(its_end)

    def read(self) -> bool:
        """Takes what is there; False when there will be no more."""
        data = os.read(self.pipe, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += map(json.loads, lines)
        self._over = not data
        return not self._over and "problem" not in self.found()

    def found(self) -> dict[str, Any]:
        """The answer, or how far it came and how it ended."""
        last = self.lines[-1] if self.lines else {"stage": "importing it"}
        return {**last, "ended": self.status} if "stage" in last else last

    def end(self) -> None:
        """Kills it and what it started, after it had a moment to leave by itself; keeps its exit status."""
        give_up = time.monotonic() + (_GRACE_S if self._over else 0)
        left = self._has_left()
        while not left and time.monotonic() < give_up:
            time.sleep(0.005)
            left = self._has_left()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        if not left:
            os.waitpid(self._pid, 0)
        os.close(self.pipe)

    def _has_left(self) -> bool:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self.status = os.waitstatus_to_exitcode(status)
        return bool(pid)


def _become_look(name: str, origin: str, target: Target | None, pipe: int, not_its: list[int]) -> None:
    """The forked process: looks, writes stages and the answer to `pipe`, and is gone; never returns."""
    from hyv4_kvdequant.probe import look

    def say(line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        while data:
            data = data[os.write(pipe, data) :]

    status = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        for descriptor in not_its:
            os.close(descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = sys.stderr  # as descriptor 1 is, and nothing waits in a buffer when it is killed
        say(look(name, origin, target, lambda stage: say({"stage": stage})))
        status = 0
    finally:
        os._exit(status)
