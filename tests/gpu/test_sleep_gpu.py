"""vLLM's sleep mode: what outlives a step does not lie in the pool that is unmapped, so counting and reading go on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import hyv4_kvdequant as h
from hyv4_kvdequant.hosts.intercept import HostFacts, Intercept

pytestmark = pytest.mark.gpu

FACTS = {"topk": 64, "block_size": 64, "max_tokens": 256}


def in_pool(pool: Any, tensor: torch.Tensor) -> bool:
    return any(
        segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]
        for segment in pool.snapshot()
    )


def test_the_counters_of_an_intercept_built_inside_a_pool_lie_outside_it() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        weights = torch.zeros(1000, device=device)
        intercept = Intercept(h.load_settings({"backend": "triton", "shadow": "torch"}), HostFacts(device, **FACTS))
    counter = intercept.lost_counter("layer")
    counter += 3
    intercept.monitor.close()
    assert in_pool(pool, weights)
    assert not in_pool(pool, intercept.monitor.counters)
    assert not in_pool(pool, counter)
    assert intercept.monitor.snapshot()["layer"].lost_entries == 3


# In a process of its own: reading unmapped memory would end every later use of the device in this one.
ASLEEP = """
import sys, time
import torch
import hyv4_kvdequant as h
from vllm.device_allocator.cumem import CuMemAllocator
from hyv4_kvdequant.hosts.intercept import AttentionCall, HostFacts, Intercept
from hyv4_kvdequant.testing.cases import make_cache
import numpy as np

level, device = int(sys.argv[1]), torch.device("cuda", torch.cuda.current_device())
allocator = CuMemAllocator.get_instance()
with allocator.use_memory_pool(tag="weights"):
    settings = h.load_settings({"backend": "triton", "shadow": "torch", "workspace_mb": 64})
    intercept = Intercept(settings, HostFacts(device, topk=64, block_size=64, max_tokens=256))
    intercept.keep_mappings()
    workspace = torch.empty(intercept.workspace_bytes, dtype=torch.uint8, device=device)
cache = make_cache(np.random.default_rng(0), 16, 64, device=device)
query = torch.randn(8, 8, 576, device=device).bfloat16()
slots = torch.randint(0, 1024, (8, 64), dtype=torch.int32, device=device)

def attention(query, kv, indices):
    # What attention would read: every selected row, in the order in which it was selected.
    rows = kv[indices.long()].float()
    return rows.sum(1, keepdim=True).expand(-1, 8, -1)[..., :512].contiguous(), None

def serve(step):
    for layer, shares in (("layer.0", False), ("layer.1", True)):
        call = AttentionCall(query, cache, slots, 1, layer, shares, step)
        out, _ = intercept.attend(call, attention, lambda nbytes: workspace[:nbytes])
    return out

before = serve(object())
intercept.lost_counter("layer.0").add_(2)
torch.cuda.synchronize()
allocator.sleep(offload_tags=("weights",) if level == 1 else ())
for _ in range(20):  # the thread's reads, while the pool is unmapped
    intercept.monitor.tell(finished=False)
    time.sleep(0.01)
torch.cuda.synchronize()
asleep = intercept.monitor.snapshot()["layer.0"]
assert (asleep.calls, asleep.lost_entries) == (1, 2), asleep
allocator.wake_up()
if level == 2:
    workspace.fill_(0xFF)  # contents are lost; what was there is anybody's guess
    intercept._mapping.fill_(-7)
assert torch.equal(serve(object()).nan_to_num(), before.nan_to_num())
intercept.monitor.close()
for layer, lost in (("layer.0", 2), ("layer.1", 0)):
    found = intercept.monitor.snapshot()[layer]
    assert (found.calls, found.rows_compared, found.mismatches, found.lost_entries) == (2, 2 * 8 * 64, 0, lost), found
print("right")
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM's own CuMemAllocator")
@pytest.mark.parametrize("level", [1, 2])
def test_counting_and_attending_survive_vllms_sleep(level: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASLEEP, str(level)], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.stdout.endswith("right\n"), done.stderr
