"""The contract as a pytest class: subclass it, name your backend, get a test a clause."""

from __future__ import annotations

from typing import ClassVar

from hyv4_kvdequant.contract import GatherDequantBackend, Target
from hyv4_kvdequant.registry import load_backend
from hyv4_kvdequant.testing.checks import CLAUSES, CheckResult, run_checks


class ContractTests:
    """Every clause of the contract, as separately named tests.

        class TestMine(ContractTests):
            backend = "mine"
            device = "cuda"

    Attributes:
        backend: a registered name, or a backend class.
        device: where the inputs are made; `cpu` or `cuda`.
        seed: of every input; it is in the message of a failing test.
    """

    backend: ClassVar[str | type[GatherDequantBackend]]
    device: ClassVar[str] = "cpu"
    seed: ClassVar[int] = 0

    @classmethod
    def make_backend(cls) -> GatherDequantBackend:
        """The instance under test; override it to pass arguments of your own."""
        backend_class = load_backend(cls.backend) if isinstance(cls.backend, str) else cls.backend
        target = Target.detect(cls.device)
        reasons = backend_class.unavailable_reasons(target)
        assert not reasons, f"{backend_class.name} is unavailable on {cls.device}: {reasons}"
        return backend_class(target)

    def _hold_to(self, clause: str) -> CheckResult:
        (result,) = run_checks(self.make_backend(), self.device, self.seed, [clause])
        listed = "\n".join(f"  case {case}: {problem}" for case, problem in result.failures)
        assert not result.failures, f"{result.title} (seed {self.seed})\n{listed}"
        if result.not_run:
            import pytest

            pytest.skip(result.not_run)
        return result


def _make_test(clause: str, title: str) -> object:
    def test(self: ContractTests) -> None:
        self._hold_to(clause)

    test.__doc__ = title
    test.__name__ = f"test_{clause}"
    return test


# One method a clause, made from the list that `verify` prints, so that the two cannot drift apart.
for _entry in CLAUSES:
    setattr(ContractTests, f"test_{_entry.name}", _make_test(_entry.name, _entry.title))
