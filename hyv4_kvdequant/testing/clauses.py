"""The contract's clauses as functions. The first line of each docstring is the clause as `verify` prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from hyv4_kvdequant.contract import GatherCall, GatherDequantBackend, InvalidCallError, Target
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.testing.cases import Case, Inputs, make_case, make_cases, make_large_cases, width_1
from hyv4_kvdequant.testing.oracle import expected_rows, rows_equal
from hyv4_kvdequant.testing.outcome import Buffers, Outcome, run_case

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


OutcomeCheck = Callable[[Outcome], "str | None"]
OUTCOME_CLAUSES: tuple[OutcomeCheck, ...] = (
    filled_rows_are_exact,
    unfilled_index_is_minus_one,
    width_1_mapping_is_identity,
    width_1_unfilled_rows_are_zero,
    outputs_stay_in_bounds,
    inputs_are_untouched,
)


# --- clauses over several calls, or over none: None when it holds ---


class Broken(NamedTuple):
    """How a clause over several calls does not hold, and the input of the call that showed it."""

    problem: str
    case: Case | None = None


def _first_problem(outcome: Outcome, when: str) -> Broken | None:
    for clause in OUTCOME_CLAUSES:
        problem = clause(outcome)
        if problem:
            return Broken(f"case {outcome.case.name}, {when}: {problem}", outcome.case)
    return None


def _first_broken(backend: GatherDequantBackend, cases: Iterator[Case], when: str) -> Broken | None:
    problems = (_first_problem(run_case(backend, case), when) for case in cases)
    return next((problem for problem in problems if problem), None)


def availability_is_plain_facts(backend: GatherDequantBackend, target: Target, seed: int) -> Broken | None:
    """unavailable_reasons answers with a list of sentences for any target, and an unknown fact is no reason."""
    known = replace(target, block_size=64, topk=2048, packed=True)
    unknown = replace(target, arch=None, capability=None, block_size=None, topk=None, packed=None)
    foreign = Target(torch.device("meta"), "another platform")
    other_record = replace(target.layout, name="another record", row_bytes=target.layout.row_bytes + 128)
    for asked in (target, known, unknown, foreign, replace(target, layout=other_record)):
        try:
            reasons = type(backend).unavailable_reasons(asked)
        except Exception as error:
            return Broken(f"it raised {type(error).__name__}: {error} for {asked}")
        if not isinstance(reasons, list) or not all(isinstance(one, str) and one.strip() for one in reasons):
            return Broken(f"it returned {reasons!r} for {asked}; expected a list of sentences")
    guessed = type(backend).unavailable_reasons(unknown)
    if guessed and not type(backend).unavailable_reasons(target):
        return Broken(f"{target} is served, but with its facts unknown it is not: {guessed}")
    return None


def calls_do_not_depend_on_earlier_ones(backend: GatherDequantBackend, target: Target, seed: int) -> Broken | None:
    """A call gives the same whatever ran before it with this instance: other shapes, other contents, old outputs."""
    names = ("random_slots", "width_4", "one_filled", "gaps_between_blocks", "topk_1")
    # Each case after itself with other contents, and then once more after all others.
    order = [(name, contents) for name in names for contents in (seed, seed + 1)] + [(name, seed) for name in names]
    cases = (make_case(name, contents, target.device, target.layout) for name, contents in order)
    return _first_broken(backend, cases, "after other calls")


def _first_broken_pair(
    hold: Callable[[GatherDequantBackend, Case, Case], Broken | None],
    backend: GatherDequantBackend,
    target: Target,
    seeds: tuple[int, int],
) -> Broken | None:
    """Tries each of the kit's inputs with two contents."""
    firsts, seconds = (make_cases(seed, target.device, target.layout) for seed in seeds)
    for first, second in zip(firsts, seconds, strict=True):
        broken = hold(backend, first, second)
        if broken:
            return broken
    return None


def _refuses(backend: GatherDequantBackend, call: GatherCall) -> bool:
    """Runs a call; whether the backend refuses it, which is another clause's matter."""
    try:
        run_call(backend, call)
    except InvalidCallError:
        return True
    return False


def reused_mapping_serves_new_contents(backend: GatherDequantBackend, target: Target, seed: int) -> Broken | None:
    """With reuse_compact_indices, a second layer's records land where the first layer's mapping points."""
    return _first_broken_pair(_second_layer, backend, target, (seed, seed + 2))


def _second_layer(backend: GatherDequantBackend, first: Case, second: Case) -> Broken | None:
    buffers = Buffers(first)
    if _refuses(backend, buffers.call(first)):
        return None
    run_case(backend, second)  # a call with another mapping comes between the two layers
    buffers.poison_rows()
    layer = replace(second, topk_indices=first.topk_indices)
    run_call(backend, buffers.call(layer, reuse=True))
    return _first_problem(buffers.outcome(layer), "second layer")


def offsets_past_2_gib(backend: GatherDequantBackend, target: Target, seed: int) -> Broken | None:
    """Slots whose byte offset passes 2**31 are read where they are."""
    cases = (
        variant for case in make_large_cases(seed, target.device, target.layout) for variant in (width_1(case), case)
    )
    return _first_broken(backend, cases, "a large cache")


def outputs_past_4_gib(backend: GatherDequantBackend, target: Target, seed: int) -> Broken | None:
    """Rows whose offset in compact_kv passes 2**31 elements are written where they belong."""
    topk = 2048
    num_tokens = 2**31 // (topk * target.layout.row_dim) + 2
    make = Inputs(np.random.default_rng(seed), target.device, target.layout, "outputs_past_4_gib")
    case = make.case(make.cache(8, 64), make.draw(512, (num_tokens, topk)))
    buffers = Buffers(case)
    call = buffers.call(case)
    run_call(backend, call)
    for token in (0, num_tokens // 2, num_tokens - 2, num_tokens - 1):
        part = slice(token, token + 1)
        rows = call.compact_kv[token * topk : (token + 1) * topk].view(torch.int16).cpu()
        indices = call.compact_indices[part].cpu()
        window = replace(case, topk_indices=case.topk_indices[part])
        local = torch.where(indices >= 0, indices - token * topk, indices)
        outcome = Outcome(window, rows, local, window.topk_indices.cpu(), guards_intact=True, inputs_intact=True)
        broken = _first_problem(outcome, f"query token {token} of {num_tokens}")
        if broken:
            return broken
    return None


def graph_replay_equals_eager(backend: GatherDequantBackend, target: Target, seed: int) -> Broken | None:
    """A captured call, replayed on other slots and records, gives what an eager call would."""
    return _first_broken_pair(_replay, backend, target, (seed, seed + 3))


def _replay(backend: GatherDequantBackend, first: Case, second: Case) -> Broken | None:
    if first.topk_indices.numel() == 0:
        return None
    device = first.kv_cache.device
    buffers = Buffers(first)
    call = buffers.call(first)
    if _refuses(backend, call):  # what compiles or allocates once does so in this call, before the capture
        return None
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_call(backend, call)
    first.kv_cache.copy_(second.kv_cache)
    first.topk_indices.copy_(second.topk_indices)
    buffers.poison_rows()
    buffers.poison_indices()
    graph.replay()
    torch.cuda.synchronize(device)
    return _first_problem(buffers.outcome(first), "replayed")


def two_streams_do_not_disturb_each_other(backend: GatherDequantBackend, target: Target, seed: int) -> Broken | None:
    """Calls that run at the same time on two streams, with different buffers, are each right and each in order."""
    device = target.device
    slots, calls = [], []
    for turn in range(8):
        make = Inputs(np.random.default_rng([seed, turn]), device, target.layout, "concurrent_calls")
        case = make.case(make.cache(64, 64), make.draw(4096, (16, 256)))
        slots.append(case.topk_indices.clone())
        calls.append((case, Buffers(case)))
    run_call(backend, calls[0][1].call(calls[0][0]))  # what compiles once does so before
    calls[0][1].poison_rows()
    for case, _ in calls:
        case.topk_indices.zero_()
    busy, *streams = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    # Both streams wait until all their calls are queued, so that these then run side by side.
    with torch.cuda.stream(busy):
        _keep_busy(device)
    for stream in streams:
        stream.wait_stream(busy)
    for turn, (case, buffers) in enumerate(calls):
        with torch.cuda.stream(streams[turn % 2]):
            # The slots are written on the same stream just before, as an indexer does.
            case.topk_indices.copy_(slots[turn])
            run_call(backend, buffers.call(case))
    torch.cuda.synchronize(device)
    outcomes = (buffers.outcome(case) for case, buffers in calls)
    problems = (_first_problem(outcome, "on two streams") for outcome in outcomes)
    return next((problem for problem in problems if problem), None)


def _keep_busy(device: torch.device) -> None:
    """Queues work for about a tenth of a second or more on the current stream."""
    factor = torch.zeros(4096, 4096, device=device)
    for _ in range(50):
        factor = factor @ factor


SequenceCheck = Callable[[GatherDequantBackend, Target, int], "Broken | None"]
SEQUENCE_CLAUSES: tuple[SequenceCheck, ...] = (
    availability_is_plain_facts,
    calls_do_not_depend_on_earlier_ones,
    reused_mapping_serves_new_contents,
    offsets_past_2_gib,
    outputs_past_4_gib,
    graph_replay_equals_eager,
    two_streams_do_not_disturb_each_other,
)
_NEEDS_ACCELERATOR = (outputs_past_4_gib, graph_replay_equals_eager, two_streams_do_not_disturb_each_other)


def why_not_run(check: SequenceCheck, backend: GatherDequantBackend, device: torch.device) -> str | None:
    """Why a clause over several calls does not apply here, or None when it does."""
    if check in _NEEDS_ACCELERATOR and device.type != "cuda":
        return f"needs an accelerator; the device is {device}"
    if check is graph_replay_equals_eager and not backend.features.graph_safe:
        return "the backend does not declare graph_safe"
    if check is reused_mapping_serves_new_contents and not backend.features.mapping_reuse:
        return "the backend does not declare mapping_reuse"
    return None
