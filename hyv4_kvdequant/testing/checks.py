"""The contract's clauses as functions, and running all of them on a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from hyv4_kvdequant.contract import GatherCall, GatherDequantBackend, Target
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.testing.cases import Case, make_cases, make_large_case
from hyv4_kvdequant.testing.oracle import expected_rows, rows_equal

_GUARD_ROWS = 3
_POISON_BITS = 0x7FA5  # a NaN nobody writes by chance
_GUARD_INDEX = -77


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a backend made of a case: outputs on the CPU, and the state of everything it must not touch."""

    case: Case
    rows: torch.Tensor
    compact_indices: torch.Tensor
    slots: torch.Tensor
    guards_intact: bool
    inputs_intact: bool

    @property
    def filled(self) -> torch.Tensor:
        return (self.slots >= 0) & (self.slots < self.case.num_slots)


@dataclass(frozen=True)
class CheckResult:
    """Whether one clause held: `failures` has a sentence for each case in which it did not."""

    clause: str
    title: str
    cases: int
    failures: tuple[tuple[str, str], ...] = ()
    failing_case: Case | None = None
    not_run: str | None = None

    @property
    def passed(self) -> bool:
        return not self.failures and self.not_run is None


class _Buffers:
    """Poisoned outputs with guards on both sides, as a caller who slices a workspace would pass them."""

    def __init__(self, case: Case) -> None:
        device, rows = case.kv_cache.device, case.topk_indices.numel()
        self.kv = torch.full(
            (rows + 2 * _GUARD_ROWS, case.layout.row_dim), _POISON_BITS, dtype=torch.int16, device=device
        )
        self.indices = torch.full((rows + 2 * _GUARD_ROWS,), _GUARD_INDEX, dtype=torch.int32, device=device)
        self.poison_outputs()

    def poison_outputs(self) -> None:
        inner = slice(_GUARD_ROWS, self.kv.shape[0] - _GUARD_ROWS)
        self.kv[inner] = _POISON_BITS
        # A stale mapping looks like a real one: the rows in reverse.
        count = self.indices.numel() - 2 * _GUARD_ROWS
        self.indices[inner] = torch.arange(count - 1, -1, -1, dtype=torch.int32, device=self.indices.device)

    def call(self, case: Case, reuse: bool = False) -> GatherCall:
        inner = slice(_GUARD_ROWS, self.kv.shape[0] - _GUARD_ROWS)
        return GatherCall(
            kv_cache=case.kv_cache,
            topk_indices=case.topk_indices,
            compact_kv=self.kv[inner].view(torch.bfloat16),
            compact_indices=self.indices[inner].view(case.topk_indices.shape),
            layout=case.layout,
            tokens_per_request=case.tokens_per_request,
            reuse_compact_indices=reuse,
        )

    def guards_intact(self) -> bool:
        ends = [slice(None, _GUARD_ROWS), slice(-_GUARD_ROWS, None)]
        return all(
            bool((self.kv[end] == _POISON_BITS).all() and (self.indices[end] == _GUARD_INDEX).all()) for end in ends
        )

    def outcome(self, case: Case, slots_before: torch.Tensor, inputs_intact: bool) -> Outcome:
        call = self.call(case)
        return Outcome(
            case,
            call.compact_kv.view(torch.int16).cpu(),
            call.compact_indices.cpu(),
            slots_before.cpu(),
            self.guards_intact(),
            inputs_intact,
        )


def _touched_bytes(case: Case) -> torch.Tensor:
    """The records a call may read, to see afterwards that they are as they were."""
    slots = case.topk_indices.flatten()
    return case.records(slots[(slots >= 0) & (slots < case.num_slots)])


def run_case(backend: GatherDequantBackend, case: Case) -> Outcome:
    """Runs one case into poisoned, guarded buffers."""
    buffers = _Buffers(case)
    slots, records = case.topk_indices.clone(), _touched_bytes(case)
    run_call(backend, buffers.call(case))
    intact = torch.equal(slots, case.topk_indices) and torch.equal(records, _touched_bytes(case))
    return buffers.outcome(case, slots, intact)


# --- clauses over one outcome: None when it holds, else a sentence ---


def filled_rows_are_exact(outcome: Outcome) -> str | None:
    """1. Every filled entry's index points to the bit-exact dequantized record of its slot."""
    tokens, ks = outcome.filled.nonzero(as_tuple=True)
    if tokens.numel() == 0:
        return None
    indices = outcome.compact_indices[tokens, ks].long()
    outside = (indices < 0) | (indices >= outcome.rows.shape[0])
    if outside.any():
        first = int(outside.nonzero()[0])
        return f"entry [{tokens[first]}, {ks[first]}] is filled but its index is {indices[first]}"
    layout = outcome.case.layout
    expected = expected_rows(outcome.case.records(outcome.slots[tokens, ks]), layout)
    got = outcome.rows[indices]
    wrong = ~rows_equal(got, expected, layout)
    if not wrong.any():
        return None
    row, element = (int(value) for value in wrong.nonzero()[0])
    return (
        f"{int(wrong.any(1).sum())} of {len(tokens)} rows differ; first at entry [{tokens[row]}, {ks[row]}] "
        f"(slot {outcome.slots[tokens[row], ks[row]]}), element {element}: bits "
        f"{int(got[row, element]) & 0xFFFF:#06x}, expected {int(expected[row, element]) & 0xFFFF:#06x}"
    )


def unfilled_index_is_minus_one(outcome: Outcome) -> str | None:
    """2. Every unfilled entry has index -1."""
    wrong = (~outcome.filled & (outcome.compact_indices != -1)).nonzero()
    if wrong.numel() == 0:
        return None
    token, k = wrong[0].tolist()
    return (
        f"entry [{token}, {k}] (slot {outcome.slots[token, k]}) is unfilled "
        f"but its index is {outcome.compact_indices[token, k]}"
    )


def width_1_mapping_is_identity(outcome: Outcome) -> str | None:
    """3a. With request width 1, a filled entry's index is t * topk + k."""
    if outcome.case.tokens_per_request != 1:
        return None
    identity = torch.arange(outcome.slots.numel(), dtype=torch.int32).view(outcome.slots.shape)
    wrong = (outcome.filled & (outcome.compact_indices != identity)).nonzero()
    if wrong.numel() == 0:
        return None
    token, k = wrong[0].tolist()
    return f"entry [{token}, {k}] has index {outcome.compact_indices[token, k]}, expected {identity[token, k]}"


def width_1_unfilled_rows_are_zero(outcome: Outcome) -> str | None:
    """3b. With request width 1, rows of unfilled entries are all zero bits."""
    if outcome.case.tokens_per_request != 1:
        return None
    wrong = (~outcome.filled.flatten() & (outcome.rows != 0).any(1)).nonzero()
    return f"row {int(wrong[0])} belongs to an unfilled entry but has non-zero bits" if wrong.numel() else None


def outputs_stay_in_bounds(outcome: Outcome) -> str | None:
    """Nothing is written before or after the two output buffers."""
    return None if outcome.guards_intact else "memory next to compact_kv or compact_indices was overwritten"


def inputs_are_untouched(outcome: Outcome) -> str | None:
    """The cache and topk_indices are as they were."""
    return None if outcome.inputs_intact else "kv_cache or topk_indices was changed by the call"


OUTCOME_CLAUSES: tuple[Callable[[Outcome], str | None], ...] = (
    filled_rows_are_exact,
    unfilled_index_is_minus_one,
    width_1_mapping_is_identity,
    width_1_unfilled_rows_are_zero,
    outputs_stay_in_bounds,
    inputs_are_untouched,
)


def check_case(backend: GatherDequantBackend, case: Case) -> list[str]:
    """Every clause that fails on this one case, as `clause: sentence`; empty when the backend is right."""
    outcome = run_case(backend, case)
    found = ((clause, clause(outcome)) for clause in OUTCOME_CLAUSES)
    return [f"{clause.__name__}: {problem}" for clause, problem in found if problem]


def _first_problem(outcome: Outcome) -> str | None:
    return next((problem for clause in OUTCOME_CLAUSES if (problem := clause(outcome))), None)


# --- clauses over several calls ---


def calls_do_not_depend_on_earlier_ones(backend: GatherDequantBackend, seed: int, device: torch.device) -> str | None:
    """A call gives the same whatever ran before it with this instance: other shapes, other contents, old outputs."""
    for case in [*make_cases(seed + 1, device), *make_cases(seed, device)][::7]:
        problem = _first_problem(run_case(backend, case))
        if problem:
            return f"case {case.name}, after other calls: {problem}"
    return None


def reused_mapping_serves_new_contents(backend: GatherDequantBackend, seed: int, device: torch.device) -> str | None:
    """With reuse_compact_indices, a second layer's records land where the first layer's mapping points."""
    for first, second in zip(make_cases(seed, device), make_cases(seed + 2, device), strict=True):
        buffers = _Buffers(first)
        run_call(backend, buffers.call(first))
        buffers.kv[_GUARD_ROWS : buffers.kv.shape[0] - _GUARD_ROWS] = _POISON_BITS
        layer = replace(second, topk_indices=first.topk_indices, tokens_per_request=first.tokens_per_request)
        run_call(backend, buffers.call(layer, reuse=True))
        problem = _first_problem(buffers.outcome(layer, layer.topk_indices, True))
        if problem:
            return f"case {first.name}, second layer: {problem}"
    return None


def offsets_past_2_gib(backend: GatherDequantBackend, seed: int, device: torch.device) -> str | None:
    """Slots whose byte offset passes 2**31 are read where they are."""
    return _first_problem(run_case(backend, make_large_case(seed, device)))


def graph_replay_equals_eager(backend: GatherDequantBackend, seed: int, device: torch.device) -> str | None:
    """A captured call, replayed on other slots and records, gives what an eager call would."""
    for first, second in zip(make_cases(seed, device), make_cases(seed + 3, device), strict=True):
        if first.topk_indices.numel() == 0:
            continue
        buffers = _Buffers(first)
        call = buffers.call(first)
        run_call(backend, call)  # what compiles or allocates once does so before the capture
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_call(backend, call)
        first.kv_cache.copy_(second.kv_cache)
        first.topk_indices.copy_(second.topk_indices)
        buffers.poison_outputs()
        graph.replay()
        torch.cuda.synchronize(device)
        problem = _first_problem(buffers.outcome(first, first.topk_indices, True))
        if problem:
            return f"case {first.name}, replayed: {problem}"
    return None


def two_streams_do_not_disturb_each_other(backend: GatherDequantBackend, seed: int, device: torch.device) -> str | None:
    """Calls that run at the same time on two streams with different buffers both come out right."""
    cases = [case for case in make_cases(seed, device) if case.topk_indices.numel()]
    pairs = [(case, _Buffers(case)) for case in cases for _ in range(4)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    for position, (case, buffers) in enumerate(pairs):
        with torch.cuda.stream(streams[position % 2]):
            run_call(backend, buffers.call(case))
    torch.cuda.synchronize(device)
    for case, buffers in pairs:
        problem = _first_problem(buffers.outcome(case, case.topk_indices, True))
        if problem:
            return f"case {case.name}, on two streams: {problem}"
    return None


SequenceCheck = Callable[[GatherDequantBackend, int, torch.device], "str | None"]
SEQUENCE_CLAUSES: tuple[SequenceCheck, ...] = (
    calls_do_not_depend_on_earlier_ones,
    reused_mapping_serves_new_contents,
    offsets_past_2_gib,
    graph_replay_equals_eager,
    two_streams_do_not_disturb_each_other,
)
_NEEDS_ACCELERATOR = frozenset({"graph_replay_equals_eager", "two_streams_do_not_disturb_each_other"})


@dataclass(frozen=True)
class Clause:
    """A clause of the contract: its name and what it says."""

    name: str
    title: str


def _clause(function: Callable[..., str | None]) -> Clause:
    return Clause(function.__name__, (function.__doc__ or "").strip())


CLAUSES: tuple[Clause, ...] = (*map(_clause, OUTCOME_CLAUSES), *map(_clause, SEQUENCE_CLAUSES))


def run_checks(
    backend: GatherDequantBackend | type[GatherDequantBackend],
    device: torch.device | str = "cpu",
    seed: int = 0,
    clauses: Iterable[str] | None = None,
) -> Iterator[CheckResult]:
    """Holds a backend to the contract on one device; yields a result a clause.

    Args:
        backend: an instance, or a class that is made for `device` here.
        device: where inputs are made.
        seed: of every input; the same seed gives the same inputs.
        clauses: names of `CLAUSES` to run; None for all.

    An exception out of the backend counts as a failure of the clause it was raised in.
    """
    device = torch.device(device)
    instance = backend if isinstance(backend, GatherDequantBackend) else backend(Target.detect(device))
    wanted = set(clauses) if clauses is not None else {clause.name for clause in CLAUSES}
    yield from _outcome_results(instance, device, seed, wanted)
    for check in SEQUENCE_CLAUSES:
        if check.__name__ in wanted:
            yield _sequence_result(check, instance, device, seed)


def _outcome_results(
    backend: GatherDequantBackend, device: torch.device, seed: int, wanted: set[str]
) -> Iterator[CheckResult]:
    functions = [function for function in OUTCOME_CLAUSES if function.__name__ in wanted]
    if not functions:
        return
    failures: dict[str, list[tuple[str, str]]] = {function.__name__: [] for function in functions}
    failing: dict[str, Case] = {}
    cases = list(make_cases(seed, device))
    for case in cases:
        outcome, raised = _try_case(backend, case)
        for function in functions:
            problem = raised or (function(outcome) if outcome is not None else None)
            if problem:
                failures[function.__name__].append((case.name, problem))
                failing.setdefault(function.__name__, case)
    for function in functions:
        clause = _clause(function)
        name = clause.name
        yield CheckResult(name, clause.title, len(cases), tuple(failures[name]), failing.get(name))


def _try_case(backend: GatherDequantBackend, case: Case) -> tuple[Outcome | None, str | None]:
    try:
        return run_case(backend, case), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _sequence_result(
    check: SequenceCheck, backend: GatherDequantBackend, device: torch.device, seed: int
) -> CheckResult:
    clause = _clause(check)
    if clause.name in _NEEDS_ACCELERATOR and device.type != "cuda":
        return CheckResult(clause.name, clause.title, 0, not_run=f"needs an accelerator; device is {device}")
    if clause.name == "graph_replay_equals_eager" and not backend.features.graph_safe:
        return CheckResult(clause.name, clause.title, 0, not_run="the backend does not declare graph_safe")
    try:
        problem = check(backend, seed, device)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return CheckResult(clause.name, clause.title, 1, (("sequence", problem),) if problem else ())
