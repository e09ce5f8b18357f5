"""The `torch` backend: plain PyTorch on any device, and the reference that the other backends are held to."""

from __future__ import annotations

import torch

from hyv4_kvdequant.contract import Features, GatherCall, GatherDequantBackend, Target

# Rows handled at a time: bounds the temporaries (about 6 KB a row) without a data-dependent shape.
ROWS_PER_PASS = 16384


class TorchBackend(GatherDequantBackend):
    """Gathers with advanced indexing and dequantizes in fp32, one bounded pass of rows after another."""

    api_version = 1
    name = "torch"
    features = Features(request_dedup=False, mapping_reuse=False, graph_safe=True)

    @classmethod
    def unavailable_reasons(cls, target: Target) -> list[str]:
        layout = target.layout
        expected = (torch.float8_e4m3fn, torch.float32, torch.bfloat16)
        if (layout.nope_dtype, layout.scale_dtype, layout.rope_dtype) != expected:
            return [
                f"record layout {layout.name!r} is not e4m3fn values with fp32 scales and bf16 RoPE, "
                "the only kind this backend reads"
            ]
        return []

    def gather_dequant(self, call: GatherCall) -> None:
        slots = call.topk_indices.view(-1)
        filled = (slots >= 0) & (slots < call.num_slots)
        rows = torch.arange(slots.numel(), dtype=torch.int32, device=slots.device)
        call.compact_indices.view(-1).copy_(torch.where(filled, rows, -1))
        for start in range(0, slots.numel(), ROWS_PER_PASS):
            part = slice(start, start + ROWS_PER_PASS)
            _dequantize_rows(call, slots[part], filled[part], call.compact_kv[part])


def _dequantize_rows(call: GatherCall, slots: torch.Tensor, filled: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes the dequantized records of `slots` (n,) into `rows` (n, row_dim); zero bits where not `filled` (n,)."""
    layout = call.layout
    # An unfilled entry reads slot 0 instead of its own number, and what it read is discarded below.
    readable = torch.where(filled, slots, 0).long()
    records = call.kv_cache[readable // call.block_size, readable % call.block_size]

    nope = _field(records, layout.nope_offset, layout.nope_dim, layout.nope_dtype).float()
    scale = _field(records, layout.scale_offset, layout.num_tiles, layout.scale_dtype)
    product = nope.view(-1, layout.num_tiles, layout.tile_dim) * scale.unsqueeze(-1)
    nope_bf16 = product.view(-1, layout.nope_dim).to(torch.bfloat16)

    # RoPE moves as integers, so that no NaN payload can change on the way.
    rope_bits = _field(records, layout.rope_offset, layout.rope_dim, torch.int16)
    bits = torch.cat([nope_bf16.view(torch.int16), rope_bits], dim=1)
    rows.view(torch.int16).copy_(torch.where(filled.unsqueeze(1), bits, 0))


def _field(records: torch.Tensor, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The `count` values of `dtype` at byte `offset` of every record (n, row_bytes): (n, count)."""
    return records[:, offset : offset + count * dtype.itemsize].view(dtype)
