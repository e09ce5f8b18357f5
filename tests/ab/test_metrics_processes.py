"""Metrics across processes, as between vLLM's workers and its API server: what `docs/ab.md` says holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

WORKER = """
import sys
from hyv4_kvdequant.ab.counters import LayerCounters
from hyv4_kvdequant.ab.metrics import Metrics
metrics = Metrics("torch", "wrong", int(sys.argv[1]))
for calls in (3, 5):
    metrics.update({"layer.0": LayerCounters(calls=calls, rows_differ=calls, largest_ulp=2, lost_entries=calls)})
"""


@pytest.mark.parametrize("shared", [True, False])
def test_workers_reach_the_api_server_where_the_folder_is_set(shared: bool, tmp_path: Path) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if shared else None
    for rank in ("0", "1"):
        subprocess.run([sys.executable, "-c", WORKER, rank], env=env, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    shown = generate_latest(registry).decode()
    for rank in (0, 1):
        labels = f'{{backend="wrong",layer="layer.0",rank="{rank}",role="shadow"}}'
        assert (f"hyv4_kvdequant_shadow_calls_total{labels} 5.0" in shown) is shared
        assert (f"hyv4_kvdequant_shadow_largest_ulp{labels} 2.0" in shown) is shared
        lost = f'hyv4_kvdequant_lost_entries_total{{backend="torch",layer="layer.0",rank="{rank}"}} 5.0'
        assert (lost in shown) is shared
