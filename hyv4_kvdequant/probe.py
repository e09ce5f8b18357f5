"""Looking at registered backends from a safe distance: in processes of their own, with a time limit.

A plugin is somebody else's code: importing it may raise, hang, crash, end the process or write to standard output.
So a child of this process looks first (`probe_child`), and this process imports only what came through well. A class
registered at run time is the caller's own code, lives in this process alone, and is looked at here.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hyv4_kvdequant.contract.errors import BackendLoadError
from hyv4_kvdequant.defaults import IMPORT_TIMEOUT_S, START_UP_TIMEOUT_S
from hyv4_kvdequant.registry import (
    Registration,
    describe,
    find_registration,
    is_loaded,
    load_backend,
    registered_backends,
)

if TYPE_CHECKING:
    from types import TracebackType

    from hyv4_kvdequant.contract import Features, GatherDequantBackend, Target

_ORIGIN = "the call"
_OWN_DISTRIBUTION = "hyv4-kvdequant"

# The parent's import path comes first, so that nothing is imported by another one: not from the current folder either.
_CHILD = (
    "import sys; sys.path[:] = sys.stdin.buffer.readline().decode('utf-8', 'surrogateescape')[:-1].split('\\0'); "
    "from hyv4_kvdequant.probe_child import serve; serve(int(sys.argv[1]))"
)


@dataclass(frozen=True)
class Probe:
    """One registered backend as seen from here.

    Attributes:
        name, distribution, version: as registered; a conflict names every distribution.
        features: None when the backend does not load.
        reasons: why it cannot serve the target; empty when it can.
        problem: why it is broken, with its name and distribution and what to do; or None.
    """

    name: str
    distribution: str
    version: str
    features: Features | None = None
    reasons: list[str] = field(default_factory=list)
    problem: str | None = None

    @property
    def available(self) -> bool:
        return self.problem is None and not self.reasons

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "available": self.available}


class Prober:
    """A child process that looks at backends once. Use it as a context manager.

    The child is started on entry, so that it imports PyTorch while this process does something else.
    """

    def __init__(
        self, names: Sequence[str] | None = None, timeout_s: float = IMPORT_TIMEOUT_S, more_time: str = ""
    ) -> None:
        """
        Args:
            names: which backends will be asked for; None for any.
            timeout_s: seconds that one backend may take to import and answer, PyTorch's import not counted.
            more_time: how the user can allow more, to end a sentence with; empty where there is no way.
        """
        self._names, self._timeout_s, self._more_time = names, timeout_s, more_time
        self._child: subprocess.Popen[bytes] | None = None
        self._asked = False
        self._answer = -1

    def __enter__(self) -> Prober:
        claims = registered_backends()
        if any(_must_import(claims.get(name, [])) for name in (claims if self._names is None else self._names)):
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def probe_all(self, target: Target) -> list[Probe]:
        """Every registered backend, sorted by name; one that misbehaves is told, the others are still asked."""
        return self.probe(dict.fromkeys(registered_backends(), _ORIGIN), target)

    def probe(self, origins: Mapping[str, str], target: Target | None) -> list[Probe]:
        """Looks at registered backends.

        Args:
            origins: for each name, where it came from (for messages).
            target: what they are asked to serve; None to import them only.
        """
        claims = registered_backends()
        far = {name: origin for name, origin in origins.items() if not _is_run_time(claims[name])}
        found = self._ask(far, target) if far else {}
        for name in origins.keys() - far.keys():
            found[name] = look(name, origins[name], target)
        return [self._told(name, claims[name], origin, found[name]) for name, origin in origins.items()]

    def get_backends(self, origins: Mapping[str, str], target: Target) -> dict[str, GatherDequantBackend]:
        """Instances of the named backends, after the child has seen that they behave; raises as `get_backend`.

        Args:
            origins: for each name, where it came from (for messages).
            target: what they are to serve.
        """
        from hyv4_kvdequant.selector import get_backend

        self.check(origins, target)
        return {name: get_backend(name, target, origin) for name, origin in origins.items()}

    def check(self, origins: Mapping[str, str], target: Target | None) -> None:
        """Lets the child look at those whose code this process does not have yet.

        Raises:
            BackendError: as `find_registration`.
            BackendLoadError: the child saw one that is broken; availability is not asked here.
        """
        unseen = {name: origin for name, origin in origins.items() if not is_loaded(find_registration(name, origin))}
        for probe in self.probe(unseen, target) if unseen else []:
            if probe.problem:
                raise BackendLoadError(_as_told(probe.problem))

    def _start(self) -> None:
        self._answer, answer_here = os.pipe()
        path = "\0".join(entry for entry in sys.path if isinstance(entry, str))
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(answer_here)],
                stdin=subprocess.PIPE,
                stdout=2,  # what a plugin prints is no output of ours
                pass_fds=(answer_here,),
            )
        finally:
            os.close(answer_here)
        self._send(f"{path}\n".encode("utf-8", "surrogateescape"))

    def _send(self, data: bytes) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone; reading its answer tells
            self._child.stdin.write(data)
            self._child.stdin.flush()

    def _ask(self, origins: Mapping[str, str], target: Target | None) -> dict[str, dict[str, Any]]:
        if self._child is None:
            self._start()
        self._asked = True
        self._send(pickle.dumps((dict(origins), target, self._timeout_s)))
        line = b""
        while not line.endswith(b"\n") and (data := os.read(self._answer, 65536)):
            line += data
        child = self._child
        os.close(self._answer)
        self._answer = -1
        self._stop()
        self._asked = False
        if line.endswith(b"\n"):
            return dict(json.loads(line))
        status = child.returncode if child else None
        return {name: {"stage": "looking at it", "ended": status} for name in origins}

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            if not self._asked:
                child.kill()
            elif self._answer >= 0:
                child.send_signal(signal.SIGINT)  # it ends the looks and goes
            child.wait()
        if self._answer >= 0:
            os.close(self._answer)
            self._answer = -1

    def _told(self, name: str, claims: list[Registration], origin: str, found: Mapping[str, Any]) -> Probe:
        distribution = ", ".join(claim.distribution for claim in claims)
        version = ", ".join(claim.version for claim in claims)
        if "stage" in found:
            more_time = f", {self._more_time}" if self._more_time and found["ended"] is None else ""
            problem = (
                f"Backend {claims[0]} (asked for by {origin}) does not load: {found['stage']} "
                f"{self._how_it_ended(found['ended'])}.\n"
                f"What to do: repair or uninstall {distribution}{more_time}, or ask for another backend."
            )
            return Probe(name, distribution, version, problem=problem)
        return Probe(name, distribution, version, _features(found), found["reasons"], found["problem"])

    def _how_it_ended(self, status: int | None) -> str:
        if status is None:
            return f"did not finish within {self._timeout_s:g} s"
        if status < 0:
            return f"ended its process by signal {-status} ({signal.strsignal(-status)})"
        return f"ended its process with exit status {status}"


def probe_backends(target: Target, timeout_s: float = IMPORT_TIMEOUT_S) -> list[Probe]:
    """Looks at every registered backend, as `Prober.probe_all`."""
    with Prober(timeout_s=timeout_s) as prober:
        return prober.probe_all(target)


def load_for_start_up(origins: Mapping[str, str], timeout_s: float = START_UP_TIMEOUT_S) -> None:
    """Imports backends in a process that serves; asking for them later runs no import. Raises as `load_backend`.

    Those of third parties are imported in a child first, which takes about as long as importing PyTorch, so that one
    that hangs or ends its process is an error that names it. Our own import nothing that could, and are not looked at.

    Args:
        origins: for each name, where it came from (for messages).
        timeout_s: seconds that one may take.
    """
    unknown = [name for name, origin in origins.items() if not _is_trusted(find_registration(name, origin))]
    if unknown:
        with Prober(unknown, timeout_s) as prober:
            prober.check({name: origins[name] for name in unknown}, None)
    for name, origin in origins.items():
        load_backend(name, origin)


def look(name: str, origin: str, target: Target | None, entering: Any = lambda stage: None) -> dict[str, Any]:
    """Loads a backend and asks it, in this process.

    Args:
        entering: called with what is done next, for whoever has to tell what never ended.

    Returns:
        `features` (flags by name, or None), `reasons` and `problem`, as of `Probe`; of plain JSON types.
    """
    from hyv4_kvdequant.contract import Features, KVDequantError
    from hyv4_kvdequant.selector import ask_reasons, construct

    try:
        entering("importing it")
        backend_class = load_backend(name, origin)
        reasons: list[str] = []
        features: Any = None
        if target is not None:
            entering("its unavailable_reasons")
            reasons = ask_reasons(backend_class, target, origin)
            entering("its __init__")
            # An instance may know its features better than its class does.
            features = backend_class.features if reasons else construct(backend_class, target, origin).features
        flags = asdict(features) if isinstance(features, Features) else None
    except KVDequantError as error:
        return {"features": None, "reasons": [], "problem": str(error)}
    except BaseException as error:
        problem = (
            f"Backend {describe(name)} (asked for by {origin}) does not load: "
            f"it raised {type(error).__name__}: {error}\n"
            "What to do: repair or uninstall its distribution, or ask for another backend."
        )
        return {"features": None, "reasons": [], "problem": problem}
    return {"features": flags, "reasons": reasons, "problem": None}


def _features(found: Mapping[str, Any]) -> Features | None:
    from hyv4_kvdequant.contract import Features

    return None if found["features"] is None else Features(**found["features"])


def _as_told(problem: str) -> str:
    """What the child was told, raised here: its messages are complete sentences of this package."""
    return problem


def _is_run_time(claims: list[Registration]) -> bool:
    return len(claims) == 1 and claims[0].backend_class is not None


def _is_trusted(claim: Registration) -> bool:
    return claim.distribution == _OWN_DISTRIBUTION or is_loaded(claim)


def _must_import(claims: list[Registration]) -> bool:
    """Whether some code would have to be imported, which a child does first."""
    return any(not is_loaded(claim) for claim in claims)
