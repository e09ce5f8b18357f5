"""The engine suite's random traffic without an engine or a GPU: through the real attention class, with a shadow.

What `tests/engine` sends to a running vLLM is scheduled here by the simplest scheduler that makes batches of the same
kinds: prefill in chunks under a token budget, decode, requests that end or hang up in between, prefixes in common.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from batches import forward, make_batch

from hyv4_kvdequant.ab.report import read_reports
from hyv4_kvdequant.ab.verdict import merge

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from prompts import Request, traffic

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_process")]

BUDGET, MOST_REQUESTS = 32, 6
TOPK = 128  # vLLM converts indices 128 at a time
BATCHES = 16
PREFIX = 64


class Running:
    """A request on its way: tokens computed so far, and tokens it will have."""

    def __init__(self, request: Request) -> None:
        self.prompt, self.computed = len(request.prompt), 0
        ends = request.max_tokens if request.abort_after is None else request.abort_after
        self.last = self.prompt + max(ends, 1)

    def take(self, budget: int) -> int:
        """Tokens of this step: what is left of the prompt, within the budget, or one."""
        return min(max(self.prompt - self.computed, 1), budget)


def schedule(seed: int) -> Iterator[list[tuple[int, int]]]:
    """Batches of (query tokens, context length), decodes first, as vLLM orders them."""
    requests = traffic(seed, longest=300, longest_output=8, prefix=PREFIX)
    running: list[Running] = []
    while True:
        while len(running) < MOST_REQUESTS:
            running.append(Running(next(requests)))
        left, batch = BUDGET, []
        for one in sorted(running, key=lambda one: one.prompt > one.computed):
            if left:
                tokens = one.take(left)
                left -= tokens
                one.computed += tokens
                batch.append((tokens, one.computed))
        running = [one for one in running if one.computed < one.last]
        yield batch


def build(backend: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    monkeypatch.setenv("VLLM_HCU_HYV4_FP8_KV_DEQUANT_BACKEND", backend)
    config = harness.make_config({"hyv4_kvdequant": settings}, max_tokens=BUDGET)
    return harness.build_impl(config, topk=TOPK, sinks=torch.linspace(-1, 1, 8, device=harness.DEVICE))


def test_random_traffic_with_a_shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small batches never win by context; without the plan's fixed cost both plans are taken.
    monkeypatch.setattr("hyv4_kvdequant.plans.choice.CONTEXT_OVERHEAD_BYTES", 0)
    monkeypatch.setattr("hyv4_kvdequant.plans.choice.SEGMENT_OVERHEAD_BYTES", 0)
    shadowed = build("torch", monkeypatch, shadow="triton", report_dir=str(tmp_path))
    alone = build("triton", monkeypatch)
    kinds = set()
    for seed, lens in enumerate(islice(schedule(3), BATCHES)):
        kinds.add((any(query == 1 for query, _ in lens), any(query > 1 for query, _ in lens)))
        batch = make_batch(lens, topk=TOPK, shared_prefix=PREFIX // 64, seed=seed)
        out, lse = forward(shadowed, batch)
        other_out, other_lse = forward(alone, batch)
        assert torch.equal(out, other_out)
        assert torch.equal(lse, other_lse)
    intercept = shadowed._hyv4_kvdequant_layer.intercept
    assert intercept.plans_taken["slot"] > 0
    assert intercept.plans_taken["context"] > 0
    assert kinds >= {(True, True), (False, True)}
    intercept.monitor.close()
    verdict = merge(read_reports(tmp_path))
    assert verdict.ok
    assert verdict.total.calls >= BATCHES
    assert verdict.total.rows_compared > BATCHES * TOPK
