"""Picks the one backend that the settings ask for, or raises. No second backend is ever tried."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from hyv4_kvdequant import registry
from hyv4_kvdequant.contract import (
    BackendLoadError,
    BackendUnavailableError,
    ConfigurationError,
    Features,
    GatherDequantBackend,
    KVDequantError,
    Target,
)
from hyv4_kvdequant.settings import Settings, load_settings, variable_name

T = TypeVar("T")

PLATFORM_DEFAULTS = {"hcu": "lightop", "cuda": "triton", "rocm": "triton", "cpu": "torch"}
"""The default backend of a platform: decided by the platform alone, never by what happens to be installed."""

_lock = threading.Lock()
_instances: dict[tuple[int, str, Target], GatherDequantBackend] = {}


def choose_name(settings: Settings, target: Target) -> tuple[str, str]:
    """The primary backend's name and where it came from.

    Raises:
        ConfigurationError: no name was set and the target's platform has no default.
    """
    if settings.backend is not None:
        return settings.backend, settings.source("backend")
    if target.platform not in PLATFORM_DEFAULTS:
        raise ConfigurationError(
            f"There is no default backend for the platform {target.platform!r} (device {target.device}).\n"
            f"What to do: name one with {variable_name('backend')}. {registry.describe_installed()}"
        )
    return PLATFORM_DEFAULTS[target.platform], f"the default for the platform {target.platform!r}"


def select_backend(target: Target, settings: Settings | None = None) -> GatherDequantBackend:
    """The backend that the settings (default: this process's) ask for, ready to serve `target`.

    Resolved once for each name and target; a later call is a dictionary look-up.

    Raises:
        ConfigurationError, UnknownBackendError, BackendConflictError, BackendLoadError: as `load_backend`.
        BackendUnavailableError: it cannot serve the target; the message has all reasons.
    """
    name, origin = choose_name(settings or load_settings(), target)
    return get_backend(name, target, origin)


def get_backend(name: str, target: Target, origin: str = "the call") -> GatherDequantBackend:
    """The instance of the backend `name` for `target`; raises as `select_backend`."""
    key = (registry.generation(), name, target)
    backend = _instances.get(key)
    if backend is None:
        with _lock:
            backend = _instances.get(key) or _make(name, target, origin)
            _instances[key] = backend
    return backend


def _make(name: str, target: Target, origin: str) -> GatherDequantBackend:
    backend_class = registry.load_backend(name, origin)
    reasons = ask_reasons(backend_class, target, origin)
    if reasons:
        listed = "\n".join(f"  - {reason}" for reason in reasons)
        raise BackendUnavailableError(
            f"Backend {registry.find_registration(name)} (asked for by {origin}) is unavailable for "
            f"{describe_target(target)}:\n{listed}\n{registry.describe_installed()}\n"
            f"What to do: remove the cause, or set {variable_name('backend')} to a backend that serves this device "
            "(`hyv4-kvdequant list` shows which do). No other backend was tried.",
            reasons,
        )
    return construct(backend_class, target, origin)


def ask_reasons(backend_class: type[GatherDequantBackend], target: Target, origin: str = "the call") -> list[str]:
    """`unavailable_reasons`, held to what the contract says of it.

    Raises:
        BackendLoadError: it raises, or answers with anything but a list of strings.
    """
    name = backend_class.name
    reasons = _held_to_contract(lambda: backend_class.unavailable_reasons(target), name, origin, "unavailable_reasons")
    if not isinstance(reasons, list) or not all(isinstance(reason, str) for reason in reasons):
        raise _breaks_contract(
            name,
            origin,
            f"unavailable_reasons returned {reasons!r}; expected a list of sentences, empty when it can run",
        )
    return reasons


def construct(
    backend_class: type[GatherDequantBackend], target: Target, origin: str = "the call"
) -> GatherDequantBackend:
    """An instance for `target`, for which `ask_reasons` gave none.

    Raises:
        BackendLoadError: `__init__` or `features` raises, or what they give is not what the contract says.
        KVDequantError: whatever `__init__` raises of this package's own errors, unchanged.
    """
    name = backend_class.name
    backend = _held_to_contract(lambda: backend_class(target), name, origin, "__init__")
    if not isinstance(backend, backend_class):
        raise _breaks_contract(name, origin, f"constructing it gave {backend!r}, which is no instance of it")
    features = _held_to_contract(lambda: backend.features, name, origin, "features")
    if not isinstance(features, Features):
        raise _breaks_contract(name, origin, f"its features are {features!r}; expected a hyv4_kvdequant.Features")
    return backend


def _held_to_contract(ask: Callable[[], T], name: str, origin: str, what: str) -> T:
    try:
        return ask()
    except (KVDequantError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _breaks_contract(name, origin, f"{what} raised {type(error).__name__}: {error}") from error


def _breaks_contract(name: str, origin: str, how: str) -> BackendLoadError:
    registered = registry.describe(name)
    return BackendLoadError(
        f"Backend {registered} (asked for by {origin}) breaks the contract: {how}.\n"
        f"What to do: repair or reinstall its distribution, or ask for another backend. {registry.describe_installed()}"
    )


def describe_target(target: Target) -> str:
    """One phrase that names the device and the cache."""
    arch = f", {target.arch}" if target.arch else ""
    return f"device {target.device} ({target.platform}{arch}), record {target.layout.name}"
