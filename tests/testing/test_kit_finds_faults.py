"""The contract kit rejects every mutant, and no clause of it is idle. `pytest -s` shows the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from mutants import GPU_MUTANTS, MUTANTS, Dissected, Mutant, describe

from hyv4_kvdequant import Target, load_backend
from hyv4_kvdequant.testing import CLAUSES, CheckResult, check_case, make_cases, run_checks
from hyv4_kvdequant.testing.cases import width_1
from hyv4_kvdequant.testing.outcome import run_case

NEEDS_ACCELERATOR = {"outputs_past_4_gib", "graph_replay_equals_eager", "two_streams_do_not_disturb_each_other"}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The inputs are so small that a second thread only costs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Results = dict[Mutant, list[CheckResult]]
Table = dict[Mutant, set[str]]


def broken_clauses(results: Iterable[CheckResult]) -> set[str]:
    return {result.clause for result in results if result.failures}


@pytest.fixture(scope="module")
def results() -> Results:
    return {mutant: list(run_checks(mutant)) for mutant in MUTANTS}


@pytest.fixture(scope="module")
def table(results: Results) -> Table:
    found = {mutant: broken_clauses(of_mutant) for mutant, of_mutant in results.items()}
    print("\n" + as_text(found, [clause.name for clause in CLAUSES if clause.name not in NEEDS_ACCELERATOR]))
    return found


def as_text(found: Table, clauses: list[str]) -> str:
    """A line a mutant with a mark under each clause that it breaks, the clauses' names below."""
    width = max(len(describe(mutant)) for mutant in found)
    marks = [" ".join("x" if name in broken else "." for name in clauses) for broken in found.values()]
    lines = [f"{describe(mutant):{width}}  {row}" for mutant, row in zip(found, marks, strict=True)]
    bars = ["| " * len(clauses[:end]) + name for end, name in reversed(list(enumerate(clauses)))]
    return "\n".join([*lines, *(" " * (width + 2) + bar for bar in bars)])


def test_the_backend_the_mutants_are_made_from_is_right() -> None:
    results = list(run_checks(Dissected))
    assert [(result.clause, result.failures) for result in results if result.failures] == []
    assert {result.clause for result in results if result.not_run} == NEEDS_ACCELERATOR


def test_there_are_enough_mutants_and_none_twice() -> None:
    assert len(MUTANTS) >= 26
    assert len({describe(mutant) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_every_mutant_is_rejected(mutant: Mutant, table: Table) -> None:
    assert table[mutant], f"the kit does not notice a backend that {describe(mutant)}"


@pytest.mark.parametrize("clause", [clause.name for clause in CLAUSES if clause.name not in NEEDS_ACCELERATOR])
def test_no_clause_is_idle(clause: str, table: Table) -> None:
    assert any(clause in broken for broken in table.values())


def test_clauses_that_alone_reject_a_mutant(table: Table) -> None:
    """Faults that no other clause over single inputs shows."""
    by_name = {mutant.__name__: broken for mutant, broken in table.items()}
    for mutant, clause in {
        "Offsets32Bit": "offsets_past_2_gib",
        "BlockOffsets32Bit": "offsets_past_2_gib",
        "Compares16Bits": "offsets_past_2_gib",
        "WritesWholeTileOfRows": "outputs_stay_in_bounds",
        "WritesIndexPastTheEnd": "outputs_stay_in_bounds",
        "ClampsSlotsInPlace": "inputs_are_untouched",
        "ReusesLastMapping": "reused_mapping_serves_new_contents",
        "ReuseLeavesUnfilledRowsDirty": "reused_mapping_serves_new_contents",
        "ReuseWritesThroughMinusOne": "reused_mapping_serves_new_contents",
        "DedupsAtWidth1": "width_1_mapping_is_identity",
        "RaisesOnUnknownCapability": "availability_is_plain_facts",
        "GivesReasonAsString": "availability_is_plain_facts",
    }.items():
        # What an outcome shows is also seen after other calls; what only some inputs show, not always.
        assert by_name[mutant] - {clause} <= {
            "calls_do_not_depend_on_earlier_ones",
            "reused_mapping_serves_new_contents",
            "offsets_past_2_gib",
        }, mutant
        assert clause in by_name[mutant], mutant


def test_mutants_return_and_do_not_raise(results: Results) -> None:
    """A mutant that raises would be rejected by every clause at once and show nothing about any of them."""
    problems = [
        (mutant.__name__, problem)
        for mutant, of_mutant in results.items()
        for result in of_mutant
        for _, problem in result.failures
        if "raised" in problem and result.clause != "availability_is_plain_facts"
    ]
    assert problems == []


def test_every_mutant_differs_from_the_torch_backend_by_its_mistake_alone() -> None:
    """The dissected backend and the reference agree bit for bit wherever the contract fixes the bits."""
    target = Target.detect("cpu")
    for case in map(width_1, make_cases(seed=5)):
        ours, reference = (run_case(backend(target), case) for backend in (Dissected, load_backend("torch")))
        assert torch.equal(ours.rows, reference.rows), case.name
        assert torch.equal(ours.compact_indices, reference.compact_indices)


def test_other_seeds_find_the_same_numeric_faults() -> None:
    numeric = [mutant for mutant in MUTANTS if "round" in vars(mutant) or "decode" in vars(mutant)]
    assert len(numeric) >= 8
    for mutant in numeric:
        backend = mutant(Target.detect("cpu"))
        assert any(check_case(backend, case) for case in make_cases(seed=11)), describe(mutant)


@pytest.mark.gpu
@pytest.mark.parametrize("mutant", GPU_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_clauses_that_need_an_accelerator_reject_their_mutants(mutant: Mutant) -> None:
    clause = GPU_MUTANTS[mutant]
    right = mutant.__mro__[1]
    assert broken_clauses(run_checks(right, "cuda", clauses=[clause])) == set()
    assert broken_clauses(run_checks(mutant, "cuda", clauses=[clause])) == {clause}


def test_every_clause_that_needs_an_accelerator_has_a_mutant() -> None:
    assert set(GPU_MUTANTS.values()) == NEEDS_ACCELERATOR
