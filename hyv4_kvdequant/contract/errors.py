"""Errors of hyv4-kvdequant. Every message says what was wrong, what was expected and what to do."""

from __future__ import annotations


class KVDequantError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigurationError(KVDequantError, ValueError):
    """A setting is unknown, cannot be read, or contradicts another."""


class BackendError(KVDequantError):
    """A backend was asked for and cannot be had. Nothing is ever used in its place."""


class UnknownBackendError(BackendError, LookupError):
    """No installed distribution registers a backend of this name."""


class BackendConflictError(BackendError):
    """Two distributions (or one and a run-time registration) claim one name."""


class BackendLoadError(BackendError):
    """The backend is registered but is not usable code: its module does not import, or the object breaks a rule."""


class BackendUnavailableError(BackendError):
    """The backend is sound but cannot run here; `reasons` holds every reason as a sentence."""

    def __init__(self, message: str, reasons: list[str]) -> None:
        super().__init__(message)
        self.reasons = reasons


class InvalidCallError(KVDequantError, ValueError):
    """An argument of a gather call breaks the contract; the message names the argument."""


class StepFileError(KVDequantError, ValueError):
    """A step file (recorded attention step) is truncated, foreign, newer than this package, or inconsistent."""


class HostError(KVDequantError, RuntimeError):
    """The serving host (vLLM, vllm_hcu) is not one this package knows how to intercept."""
