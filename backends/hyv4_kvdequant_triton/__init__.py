"""The `triton` backend: one kernel for NVIDIA and AMD GPUs, and for a CPU in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hyv4_kvdequant.contract import Features, GatherCall, GatherDequantBackend, RecordLayout, Target

if TYPE_CHECKING:
    from types import ModuleType

OLDEST_CAPABILITY = (8, 0)


class TritonBackend(GatherDequantBackend):
    """Gathers, dequantizes, zero-fills and remaps in one launch. Triton is imported when it is first asked about."""

    api_version = 1
    name = "triton"
    features = Features(request_dedup=True, mapping_reuse=True, graph_safe=True)

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._launch = _launcher().Launcher(target)
        self.features = replace(self.features, request_dedup=self._launch.can_dedup)

    @classmethod
    def unavailable_reasons(cls, target: Target) -> list[str]:
        return [*_device_reasons(target), *_layout_reasons(target.layout)]

    def gather_dequant(self, call: GatherCall) -> None:
        self._launch(call)


def _launcher() -> ModuleType:
    from hyv4_kvdequant_triton import launcher

    return launcher


def _device_reasons(target: Target) -> list[str]:
    try:
        interpreted = _launcher().INTERPRETED
    except Exception as error:
        return [f"Triton cannot be imported ({type(error).__name__}: {error})."]
    on_gpu = target.device.type == "cuda"
    if interpreted:
        inside = "Triton's interpreter is on (TRITON_INTERPRET=1) and serves CPU tensors alone"
        return [f"{inside}; unset it to use {target.device}."] if target.device.type != "cpu" else []
    if not on_gpu:
        return [
            f"Triton compiles for NVIDIA and AMD GPUs and {target.device} is none; "
            "set TRITON_INTERPRET=1 before Python starts to run its interpreter on a CPU."
        ]
    if target.capability is not None and target.capability < OLDEST_CAPABILITY:
        major, minor = target.capability
        return [f"{target.device} has compute capability {major}.{minor}; bf16 needs 8.0 or newer."]
    return []


def _layout_reasons(layout: RecordLayout) -> list[str]:
    reasons = []
    expected = (torch.float8_e4m3fn, torch.float32, torch.bfloat16)
    if (layout.nope_dtype, layout.scale_dtype, layout.rope_dtype) != expected:
        reasons.append(
            f"Record layout {layout.name!r} is not e4m3fn values with fp32 scales and bf16 RoPE, "
            "the only kind this backend reads."
        )
    for part in ("nope_dim", "rope_dim", "tile_dim"):
        size = getattr(layout, part)
        if size & (size - 1):
            reasons.append(f"Record layout {layout.name!r} has {part} {size}; the kernel needs a power of two.")
    return reasons
