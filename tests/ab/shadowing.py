"""What the A/B tests share: settings, calls, and running one through a shadow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import hyv4_kvdequant as h
from hyv4_kvdequant.ab.monitor import READ_EVERY_S
from hyv4_kvdequant.ab.shadow import Shadow, make_monitor
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.selector import get_backend
from hyv4_kvdequant.testing.cases import make_cache

TOKENS, TOPK = 8, 16


def settings(report_dir: Path | None = None, **fields: Any) -> h.Settings:
    given = {"shadow": "wrong", **fields}
    if report_dir is not None:
        given["report_dir"] = report_dir
    return h.load_settings(given)


def shadow_of(
    given: h.Settings,
    device: str = "cpu",
    primary: str = "torch",
    *,
    rank: int = 0,
    run_id: str | None = None,
    world_size: int = 1,
    read_every_s: float = READ_EVERY_S,
) -> Shadow:
    """The shadow of a backend that get_backend gives anew, so that a fault set just now takes effect."""
    target = h.Target.detect(device, topk=TOPK, block_size=16)
    first = get_backend(primary, target)
    _, shadow = make_monitor(first, given, target, rank, run_id, world_size=world_size, read_every_s=read_every_s)
    assert shadow is not None
    return shadow


def make_call(seed: int = 0, *, width: int = 1, device: str = "cpu", tokens: int = TOKENS) -> h.GatherCall:
    """Random records without odd scales, so that a scale swapped between tiles shows; some entries unfilled."""
    rng = np.random.default_rng(seed)
    cache = make_cache(rng, 16, 16, device=device)
    scales = rng.lognormal(-4, 1, (16, 16, 4)).astype("<f4")
    cache[..., 512:528] = torch.from_numpy(scales.view(np.uint8).copy()).to(device)
    cache[..., :512] = torch.from_numpy(rng.integers(1, 0x70, (16, 16, 512), dtype=np.uint8)).to(device)
    slots = rng.integers(0, 256, (tokens, TOPK))
    slots[:, 1::5] = -1
    slots = torch.from_numpy(slots.astype(np.int32)).to(device)
    kv = torch.empty(slots.numel(), 576, dtype=torch.bfloat16, device=device)
    return h.GatherCall(cache, slots, kv, torch.empty_like(slots), h.FP8_DS_MLA, width)


def observe(shadow: Shadow, call: h.GatherCall, layer: str = "layer.0") -> torch.Tensor | None:
    """What the intercept does: the primary's call, then the shadow's beside it."""
    run_call(shadow.primary, call)
    kv, indices = torch.empty_like(call.compact_kv), torch.empty_like(call.compact_indices)
    return shadow.observe(call, kv, indices, shadow.layer_index(layer))
