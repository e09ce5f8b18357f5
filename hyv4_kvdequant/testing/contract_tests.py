"""The contract as a pytest class: subclass it, name your backend, get a test a clause."""

from __future__ import annotations

from typing import ClassVar

from hyv4_kvdequant.contract import GatherDequantBackend, Target
from hyv4_kvdequant.registry import load_backend
from hyv4_kvdequant.selector import ask_reasons, construct
from hyv4_kvdequant.testing.checks import CASE_CLAUSES, CLAUSES, CheckResult, run_checks

_MOST_SHOWN = 5


class ContractTests:
    """Every clause of the contract, as separately named tests.

        class TestMine(ContractTests):
            backend = "mine"
            device = "cuda"

    Attributes:
        backend: a registered name, or a backend class.
        device: where the inputs are made; `cpu` or `cuda`.
        seed: of every input; a failing test prints it.
    """

    backend: ClassVar[str | type[GatherDequantBackend]]
    device: ClassVar[str] = "cpu"
    seed: ClassVar[int] = 0

    @classmethod
    def make_backend(cls) -> GatherDequantBackend:
        """The instance under test; override it to pass arguments of your own."""
        backend_class = load_backend(cls.backend) if isinstance(cls.backend, str) else cls.backend
        target = Target.detect(cls.device)
        reasons = ask_reasons(backend_class, target)
        assert not reasons, f"{backend_class.name} is unavailable on {cls.device}: {reasons}"
        return construct(backend_class, target)

    @classmethod
    def result_of(cls, clause: str) -> CheckResult:
        """The result of one clause. Clauses over single inputs share one run of these inputs a class."""
        shared = [clause.name for clause in CASE_CLAUSES]
        if clause not in shared:
            (result,) = run_checks(cls.make_backend(), cls.device, cls.seed, clauses=[clause])
            return result
        if "_shared_results" not in vars(cls):
            results = run_checks(cls.make_backend(), cls.device, cls.seed, clauses=shared)
            cls._shared_results = {result.clause: result for result in results}
        return cls._shared_results[clause]

    _shared_results: ClassVar[dict[str, CheckResult]]

    def _hold_to(self, clause: str) -> None:
        result = self.result_of(clause)
        print("\n".join([f"seed {self.seed}", *(f"  {case} {problem}" for case, problem in result.refused)]))
        listed = [f"  {case}: {problem}" for case, problem in result.failures[:_MOST_SHOWN]]
        more = len(result.failures) - len(listed)
        listed += [f"  and {more} more"] if more else []
        assert not result.failures, "\n".join([f"broken with seed {self.seed}: {result.title}", *listed])
        if result.not_run:
            import pytest

            pytest.skip(result.not_run)


def _make_test(clause: str, title: str) -> object:
    def test(self: ContractTests) -> None:
        self._hold_to(clause)

    test.__doc__ = title
    test.__name__ = f"test_{clause}"
    return test


# One method a clause, made from the list that `verify` prints, so that the two cannot drift apart.
for _entry in CLAUSES:
    setattr(ContractTests, f"test_{_entry.name}", _make_test(_entry.name, _entry.title))
