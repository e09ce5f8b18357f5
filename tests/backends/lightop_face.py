"""Run by test_lightop.py in a process of its own, beside an installed stand-in.

Takes `face:question,question` arguments, asks each face in a further fresh process (LightOp is resolved once in a
process), and prints one JSON object: face, then question, then answer.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from typer.testing import CliRunner

from hyv4_kvdequant import GatherCall, InvalidCallError, Target, gather_dequantize
from hyv4_kvdequant.cli.app import app
from hyv4_kvdequant.contract import target
from hyv4_kvdequant.reference import sparse_attention
from hyv4_kvdequant.testing import Case, expected_rows, make_case, make_cases, rows_equal, run_checks
from hyv4_kvdequant_lightop import LightOpBackend
from hyv4_kvdequant_lightop.resolve import resolve
from hyv4_kvdequant_torch import TorchBackend

RECORD = 656


def make_backend(device: str = "cpu") -> LightOpBackend:
    """The stand-in runs anywhere, so the target is what an HCU's would be, on the device at hand."""
    target = Target(torch.device(device), "hcu")
    reasons = LightOpBackend.unavailable_reasons(target)
    assert not reasons, reasons
    return LightOpBackend(target)


def is_served(case: Case) -> bool:
    return case.kv_cache.shape[0] == 1 or case.kv_cache.stride(0) % RECORD == 0


def widened(case: Case) -> Case:
    """The same call with each row of slots filled up with -1 to a width that the op takes as it is."""
    num_tokens, topk = case.topk_indices.shape
    slots = case.topk_indices.new_full((num_tokens, max(64, -(-topk // 64) * 64)), -1)
    slots[:, :topk] = case.topk_indices
    return replace(case, name=f"{case.name} widened", topk_indices=slots)


def served_cases(seed: int = 0, device: str = "cpu") -> Iterator[Case]:
    for case in filter(is_served, make_cases(seed, device)):
        yield case
        yield widened(case)


def resolution() -> dict[str, object]:
    """What was found, and what of LightOp was imported for it."""
    found = resolve()
    modules = sorted(name for name in sys.modules if name.split(".")[0] == "lightop")
    features = None if found.reason else asdict(make_backend().features)
    reasons = LightOpBackend.unavailable_reasons(Target(torch.device("cpu"), "hcu"))
    again = resolve() is found
    facts = {"found_in": found.found_in, "version": found.version, "modules": modules, "resolved_once": again}
    return {**facts, "features": features, "reasons": reasons}


def contract() -> dict[str, object]:
    """The contract's clauses on every input that is served, and the names of those that are refused."""
    backend = make_backend()
    results = [
        *run_checks(backend, cases=served_cases()),
        *run_checks(backend, clauses=["availability_is_plain_facts", "calls_do_not_depend_on_earlier_ones"]),
    ]
    failures = [f"{result.clause}: {failure}" for result in results for failure in result.failures]
    refused = {case.name: refusal(backend, case) for case in make_cases() if not is_served(case)}
    return {"failures": failures, "inputs": results[0].cases, "refused": refused}


def verify() -> dict[str, object]:
    """What `hyv4-kvdequant verify lightop` says on a machine that PyTorch takes for an HCU."""
    target._device_facts = lambda device: Target(device, "hcu")
    done = CliRunner().invoke(app, ["verify", "lightop", "--device", "cpu", "--json"])
    report = json.loads(done.stdout)
    refused = {one["case"] for clause in report["clauses"] for one in clause["refused"]}
    broken = [failure for clause in report["clauses"] for failure in clause["failures"]]
    return {"exit_code": done.exit_code, "broken": broken, "refused": sorted(refused)}


def refusal(backend: LightOpBackend, case: Case) -> str:
    try:
        gather(backend, case)
    except InvalidCallError as error:
        return str(error)
    return "not refused"


def gather(backend: LightOpBackend | TorchBackend, case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    width = case.tokens_per_request
    return gather_dequantize(case.kv_cache, case.topk_indices, backend=backend, tokens_per_request=width, **options)


def reuse() -> dict[str, object]:
    """A second layer's records land where the first layer's mapping points, into rows full of NaN."""
    backend, wrong, reused = make_backend(), [], 0
    last_call = importlib.import_module("lightop._ops").last_call
    for first, second in zip(served_cases(0), served_cases(2), strict=True):
        rows, mapping = gather(backend, first)
        layer = replace(second, topk_indices=first.topk_indices)
        rows.fill_(torch.nan)
        gather(backend, layer, compact_kv=rows, compact_indices=mapping, reuse_compact_indices=True)
        reused += last_call["reuse_compact_indices"]
        filled = (layer.topk_indices >= 0) & (layer.topk_indices < layer.num_slots)
        expected = expected_rows(layer.records(layer.topk_indices[filled]), layer.layout)
        got = rows.view(torch.int16)[mapping[filled].long()]
        if not rows_equal(got, expected, layer.layout).all() or (mapping[~filled] != -1).any():
            wrong.append(first.name)
    return {"wrong": wrong, "calls_that_reused": reused}


def attention() -> dict[str, object]:
    """Attention over what the op left, for query rows of one request that share slots."""
    case = widened(make_case("width_4"))
    # Finite records: NaN in the result can then only come from rows that nobody points to.
    case.kv_cache[..., :528] = torch.arange(528).remainder(64).to(torch.uint8)
    case.kv_cache[..., 528:] = torch.ones(64, dtype=torch.bfloat16).view(torch.uint8)
    query = torch.linspace(-1, 1, 12 * 8 * 576).view(12, 8, 576).to(torch.bfloat16)
    rows, mapping = gather(make_backend(), case)
    ours = sparse_attention(query, rows, mapping, 576**-0.5)
    expected = sparse_attention(query, *gather(TorchBackend(Target.detect("cpu")), case), 576**-0.5)
    return {
        "rows_with_nan": int(rows.isnan().any(1).sum()),
        "rows_pointed_to": len(set(mapping[mapping >= 0].tolist())),
        "filled": int((mapping >= 0).sum()),
        "out_is_finite": bool(ours.out.isfinite().all()),
        "equal": torch.equal(ours.out, expected.out) and torch.equal(ours.lse, expected.lse),
    }


def error_of_the_op() -> dict[str, object]:
    """What reaches a caller when the op itself raises."""
    try:
        gather(make_backend(), make_case("random_slots"))
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error)}
    return {"type": None}


def graphs() -> dict[str, object]:
    """On a GPU: captured calls replayed on other contents, also where the capture is the first call of its width."""
    backend, wrong = make_backend("cuda"), []
    pairs = list(zip(served_cases(0, "cuda"), served_cases(3, "cuda"), strict=True))
    # With the first of each width captured before any constant exists, then all of them again after warm calls.
    for warm in (False, True):
        for first, second in pairs:
            if first.topk_indices.numel():
                case = replace(first, kv_cache=_copy(first), topk_indices=first.topk_indices.clone())
                problem = _replay(backend, case, second, warm)
                wrong += [f"{first.name}, {'after' if warm else 'without'} a warm call"] if problem else []
    (streams,) = run_checks(backend, "cuda", clauses=["two_streams_do_not_disturb_each_other"])
    return {"wrong": wrong, "pairs": len(pairs), "streams": [str(failure) for failure in streams.failures]}


def _copy(case: Case) -> torch.Tensor:
    cache = case.kv_cache
    size = (cache.shape[0] - 1) * cache.stride(0) + cache[0].numel()
    return cache.as_strided((size,), (1,)).clone().as_strided(cache.shape, cache.stride())


def _replay(backend: LightOpBackend, case: Case, other: Case, warm: bool) -> bool:
    rows = torch.full((case.topk_indices.numel(), 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    mapping = torch.full_like(case.topk_indices, 7)
    call = GatherCall(case.kv_cache, case.topk_indices, rows, mapping, tokens_per_request=case.tokens_per_request)
    if warm:
        backend.gather_dequant(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.gather_dequant(call)
    case.kv_cache.copy_(other.kv_cache)
    case.topk_indices.copy_(other.topk_indices)
    graph.replay()
    torch.cuda.synchronize()
    filled = (case.topk_indices >= 0) & (case.topk_indices < case.num_slots)
    expected = expected_rows(case.records(case.topk_indices[filled]), case.layout)
    got = rows.view(torch.int16)[mapping[filled].long()].cpu()
    return not rows_equal(got, expected, case.layout).all() or bool((mapping[~filled] != -1).any())


QUESTIONS: dict[str, Callable[[], dict[str, object]]] = {
    function.__name__: function
    for function in (resolution, contract, verify, reuse, attention, error_of_the_op, graphs)
}


def ask(argument: str) -> tuple[str, dict[str, object]]:
    face, questions = argument.split(":")
    os.environ["LIGHTOP_STANDIN_FACE"] = face
    try:
        return face, {name: QUESTIONS[name]() for name in questions.split(",")}
    except Exception:
        return face, {"error": traceback.format_exc()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert not [name for name in sys.modules if name.split(".")[0] == "lightop"]
    # Forked, so that PyTorch is imported once for all faces.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        print(json.dumps(dict(pool.map(ask, sys.argv[1:], chunksize=1))))
