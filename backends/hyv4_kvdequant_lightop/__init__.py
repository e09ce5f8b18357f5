"""The `lightop` backend: Hygon's fused gather + dequantize op on HCU. `docs/backends/lightop.md` has the decisions.

Written against what public callers of LightOp show, and held to that by a stand-in; LightOp itself is on no package
index. Importing this module imports nothing of LightOp.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hyv4_kvdequant.contract import (
    FP8_DS_MLA,
    BackendUnavailableError,
    Features,
    GatherCall,
    GatherDequantBackend,
    InvalidCallError,
    Target,
)
from hyv4_kvdequant_lightop.resolve import resolve

# The op has been seen in use with rows of slots whose width is a multiple of this.
WIDTH_STEP = 64
# Tokens that a constant of valid lengths serves (64 KiB); a call of more tokens fills its own.
LENGTHS_AHEAD = 16384
_INT32_MAX = 2**31 - 1


class LightOpBackend(GatherDequantBackend):
    """Calls `decode_gather_and_up_convert_with_indices` with arguments of exactly the form it expects."""

    api_version = 1
    name = "lightop"
    # An instance knows whether its op takes a mapping to reuse.
    features = Features(request_dedup=True, mapping_reuse=False, graph_safe=True)

    @classmethod
    def unavailable_reasons(cls, target: Target) -> list[str]:
        reasons = []
        if target.platform != "hcu":
            reasons.append(
                f"LightOp runs on a Hygon HCU and {target.device} is not one (platform {target.platform!r}). "
                "Use triton on an NVIDIA or AMD GPU and torch on a CPU."
            )
        if target.layout != FP8_DS_MLA:
            reasons.append(
                f"LightOp's op reads the record {FP8_DS_MLA.name} of {FP8_DS_MLA.row_bytes} bytes, not "
                f"{target.layout.name!r} of {target.layout.row_bytes}. Use a backend that serves this record."
            )
        reason = resolve().reason
        return [*reasons, reason] if reason else reasons

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        found = resolve()
        if found.op is None:
            raise BackendUnavailableError(f"Backend lightop: {found.reason}", [found.reason or ""])
        self._op = found.op
        self._accepts_reuse = found.accepts_reuse
        self.features = replace(type(self).features, mapping_reuse=found.accepts_reuse)
        if target.topk and target.topk % WIDTH_STEP == 0:
            _valid_lengths(target.device, 1, target.topk)

    def gather_dequant(self, call: GatherCall) -> None:
        if call.layout != FP8_DS_MLA:
            raise InvalidCallError(f"layout is {call.layout.name!r}; LightOp reads {FP8_DS_MLA.name} only.")
        records_apart = _records_apart(call)
        cache, slots = _flat_cache(call, records_apart), _readable_slots(call, records_apart)
        if call.topk % WIDTH_STEP == 0:
            self._run(
                cache,
                slots,
                call.compact_kv,
                call.compact_indices,
                tokens_per_request=call.tokens_per_request,
                reuse=call.reuse_compact_indices,
            )
        else:
            self._run_rewrapped(cache, slots.view(-1), call.compact_kv, call.compact_indices.view(-1))

    def _run(
        self,
        cache: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        indices: torch.Tensor,
        *,
        tokens_per_request: int = 1,
        reuse: bool = False,
    ) -> None:
        """The op itself.

        Args:
            cache: (num_records, row_bytes) uint8, contiguous.
            slots: (num_tokens, width) int32, -1 or in [0, num_records); width a multiple of `WIDTH_STEP`.
            rows: (num_tokens * width, row_dim) bf16, written.
            indices: (num_tokens, width) int32, written, or read where `reuse`.
        """
        num_tokens, width = slots.shape
        lengths = _valid_lengths(slots.device, num_tokens, width)
        out = rows.view(num_tokens, width, -1)
        # No exception is caught here: a TypeError is the op's own, since its signature was looked at before.
        if self._accepts_reuse:
            self._op(cache, slots, out, lengths, indices, tokens_per_request, reuse_compact_indices=reuse)
        else:
            self._op(cache, slots, out, lengths, indices, tokens_per_request)

    def _run_rewrapped(
        self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor
    ) -> None:
        """Serves any topk, as rows of `WIDTH_STEP` entries; `slots` and `indices` are flat, (num_tokens * topk,).

        With request width 1 an entry's row is its flat position, so it does not matter how entries are wrapped into
        rows. The entries that fill no whole row go through a padded one of their own.
        """
        whole = slots.numel() // WIDTH_STEP * WIDTH_STEP
        if whole:
            wrapped = (-1, WIDTH_STEP)
            self._run(cache, slots[:whole].view(wrapped), rows[:whole], indices[:whole].view(wrapped))
        rest = slots.numel() - whole
        if rest:
            last_slots = slots.new_full((1, WIDTH_STEP), -1)
            last_slots[0, :rest].copy_(slots[whole:])
            last_rows = rows.new_empty((WIDTH_STEP, rows.shape[1]))
            last_indices = torch.empty_like(last_slots)
            self._run(cache, last_slots, last_rows, last_indices)
            rows[whole:].copy_(last_rows[:rest])
            filled = last_indices[0, :rest]
            indices[whole:].copy_(torch.where(filled >= 0, filled + whole, -1))


def _records_apart(call: GatherCall) -> int:
    """How many records the start of a block is from the start of the next.

    Raises:
        InvalidCallError: not a whole number, or more records than an int32 slot can number.
    """
    num_blocks, block_size, row_bytes = call.kv_cache.shape
    stride = call.kv_cache.stride(0) if num_blocks > 1 else block_size * row_bytes
    apart, odd_bytes = divmod(stride, row_bytes)
    if odd_bytes:
        raise InvalidCallError(
            f"kv_cache is of stride(0) {stride}; LightOp reads a flat cache of records and can step over gaps between "
            f"blocks only where stride(0) is a multiple of row_bytes {row_bytes}. The cache is never copied; use the "
            "triton backend for this layout."
        )
    if (num_blocks - 1) * apart + block_size > _INT32_MAX:
        raise InvalidCallError(
            f"kv_cache spans {(num_blocks - 1) * apart + block_size} records; LightOp's slots are int32 and number at "
            f"most {_INT32_MAX}. Use the triton backend for this cache."
        )
    return apart


def _flat_cache(call: GatherCall, records_apart: int) -> torch.Tensor:
    """The memory from the first block to the last as (num_records, row_bytes) uint8, gaps included; a view."""
    num_blocks, block_size, row_bytes = call.kv_cache.shape
    num_records = (num_blocks - 1) * records_apart + block_size
    return call.kv_cache.as_strided((num_records, row_bytes), (row_bytes, 1))


def _readable_slots(call: GatherCall, records_apart: int) -> torch.Tensor:
    """The selected slots as the op may read them, (num_tokens, topk) int32: every unfilled entry is exactly -1.

    The op is not known to check the upper bound, nor negative numbers other than -1. Three small kernels on the current
    stream see to both. The memory is the call's own: a buffer shared between calls would tie two streams together.
    """
    slots = call.topk_indices.clamp(min=-1)
    slots.masked_fill_(slots >= call.num_slots, -1)
    gap = records_apart - call.block_size
    if gap:
        # -1 lies in block -1 and becomes -1 - gap.
        blocks = slots.div(call.block_size, rounding_mode="floor")
        slots.add_(blocks, alpha=gap).clamp_(min=-1)
    return slots


# By device and width. They live as long as the process, since a graph that was captured with one keeps its address.
_lengths: dict[tuple[torch.device, int], torch.Tensor] = {}


def _valid_lengths(device: torch.device, num_tokens: int, width: int) -> torch.Tensor:
    """(num_tokens,) int32, all `width`: how far along a row the op looks. Never written again.

    A slice of a constant that is made at construction, or at the first call of a width, and then costs nothing. While a
    graph is captured no constant is made: it would be filled only when that graph is replayed. Such a call fills its
    own, inside the graph, and so does one of more than `LENGTHS_AHEAD` tokens.
    """
    constant = _lengths.get((device, width))
    if constant is None and not _is_capturing(device):
        # The blocking copy has arrived when it returns, so that every stream finds it; a fill would only be ordered
        # on this one.
        made = torch.full((LENGTHS_AHEAD,), width, dtype=torch.int32, device="cpu").to(device)
        constant = _lengths.setdefault((device, width), made)
    if constant is None or num_tokens > LENGTHS_AHEAD:
        return torch.full((num_tokens,), width, dtype=torch.int32, device=device)
    return constant[:num_tokens]


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
