"""Timing one function on a CPU, on a GPU eagerly, and on a GPU in a graph, always with cold caches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from hyv4_kvdequant.defaults import BENCH_RUNS

RUNS = BENCH_RUNS
SECONDS = 3.0
_FEWEST_RUNS = 5
_WARM_UPS = 3
_HEAD_START = 2  # the device is kept busy for twice as long as the host needs to queue a call
_CPU_CACHE_BYTES = 2**26


class Timing(NamedTuple):
    """Times of single runs in microseconds: the median, the 10th and the 90th percentile."""

    median_us: float
    p10_us: float
    p90_us: float
    runs: int


class ColdCache:
    """Fills the device's last-level cache with other data by reading it.

    Reading, not writing: lines that were written would have to be stored first in the run that is timed.
    """

    def __init__(self, device: torch.device) -> None:
        size = 4 * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else _CPU_CACHE_BYTES
        self._other_data = torch.ones(max(size, _CPU_CACHE_BYTES) // 4, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        self._other_data.sum()


def time_eager(function: Callable[[], object], device: torch.device, runs: int = RUNS) -> Timing:
    """Times calls that find an idle device: on a GPU, the launch from Python is part of the time.

    Stops early, after at least 5 runs, once the runs took 3 seconds.
    """
    return _repeat(single_runs(function, device, graph=False), runs)


def time_graph(function: Callable[[], object], device: torch.device, runs: int = RUNS) -> Timing:
    """Records the function once in a CUDA or HIP graph and times replays; see `time_eager` for `runs`."""
    run = single_runs(function, device, graph=True)
    for _ in range(_WARM_UPS):
        run()
    return _repeat(run, runs)


def time_once(function: Callable[[], object], device: torch.device) -> Timing:
    """Times one call by the host's clock, until the device is done."""

    def run() -> None:
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    only = _once_on_cpu(run)
    return Timing(only, only, only, 1)


def time_queued(function: Callable[[], object], device: torch.device, runs: int = RUNS) -> Timing:
    """Times what a GPU spends on calls whose launches are already queued, as in a host that runs ahead of it.

    For work that is not captured in a graph. On a CPU it is `time_eager`; see there for `runs`.
    """
    if device.type != "cuda":
        return time_eager(function, device, runs)
    cold = ColdCache(device)
    for _ in range(_WARM_UPS):
        host_us = _host_us(function)
    repeats = math.ceil(_HEAD_START * host_us / _between_events(cold))

    def run() -> float:
        for _ in range(repeats):
            cold()
        return _between_events(function)

    return _repeat(run, runs)


def _host_us(function: Callable[[], object]) -> float:
    """How long the host is busy with a call on an idle device."""
    torch.cuda.synchronize()
    host_us = _once_on_cpu(function)
    torch.cuda.synchronize()
    return host_us


def _once_on_cpu(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e6


def _once_on_gpu(function: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    return _between_events(function)


def _between_events(function: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _repeat(run: Callable[[], float], runs: int) -> Timing:
    times: list[float] = []
    deadline = time.perf_counter() + SECONDS
    while len(times) < runs and (len(times) < _FEWEST_RUNS or time.perf_counter() < deadline):
        times.append(run())
    times.sort()
    last = len(times) - 1
    return Timing(times[round(0.5 * last)], times[round(0.1 * last)], times[round(0.9 * last)], len(times))


def single_runs(function: Callable[[], object], device: torch.device, *, graph: bool) -> Callable[[], float]:
    """A function that runs `function` once with cold caches and returns microseconds, to be interleaved with others."""
    cold = ColdCache(device)
    for _ in range(_WARM_UPS):
        function()
    once: Callable[[], float]
    if graph:
        torch.cuda.synchronize(device)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            function()
        once = partial(_between_events, recorded.replay)
    else:
        once = partial(_once_on_gpu if device.type == "cuda" else _once_on_cpu, function)

    def run() -> float:
        cold()  # on a GPU also keeps the device busy while a replay is enqueued
        return once()

    return run
