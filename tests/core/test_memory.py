"""Memory outside a host's pools, on a CPU: what is tied to the thread, as `torch.cuda.use_mem_pool` is, is not in force
while it is taken. `tests/gpu/test_sleep_gpu.py` has the pools themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hyv4_kvdequant.ab.monitor import Monitor
from hyv4_kvdequant.hosts.intercept import HostFacts, Intercept
from hyv4_kvdequant.memory import outside_memory_pools
from hyv4_kvdequant.settings import load_settings

CUDA = torch.device("cuda", 3)


class Driver:
    """PyTorch's CUDA as far as it is asked here: a current device and a pool, each the thread's own."""

    def __init__(self) -> None:
        self.thread = threading.local()
        self.synchronized: list[torch.device] = []

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.thread.device = device
        yield
        del self.thread.device

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: self.synchronized.append(device))

    def place(self) -> tuple[torch.device | None, bool]:
        """The current device, and whether memory would come from the pool."""
        return getattr(self.thread, "device", None), getattr(self.thread, "in_pool", False)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "device", driver.device)
    monkeypatch.setattr(torch.cuda, "current_stream", driver.current_stream)
    driver.thread.in_pool = True  # as in vLLM while it loads a model under sleep mode
    return driver


def test_memory_is_taken_outside_the_callers_pool_on_the_right_device(driver: Driver) -> None:
    assert driver.place() == (None, True)
    assert outside_memory_pools(CUDA, driver.place) == (CUDA, False)
    assert driver.synchronized == [CUDA], "what was filled on the other thread's stream has arrived"
    assert driver.place() == (None, True)


def test_what_is_raised_arrives_and_no_thread_is_left(driver: Driver) -> None:
    before = threading.active_count()

    def fails() -> None:
        raise LookupError("no such backend")

    with pytest.raises(LookupError, match="no such backend"):
        outside_memory_pools(CUDA, fails)
    assert threading.active_count() == before


def test_a_cpu_has_no_pools_and_needs_no_thread() -> None:
    assert outside_memory_pools(torch.device("cpu"), threading.current_thread) is threading.current_thread()


def test_counters_and_backends_are_made_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def note(_device: torch.device, make: object) -> object:
        made.append(make())  # type: ignore[operator]
        return made[-1]

    for module in ("hosts.intercept", "ab.monitor", "ab.shadow"):
        monkeypatch.setattr(f"hyv4_kvdequant.{module}.outside_memory_pools", note)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    given = load_settings({"backend": "torch", "shadow": "triton"})
    intercept = Intercept(given, HostFacts(torch.device("cpu"), topk=16, block_size=64, max_tokens=8))
    intercept.monitor.close()
    assert isinstance(intercept.monitor, Monitor)
    assert intercept.shadow is not None
    expected = [intercept.backend, intercept.shadow.backend, intercept.monitor.counters]
    assert [id(one) for one in made] == [id(one) for one in expected]
