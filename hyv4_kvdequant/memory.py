"""Device memory that has to outlive what a host does with its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_Made = TypeVar("_Made")


def outside_memory_pools(device: torch.device, make: Callable[[], _Made]) -> _Made:
    """What `make` returns, with the device memory it allocates taken from PyTorch's ordinary pool.

    A host may build its layers inside `torch.cuda.use_mem_pool`, and later take that pool's memory away: vLLM's sleep
    mode unmaps it, and at level 2 loses its contents. `use_mem_pool` holds for the thread that entered it alone, so
    `make` runs in another one, with `device` as its current device, and has arrived on the device when this returns.

    Raises:
        Whatever `make` raises.
    """
    if device.type != "cuda":
        return make()

    def run() -> _Made:
        with torch.cuda.device(device):
            made = make()
            # Its stream is not the caller's: what was filled there is to be seen everywhere.
            torch.cuda.current_stream(device).synchronize()
            return made

    with ThreadPoolExecutor(1, thread_name_prefix="hyv4-kvdequant-memory") as executor:
        return executor.submit(run).result()
