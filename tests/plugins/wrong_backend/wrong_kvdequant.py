"""Two backends for tests of A/B, on the public interface: one deliberately wrong, one that deduplicates."""

from __future__ import annotations

import os

import torch

from hyv4_kvdequant import Features, GatherCall, GatherDequantBackend, Target, load_backend

FAULTS = ("element", "scale_tile", "rope", "index", "slots_above", "width_4", "raises")
ROW, ELEMENT = 3, 7  # where a single element is off
ABOVE = 100


class WrongBackend(GatherDequantBackend):
    """The `torch` backend with one fault, named by WRONG_BACKEND_FAULT; without one it is right."""

    api_version = 1
    name = "wrong"
    features = Features(request_dedup=True, graph_safe=True)

    @classmethod
    def unavailable_reasons(cls, target: Target) -> list[str]:
        return []

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.right = load_backend("torch")(target)
        self.fault = os.environ.get("WRONG_BACKEND_FAULT", "")

    def gather_dequant(self, call: GatherCall) -> None:
        self.right.gather_dequant(call)
        bits = call.compact_kv.view(torch.int16)
        slots = call.topk_indices.view(-1)
        filled = (slots >= 0) & (slots < call.num_slots)
        rope = bits[:, call.layout.nope_dim :]
        if self.fault == "element":
            bits[ROW, ELEMENT] += 1
        elif self.fault == "scale_tile":
            self._swap_scale(call, slots, filled)
        elif self.fault == "rope":
            rope.copy_(rope.roll(1, dims=1))
        elif self.fault == "index":
            call.compact_indices.clamp_(min=0)
        elif self.fault == "slots_above":
            bits[:, ELEMENT] += (filled & (slots > ABOVE)).short()
        elif self.fault == "width_4" and call.tokens_per_request == 4:
            bits[ROW, ELEMENT] += 1
        elif self.fault == "raises":
            raise RuntimeError("no kernel image is available for execution on the device")

    @staticmethod
    def _swap_scale(call: GatherCall, slots: torch.Tensor, filled: torch.Tensor) -> None:
        """Tile 1 comes with the scale of tile 2."""
        readable = torch.where(filled, slots, 0).long()
        records = call.kv_cache[readable // call.block_size, readable % call.block_size]
        scale = records[:, 520:524].view(torch.float32)
        tile = (records[:, 128:256].view(torch.float8_e4m3fn).float() * scale).to(torch.bfloat16)
        call.compact_kv[:, 128:256] = torch.where(filled.unsqueeze(1), tile, 0)


class DedupBackend(GatherDequantBackend):
    """Right, and stores a slot once a request: duplicates point to its first entry, the other rows are full of NaN."""

    api_version = 1
    name = "dedup"
    features = Features(request_dedup=True, graph_safe=True)

    @classmethod
    def unavailable_reasons(cls, target: Target) -> list[str]:
        return []

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.right = load_backend("torch")(target)

    def gather_dequant(self, call: GatherCall) -> None:
        self.right.gather_dequant(call)
        width = call.tokens_per_request
        if width == 1:
            return
        slots = call.topk_indices.view(-1, width * call.topk)
        entries = torch.arange(slots.shape[1], device=slots.device)
        same = slots.unsqueeze(1) == slots.unsqueeze(2)
        first = torch.where(same, entries, slots.shape[1]).amin(-1)
        base = torch.arange(slots.shape[0], device=slots.device).unsqueeze(1) * slots.shape[1]
        filled = (slots >= 0) & (slots < call.num_slots)
        call.compact_indices.copy_(torch.where(filled, base + first, -1).view(call.compact_indices.shape))
        kept = (filled & (first == entries)).view(-1, 1)
        bits = call.compact_kv.view(torch.int16)
        bits.copy_(torch.where(kept, bits, 0x7FC0))
