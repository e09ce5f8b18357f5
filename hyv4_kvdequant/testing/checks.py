"""Holding a backend to the clauses: `run_checks`, which `verify` prints and `ContractTests` asserts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hyv4_kvdequant.contract import (
    FP8_DS_MLA,
    ConfigurationError,
    GatherDequantBackend,
    InvalidCallError,
    RecordLayout,
    Target,
)
from hyv4_kvdequant.suggest import did_you_mean
from hyv4_kvdequant.testing.cases import Case, make_cases
from hyv4_kvdequant.testing.clauses import (
    OUTCOME_CLAUSES,
    SEQUENCE_CLAUSES,
    OutcomeCheck,
    SequenceCheck,
    why_not_run,
)
from hyv4_kvdequant.testing.outcome import Outcome, run_case


@dataclass(frozen=True)
class Clause:
    """A clause of the contract: its name and what it says."""

    name: str
    title: str


def _clause(check: OutcomeCheck | SequenceCheck) -> Clause:
    return Clause(check.__name__, (check.__doc__ or "").strip().splitlines()[0])


CASE_CLAUSES: tuple[Clause, ...] = tuple(map(_clause, OUTCOME_CLAUSES))
"""The clauses that hold or not on one input."""

CLAUSES: tuple[Clause, ...] = (*CASE_CLAUSES, *map(_clause, SEQUENCE_CLAUSES))
"""Every clause, in the order in which `run_checks` yields them."""


class Failure(NamedTuple):
    """One input on which a clause does not hold, and a sentence that says how."""

    case: str
    problem: str


@dataclass(frozen=True)
class CheckResult:
    """Whether one clause held.

    Attributes:
        clause, title: as in `CLAUSES`.
        cases: inputs it was tried on.
        failures: one for each input on which it did not hold.
        failing_case: the first such input, where there is one.
        not_run: why it was not tried, or None.
        refused: inputs that the backend refused with an `InvalidCallError`, and its message. A backend may refuse a
            geometry that it cannot serve; one that refuses every input breaks the clause.
    """

    clause: str
    title: str
    cases: int = 0
    failures: tuple[Failure, ...] = ()
    failing_case: Case | None = None
    not_run: str | None = None
    refused: tuple[Failure, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures and self.not_run is None


def run_checks(
    backend: GatherDequantBackend | type[GatherDequantBackend],
    device: torch.device | str = "cpu",
    seed: int = 0,
    *,
    clauses: Iterable[str] | None = None,
    cases: Iterable[Case] | None = None,
    layout: RecordLayout = FP8_DS_MLA,
) -> Iterator[CheckResult]:
    """Holds a backend to the contract on one device; yields a result a clause, in the order of `CLAUSES`.

    Args:
        backend: an instance, or a class that is made for `device` and `layout` here.
        device: where inputs are made.
        seed: of every input; the same seed gives the same inputs.
        clauses: names of `CLAUSES` to run; None for all.
        cases: inputs on `device` to use in place of the kit's own; then only `CASE_CLAUSES` are run.
        layout: the record; a registered one, or one of `fp8_ds_mla`'s types.

    An exception out of the backend counts as a failure of the clause it was raised in.

    Raises:
        ConfigurationError: a name in `clauses` is not one.
    """
    wanted = _known(clauses)
    target = Target.detect(torch.device(device), layout)
    instance = backend if isinstance(backend, GatherDequantBackend) else backend(target)
    return _results(instance, target, seed, wanted, None if cases is None else list(cases))


def check_case(backend: GatherDequantBackend, case: Case) -> list[str]:
    """Every clause that fails on this one case, as `clause: sentence`; empty when the backend is right."""
    outcome = run_case(backend, case)
    found = ((check.__name__, check(outcome)) for check in OUTCOME_CLAUSES)
    return [f"{name}: {problem}" for name, problem in found if problem]


def _known(clauses: Iterable[str] | None) -> set[str]:
    names = [clause.name for clause in CLAUSES]
    wanted = set(names if clauses is None else clauses)
    for name in sorted(wanted.difference(names)):
        raise ConfigurationError(
            f"{name!r} is not a clause of the contract.{did_you_mean(name, names)}\nKnown: {', '.join(names)}."
        )
    return wanted


def _results(
    backend: GatherDequantBackend, target: Target, seed: int, wanted: set[str], cases: list[Case] | None
) -> Iterator[CheckResult]:
    outcome_checks = [check for check in OUTCOME_CLAUSES if check.__name__ in wanted]
    if outcome_checks:
        inputs = list(make_cases(seed, target.device, target.layout)) if cases is None else cases
        yield from _case_results(backend, inputs, outcome_checks)
    for check in SEQUENCE_CLAUSES if cases is None else ():
        if check.__name__ in wanted:
            yield _sequence_result(check, backend, target, seed)


def _case_results(
    backend: GatherDequantBackend, cases: list[Case], checks: list[OutcomeCheck]
) -> Iterator[CheckResult]:
    outcomes = [_try_case(backend, case) for case in cases]
    refused = tuple(outcome for outcome in outcomes if isinstance(outcome, Failure))
    for check in checks:
        failures: list[Failure] = []
        failing: list[Case] = []
        for case, outcome in zip(cases, outcomes, strict=True):
            if isinstance(outcome, Failure) and len(refused) < len(cases):
                continue
            problem = check(outcome) if isinstance(outcome, Outcome) else _raised(outcome)
            if problem:
                failures.append(Failure(case.name, problem))
                failing.append(case)
        clause = _clause(check)
        first = failing[0] if failing else None
        yield CheckResult(clause.name, clause.title, len(cases) - len(refused), tuple(failures), first, None, refused)


def _try_case(backend: GatherDequantBackend, case: Case) -> Outcome | Failure | str:
    """The outcome, a refusal, or what the backend raised."""
    try:
        return run_case(backend, case)
    except InvalidCallError as error:
        return Failure(case.name, f"refused: {error}")
    except Exception as error:
        return f"the call raised {type(error).__name__}: {error}"


def _raised(outcome: Failure | str) -> str:
    return outcome.problem if isinstance(outcome, Failure) else outcome


def _sequence_result(check: SequenceCheck, backend: GatherDequantBackend, target: Target, seed: int) -> CheckResult:
    clause = _clause(check)
    not_run = why_not_run(check, backend, target.device)
    if not_run:
        return CheckResult(clause.name, clause.title, not_run=not_run)
    try:
        broken = check(backend, target, seed)
    except torch.OutOfMemoryError as error:
        return CheckResult(clause.name, clause.title, not_run=f"too little device memory: {error}")
    except Exception as error:
        raised = Failure("several calls", f"it raised {type(error).__name__}: {error}")
        return CheckResult(clause.name, clause.title, 1, (raised,))
    if broken is None:
        return CheckResult(clause.name, clause.title, 1)
    return CheckResult(clause.name, clause.title, 1, (Failure("several calls", broken.problem),), broken.case)
