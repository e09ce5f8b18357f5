"""Which backends are installed, and loading one by name.

Entry points of the group `hyv4_kvdequant.backends` are listed without importing anything; a backend is
imported when it is asked for by name. Nothing is remembered on disk, so a plugin that was just installed or
removed is seen at once. Listing needs no PyTorch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from stevedore.driver import DriverManager
from stevedore.extension import error_on_conflict

from hyv4_kvdequant.contract.errors import (
    BackendConflictError,
    BackendLoadError,
    ConfigurationError,
    UnknownBackendError,
)
from hyv4_kvdequant.defaults import NAME_RULE
from hyv4_kvdequant.suggest import did_you_mean

if TYPE_CHECKING:
    from hyv4_kvdequant.contract import GatherDequantBackend

ENTRY_POINT_GROUP = "hyv4_kvdequant.backends"
_NAME = re.compile(r"[a-z][a-z0-9_-]*\Z")


@dataclass(frozen=True)
class Registration:
    """One claim to a backend name: an entry point of an installed distribution, or a class registered at run time."""

    name: str
    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint | None = None
    backend_class: type[GatherDequantBackend] | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})".replace(" )", ")")


_lock = threading.RLock()
_at_run_time: dict[str, Registration] = {}
_loaded: dict[Registration, type[GatherDequantBackend]] = {}
_generation = 0


class _FreshDriverManager(DriverManager[Any]):
    """stevedore's loader over a live listing.

    stevedore lists from a file cache that drops the distribution, merges equal entry points of two
    distributions, and can be stale for minutes; a fail-closed start-up needs all three right.
    """

    def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
        return _entry_points()


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


def generation() -> int:
    """A number that changes whenever a run-time registration does; caches of instances are keyed by it."""
    return _generation


def check_name(name: str, origin: str = "the call") -> None:
    """Raises ConfigurationError unless `name` can be a backend's name."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise ConfigurationError(f"{name!r} (from {origin}) cannot be a backend's name: a name is {NAME_RULE}.")


def registered_backends() -> dict[str, list[Registration]]:
    """Every claim to every name, sorted by name; imports no backend. More than one claim is a conflict."""
    claims: dict[str, list[Registration]] = {}
    for entry_point in _entry_points():
        dist = entry_point.dist
        distribution, version = (dist.name, dist.version) if dist is not None else ("unknown distribution", "")
        claim = Registration(entry_point.name, distribution, version, entry_point=entry_point)
        claims.setdefault(claim.name, []).append(claim)
    with _lock:
        for claim in _at_run_time.values():
            claims.setdefault(claim.name, []).append(claim)
    return dict(sorted(claims.items()))


def describe_installed() -> str:
    """One line that names every registered backend with its distribution and version."""
    claims = [str(claim) for claims in registered_backends().values() for claim in claims]
    return "Installed: " + (", ".join(claims) if claims else "no backend at all") + "."


def find_registration(name: str, origin: str = "the call") -> Registration:
    """The one claim to `name`.

    Raises:
        ConfigurationError: `name` cannot be a name.
        UnknownBackendError: nothing registers it; the message has the nearest match and what is installed.
        BackendConflictError: two distributions claim it; the message names both.
    """
    check_name(name, origin)
    claims = registered_backends()
    if name not in claims:
        raise UnknownBackendError(
            f"No installed distribution registers a backend named {name!r} (asked for by {origin})."
            f"{did_you_mean(name, claims)}\n{describe_installed()}\n"
            f"What to do: ask for one of these, or install the distribution that registers {name!r} in the "
            f"entry-point group {ENTRY_POINT_GROUP!r} into this Python environment ({sys.prefix})."
        )
    if len(claims[name]) > 1:
        owners = " and ".join(f"{claim.distribution} {claim.version}" for claim in claims[name])
        raise BackendConflictError(
            f"The backend name {name!r} (asked for by {origin}) is registered more than once, by {owners}.\n"
            f"What to do: uninstall all but one of them; which one would run must not depend on chance."
        )
    return claims[name][0]


def backend_names() -> list[str]:
    """Every registered name that can be asked for; imports no backend and no PyTorch."""
    return [name for name in registered_backends() if _NAME.match(name)]


def describe(name: str) -> str:
    """The backend with its distribution and version; the bare name where nothing registers it (any more)."""
    claims = registered_backends().get(name, [])
    return str(claims[0]) if claims else name


def load_backend(name: str, origin: str = "the call") -> type[GatherDequantBackend]:
    """Imports the backend registered as `name` and returns its class.

    Args:
        name: the registered name.
        origin: where the name came from, for messages (for example an environment variable).

    Raises:
        ConfigurationError, UnknownBackendError, BackendConflictError: as `find_registration`.
        BackendLoadError: the module does not import (the cause is chained), or what it gives is not a usable backend.
    """
    registration = find_registration(name, origin)
    with _lock:
        if registration in _loaded:
            return _loaded[registration]
    backend_class = registration.backend_class or _import(registration, origin)
    with _lock:
        _loaded[registration] = backend_class
    return backend_class


def is_loaded(registration: Registration) -> bool:
    """Whether this process has the backend's class already, so that asking for it runs no code of the plugin."""
    return registration.backend_class is not None or registration in _loaded


def _import(registration: Registration, origin: str) -> type[GatherDequantBackend]:
    assert registration.entry_point is not None
    failures: list[BaseException] = []
    try:
        # A plugin that prints while it is imported must not end up in somebody's JSON.
        with contextlib.redirect_stdout(sys.stderr):
            manager = _FreshDriverManager(
                ENTRY_POINT_GROUP,
                registration.name,
                on_load_failure_callback=lambda _manager, _entry_point, error: failures.append(error),
                on_missing_entrypoints_callback=None,
                conflict_resolver=error_on_conflict,
            )
        loaded = manager.driver
    except KeyboardInterrupt:
        raise  # somebody's Ctrl-C; a plugin that raises it itself is told by the probe
    except BaseException as error:
        cause = failures[0] if failures else error
        raise BackendLoadError(
            f"Backend {registration} (asked for by {origin}) does not load: importing "
            f"{registration.entry_point.value!r} raised {type(cause).__name__}: {cause}\n"
            f"{describe_installed()}\n"
            f"What to do: repair or reinstall {registration.distribution}, or ask for another backend."
        ) from cause
    problems = backend_problems(loaded, registration.name)
    if problems:
        raise BackendLoadError(
            f"Backend {registration} (asked for by {origin}), {registration.entry_point.value!r}, "
            f"is not usable: {' '.join(problems)}\n"
            f"What to do: install a release of {registration.distribution} made for this interface, "
            f"or ask for another backend. {describe_installed()}"
        )
    return cast("type[GatherDequantBackend]", loaded)


def backend_problems(candidate: object, name: str) -> list[str]:
    """Why `candidate` cannot serve as the backend registered as `name`: sentences, empty when it can."""
    from hyv4_kvdequant.contract import API_VERSION, Features, GatherDequantBackend

    if not inspect.isclass(candidate) or not issubclass(candidate, GatherDequantBackend):
        return [f"{candidate!r} is not a subclass of hyv4_kvdequant.GatherDequantBackend."]
    problems = []
    if inspect.isabstract(candidate):
        missing = ", ".join(sorted(candidate.__abstractmethods__))
        problems.append(f"It is abstract: {missing} must be implemented.")
    declared = getattr(candidate, "api_version", None)
    if declared != API_VERSION:
        problems.append(f"It declares api_version {declared!r}, and this hyv4-kvdequant speaks version {API_VERSION}.")
    own_name = getattr(candidate, "name", None)
    if own_name != name:
        problems.append(f"Its own name is {own_name!r}, but it is registered as {name!r}; the two must be equal.")
    # A property is allowed: a backend may know its features only once it runs.
    if not isinstance(getattr(candidate, "features", None), (Features, property)):
        problems.append("Its `features` is not a hyv4_kvdequant.Features.")
    return problems


def register_backend(backend_class: type[GatherDequantBackend]) -> type[GatherDequantBackend]:
    """Registers a class for this process (usable as a decorator), under the same rules as an entry point.

    Raises:
        ConfigurationError: the class's `name` cannot be a name.
        BackendLoadError: the class breaks a rule.
        BackendConflictError: the name is taken, by a distribution or by an earlier registration.
    """
    name = getattr(backend_class, "name", "")
    check_name(name, f"class {backend_class!r}")
    problems = backend_problems(backend_class, name)
    if problems:
        raise BackendLoadError(f"{backend_class!r} cannot be registered: {' '.join(problems)}")
    claim = Registration(name, f"run-time registration by {backend_class.__module__}", "", backend_class=backend_class)
    with _lock:
        taken = registered_backends().get(name)
        if taken:
            owners = " and ".join(f"{other.distribution} {other.version}".strip() for other in taken)
            raise BackendConflictError(
                f"The backend name {name!r} is already registered by {owners}, and now by {backend_class.__module__}."
                " What to do: choose another name, or unregister_backend() the earlier one."
            )
        _at_run_time[name] = claim
        _bump_generation()
    return backend_class


def unregister_backend(name: str) -> None:
    """Takes back a run-time registration.

    Raises:
        UnknownBackendError: no run-time registration has this name (entry points cannot be taken back).
    """
    with _lock:
        if name not in _at_run_time:
            raise UnknownBackendError(f"No backend named {name!r} was registered at run time, so none can be removed.")
        del _at_run_time[name]
        _bump_generation()


@contextlib.contextmanager
def temporarily_registered(backend_class: type[GatherDequantBackend]) -> Iterator[type[GatherDequantBackend]]:
    """Registers a class for the length of a `with` block."""
    register_backend(backend_class)
    try:
        yield backend_class
    finally:
        unregister_backend(backend_class.name)


def _bump_generation() -> None:
    global _generation  # noqa: PLW0603
    _generation += 1
