"""The contract kit: hold a backend to the contract, clause by clause.

* `run_checks(backend, device)` runs every clause and returns what held and what did not;
* `ContractTests` is the same as a pytest class to subclass (needs the `testing` extra);
* `hyv4_kvdequant.testing.strategies` has hypothesis strategies for inputs (needs the `testing` extra).
"""

from __future__ import annotations

from hyv4_kvdequant.testing.cases import Case, make_case, make_cases
from hyv4_kvdequant.testing.checks import (
    CASE_CLAUSES,
    CLAUSES,
    CheckResult,
    Clause,
    Failure,
    check_case,
    run_checks,
)
from hyv4_kvdequant.testing.contract_tests import ContractTests
from hyv4_kvdequant.testing.oracle import expected_rows, rows_equal

__all__ = [
    "CASE_CLAUSES",
    "CLAUSES",
    "Case",
    "CheckResult",
    "Clause",
    "ContractTests",
    "Failure",
    "check_case",
    "expected_rows",
    "make_case",
    "make_cases",
    "rows_equal",
    "run_checks",
]
