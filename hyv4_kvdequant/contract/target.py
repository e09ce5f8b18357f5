"""What a backend is asked to serve: a device and the shape of the cache on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from hyv4_kvdequant.contract.layout import FP8_DS_MLA, RecordLayout

# GPU architectures that only Hygon builds. gfx906 is also AMD's MI50, so there the PyTorch build decides.
_HYGON_ARCHS = frozenset({"gfx926", "gfx928", "gfx936", "gfx938"})
_HYGON_BUILD_TAGS = ("das", "dtk")


@dataclass(frozen=True)
class Target:
    """Where a backend would run, as plain facts, so that availability is a pure function of it.

    Attributes:
        device: the PyTorch device, with an index for accelerators.
        platform: `cpu`, `cuda` (NVIDIA), `rocm` (AMD), `hcu` (Hygon), or PyTorch's device type for any other.
        layout: the cache's record.
        arch: `sm_90`, `gfx942` and the like; None on a CPU or where unknown.
        capability: NVIDIA's compute capability as (major, minor); None elsewhere.
        block_size: slots in a cache block; None when not known yet.
        topk: selected slots a query token; None when not known yet.
        packed: whether blocks follow each other without gaps; None when not known yet.
    """

    device: torch.device
    platform: str
    layout: RecordLayout = FP8_DS_MLA
    arch: str | None = None
    capability: tuple[int, int] | None = None
    block_size: int | None = None
    topk: int | None = None
    packed: bool | None = None

    @classmethod
    def detect(
        cls,
        device: torch.device | str = "cpu",
        layout: RecordLayout = FP8_DS_MLA,
        *,
        block_size: int | None = None,
        topk: int | None = None,
        packed: bool | None = None,
    ) -> Target:
        """Reads the facts of `device`; initialises an accelerator's runtime, never launches anything.

        Raises:
            RuntimeError: PyTorch cannot see the device.
        """
        facts = _device_facts(_with_index(torch.device(device)))
        return replace(facts, layout=layout, block_size=block_size, topk=topk, packed=packed)


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@cache
def _device_facts(device: torch.device) -> Target:
    if device.type != "cuda":
        return Target(device=device, platform=device.type)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is None:
        capability = (properties.major, properties.minor)
        return Target(device, "cuda", arch=f"sm_{capability[0]}{capability[1]}", capability=capability)
    arch = properties.gcnArchName.split(":")[0]
    return Target(device, "hcu" if _is_hygon(arch) else "rocm", arch=arch)


def _is_hygon(arch: str) -> bool:
    build = torch.__version__.partition("+")[2]
    return arch in _HYGON_ARCHS or any(tag in build for tag in _HYGON_BUILD_TAGS)
