"""Looking at every registered backend without letting one of them harm the look at another."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from hyv4_kvdequant.contract import BackendError, ConfigurationError, Features, Target
from hyv4_kvdequant.registry import Registration, load_backend, registered_backends

IMPORT_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Probe:
    """One registered backend as seen from here.

    Attributes:
        name, distribution, version: as registered; a conflict names every distribution.
        features: None when the backend does not load.
        reasons: why it cannot serve the target; empty when it can.
        problem: why it does not load, or None.
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


def probe_backends(target: Target, timeout_s: float = IMPORT_TIMEOUT_S) -> list[Probe]:
    """Loads and asks every registered backend; one that raises, exits or hangs is reported, the others still asked."""
    return [_probe(name, claims, target, timeout_s) for name, claims in registered_backends().items()]


def _probe(name: str, claims: list[Registration], target: Target, timeout_s: float) -> Probe:
    distribution = ", ".join(claim.distribution for claim in claims)
    version = ", ".join(claim.version for claim in claims)
    found: list[Probe] = []

    def look() -> None:
        found.append(_look(name, distribution, version, target))

    if not _finishes(look, timeout_s):
        problem = f"Importing it did not finish within {timeout_s:g} s. What to do: repair or uninstall {distribution}."
        return Probe(name, distribution, version, problem=problem)
    return found[0]


def _finishes(function: Callable[[], None], timeout_s: float) -> bool:
    # A daemon thread: an import that hangs cannot be ended, but it must not keep this process from ending.
    thread = threading.Thread(target=function, daemon=True, name="hyv4-kvdequant-probe")
    standard_output = sys.stdout
    thread.start()
    thread.join(timeout_s)
    # What hangs in an import has standard output redirected for the whole process.
    sys.stdout = standard_output
    return not thread.is_alive()


def _look(name: str, distribution: str, version: str, target: Target) -> Probe:
    try:
        backend_class = load_backend(name)
        reasons = backend_class.unavailable_reasons(target)
        # An instance may know its features better than its class does.
        features = backend_class.features if reasons else backend_class(target).features
    except (BackendError, ConfigurationError) as error:
        return Probe(name, distribution, version, problem=str(error))
    except Exception as error:
        problem = f"It breaks the contract: asking for its availability raised {type(error).__name__}: {error}"
        return Probe(name, distribution, version, problem=problem)
    return Probe(name, distribution, version, features if isinstance(features, Features) else None, reasons)
