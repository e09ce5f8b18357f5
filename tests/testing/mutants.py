"""Faulty backends: a right one in small steps, and mutants that get one step wrong in a way somebody would.

`Dissected` does what the `torch` backend does, with a method a step, and adds what a backend may do on top: storing a
slot once for one request, and reusing a mapping. Each mutant's docstring is the mistake, as the table prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hyv4_kvdequant import Features, GatherCall, GatherDequantBackend, Target

MUTANTS: list[type[Dissected]] = []
GPU_MUTANTS: dict[type[Dissected], str] = {}

_BF16_TINY = 2.0**-126


class Dissected(GatherDequantBackend):
    """Right. Slots, masks and rows below are flat: (num_tokens * topk, ...)."""

    name = "dissected"
    features = Features(request_dedup=True, mapping_reuse=True)

    @classmethod
    def unavailable_reasons(cls, target: Target) -> list[str]:
        return [] if target.layout.scale_dtype == torch.float32 else ["its scales are not fp32"]

    def gather_dequant(self, call: GatherCall) -> None:
        slots = call.topk_indices.view(-1)
        filled = self.filled(call, slots)
        if not call.reuse_compact_indices:
            call.compact_indices.view(-1).copy_(self.mapping(call, slots, filled))
        self.store(call, self.bits(call, slots, filled), filled)

    def filled(self, call: GatherCall, slots: torch.Tensor) -> torch.Tensor:
        return (slots >= 0) & (slots < call.num_slots)

    def mapping(self, call: GatherCall, slots: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
        own = torch.arange(slots.numel(), dtype=torch.int32, device=slots.device)
        rows = own if call.tokens_per_request == 1 else self.first_with_same_slot(call, slots)
        return torch.where(filled, rows, -1)

    def first_with_same_slot(self, call: GatherCall, slots: torch.Tensor) -> torch.Tensor:
        size = call.tokens_per_request * call.topk
        requests = self.dedup_keys(slots).view(-1, size)
        same = requests.unsqueeze(2) == requests.unsqueeze(1)
        first = same.int().argmax(dim=2)
        base = size * torch.arange(requests.shape[0], device=slots.device).unsqueeze(1)
        return self.row_of(first, base).view(-1).int()

    def dedup_keys(self, slots: torch.Tensor) -> torch.Tensor:
        return slots

    def row_of(self, first: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return first + base

    def bits(self, call: GatherCall, slots: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
        layout = call.layout
        records = self.read(call, torch.where(filled, slots, 0).long())
        nope = self.decode(records[:, layout.nope_offset : layout.nope_offset + layout.nope_dim])
        end = layout.scale_offset + 4 * layout.num_tiles
        scale = self.scale(records[:, layout.scale_offset : end].contiguous().view(torch.float32))
        product = nope.view(-1, layout.num_tiles, layout.tile_dim) * scale.unsqueeze(-1)
        rope = records[:, layout.rope_offset : layout.rope_offset + 2 * layout.rope_dim].contiguous()
        nope_bits = self.round(product, nope, scale).reshape(-1, layout.nope_dim)
        return torch.cat([nope_bits, self.rope(rope.view(torch.bfloat16))], dim=1)

    def read(self, call: GatherCall, slots: torch.Tensor) -> torch.Tensor:
        cache = call.kv_cache
        size = (cache.shape[0] - 1) * cache.stride(0) + cache.shape[1] * cache.shape[2]
        start = self.address(call, slots) % size  # the modulo keeps a wrong address from ending the process
        places = start.unsqueeze(1) + torch.arange(call.layout.row_bytes, device=slots.device)
        return cache.as_strided((size,), (1,))[places.clamp_max(size - 1)]

    def address(self, call: GatherCall, slots: torch.Tensor) -> torch.Tensor:
        block, position = slots // call.block_size, slots % call.block_size
        return block * call.kv_cache.stride(0) + position * call.layout.row_bytes

    def decode(self, values: torch.Tensor) -> torch.Tensor:
        return values.contiguous().view(torch.float8_e4m3fn).float()

    def scale(self, scale: torch.Tensor) -> torch.Tensor:
        return scale

    def round(self, product: torch.Tensor, nope: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return product.to(torch.bfloat16).view(torch.int16)

    def rope(self, rope: torch.Tensor) -> torch.Tensor:
        return rope.view(torch.int16)

    def store(self, call: GatherCall, bits: torch.Tensor, filled: torch.Tensor) -> None:
        rows = call.compact_kv.view(torch.int16)
        if call.tokens_per_request == 1:
            rows.copy_(torch.where(filled.unsqueeze(1), bits, 0))
        else:
            indices = call.compact_indices.view(-1)
            owner = indices == torch.arange(indices.numel(), dtype=torch.int32, device=indices.device)
            rows[owner] = bits[owner]


Mutant = type[Dissected]


def mutant(cls: Mutant) -> Mutant:
    MUTANTS.append(cls)
    return cls


def gpu_mutant(clause: str) -> Callable[[Mutant], Mutant]:
    """A mutant that shows itself on an accelerator only, and the clause that must reject it."""

    def add(cls: Mutant) -> Mutant:
        GPU_MUTANTS[cls] = clause
        return cls

    return add


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16).view(torch.int16)


def _upper_half(values: torch.Tensor, add: int) -> torch.Tensor:
    """The upper 16 bits of fp32 values, `add` added to their bits first; NaN stays NaN."""
    bits = ((values.view(torch.int32).long() + add) >> 16).to(torch.int16)
    return torch.where(values.isnan(), 0x7FC0, bits)


# --- numerics ---


@mutant
class TruncatesToBf16(Dissected):
    """truncates instead of rounding"""

    def round(self, product, nope, scale):
        return _upper_half(product, 0)


@mutant
class RoundsTiesAway(Dissected):
    """rounds ties away from zero"""

    def round(self, product, nope, scale):
        return _upper_half(product, 0x8000)


@mutant
class RoundsOnce(Dissected):
    """rounds the exact product, not the fp32 product"""

    def round(self, product, nope, scale):
        exact = nope.view(product.shape).double() * scale.double().unsqueeze(-1)
        mantissa, exponent = torch.frexp(exact)
        rounded = torch.ldexp(torch.round(mantissa * 256), exponent - 8).float()
        normal = exact.isfinite() & (exact.abs() > 2 * _BF16_TINY) & (exact.abs() < 3e38)
        return _bits(torch.where(normal, rounded, product))


@mutant
class RoundsScaleFirst(Dissected):
    """multiplies in bf16"""

    def scale(self, scale):
        return scale.to(torch.bfloat16).float()


@mutant
class TakesScaleForPowerOfTwo(Dissected):
    """takes every scale for a power of two"""

    def scale(self, scale):
        return (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)


@mutant
class ScaleOfNeighbouringTile(Dissected):
    """uses the scale of the neighbouring tile"""

    def scale(self, scale):
        return scale.roll(1, dims=1)


@mutant
class OneScaleForTheRecord(Dissected):
    """uses the first tile's scale for all"""

    def scale(self, scale):
        return scale[:, :1].expand_as(scale)


@mutant
class FlushesSubnormalResults(Dissected):
    """flushes subnormal results to zero"""

    def round(self, product, nope, scale):
        return _bits(torch.where(product.abs() < _BF16_TINY, product * 0, product))


@mutant
class FlushesSubnormalScales(Dissected):
    """flushes subnormal scales to zero"""

    def scale(self, scale):
        return torch.where(scale.abs() < _BF16_TINY, scale * 0, scale)


@mutant
class SaturatesOverflow(Dissected):
    """saturates where the result overflows"""

    def round(self, product, nope, scale):
        largest = torch.finfo(torch.bfloat16).max
        return _bits(torch.where(product.isinf(), product, product.clamp(-largest, largest)))


@mutant
class LosesNegativeZero(Dissected):
    """loses the sign of zero"""

    def round(self, product, nope, scale):
        return _bits(product + 0.0)


@mutant
class E4m3SubnormalsAsZero(Dissected):
    """decodes e4m3 subnormals as zero"""

    def decode(self, values):
        decoded = super().decode(values)
        return torch.where(decoded.abs() < 2.0**-6, decoded * 0, decoded)


@mutant
class DecodesNanAs480(Dissected):
    """decodes e4m3 NaN as 480"""

    def decode(self, values):
        return super().decode(values).nan_to_num(nan=480.0)


@mutant
class DecodesFnuz(Dissected):
    """decodes e4m3fnuz"""

    def decode(self, values):
        return values.contiguous().view(torch.float8_e4m3fnuz).float()


@mutant
class RopeThroughFloat(Dissected):
    """moves RoPE through fp32, which changes NaN bits"""

    def rope(self, rope):
        return _bits(rope.float())


@mutant
class RopeScaled(Dissected):
    """flushes RoPE subnormals"""

    def rope(self, rope):
        return torch.where((rope.view(torch.int16) & 0x7F80) == 0, 0, rope.view(torch.int16))


# --- addresses ---


@mutant
class Offsets32Bit(Dissected):
    """multiplies the slot by row_bytes in 32 bits"""

    def address(self, call, slots):
        return super().address(call, slots).int().long()


@mutant
class BlockOffsets32Bit(Dissected):
    """multiplies the block by its stride in unsigned 32 bits"""

    def address(self, call, slots):
        return super().address(call, slots) % 2**32


@mutant
class IgnoresBlockStride(Dissected):
    """reads stride(0) as packed"""

    def address(self, call, slots):
        return slots * call.layout.row_bytes


@mutant
class BlockSizeHardCoded(Dissected):
    """hard-codes a block size of 64"""

    def address(self, call, slots):
        return slots // 64 * call.kv_cache.stride(0) + slots % 64 * call.layout.row_bytes


@mutant
class BlockSizeAsShift(Dissected):
    """takes the block size for a power of two"""

    def address(self, call, slots):
        block_size = 1 << (call.block_size - 1).bit_length()
        return slots // block_size * call.kv_cache.stride(0) + slots % block_size * call.layout.row_bytes


@mutant
class StrideInRecords(Dissected):
    """counts stride(0) in whole records"""

    def address(self, call, slots):
        stride = call.kv_cache.stride(0) // call.layout.row_bytes * call.layout.row_bytes
        return slots // call.block_size * stride + slots % call.block_size * call.layout.row_bytes


# --- unfilled entries and shapes ---


@mutant
class ClampsSlots(Dissected):
    """clamps a slot instead of masking it"""

    def gather_dequant(self, call):
        clamped = call.topk_indices.clamp(0, call.num_slots - 1)
        super().gather_dequant(replace(call, topk_indices=clamped))


@mutant
class OnlyNegativeIsUnfilled(Dissected):
    """does not look for slots past the cache"""

    def filled(self, call, slots):
        return slots >= 0


@mutant
class OnlyMinusOneIsUnfilled(Dissected):
    """takes only -1 for unfilled"""

    def filled(self, call, slots):
        return slots != -1


@mutant
class ReadsSlotNumSlots(Dissected):
    """takes slot num_slots for the last one"""

    def filled(self, call, slots):
        return (slots >= 0) & (slots <= call.num_slots)


@mutant
class ZeroRowForUnfilled(Dissected):
    """points unfilled entries to a zero row"""

    def mapping(self, call, slots, filled):
        own = torch.arange(slots.numel(), dtype=torch.int32)
        return torch.where(filled, super().mapping(call, slots, filled), own)


@mutant
class LeavesUnfilledRowsDirty(Dissected):
    """leaves rows of unfilled entries as they were"""

    def store(self, call, bits, filled):
        call.compact_kv.view(torch.int16)[filled] = bits[filled]


@mutant
class ZeroesByMultiplying(Dissected):
    """multiplies rows of unfilled entries by zero"""

    def store(self, call, bits, filled):
        masked = (bits.view(torch.bfloat16) * filled.unsqueeze(1)).view(torch.int16)
        super().store(call, torch.where(filled.unsqueeze(1), bits, masked), torch.ones_like(filled))


@mutant
class StopsAtFirstUnfilled(Dissected):
    """takes the first -1 for the end of the row"""

    def filled(self, call, slots):
        filled = super().filled(call, slots).view(call.num_tokens, call.topk)
        return filled.int().cumprod(dim=1).bool().view(-1)


@mutant
class TopkInWholeTiles(Dissected):
    """leaves out topk's last partial tile of 16"""

    def mapping(self, call, slots, filled):
        mapping = super().mapping(call, slots, filled).view(call.num_tokens, call.topk)
        whole = call.topk // 16 * 16
        return torch.cat([mapping[:, :whole], call.compact_indices[:, whole:]], dim=1).view(-1)


@mutant
class RowsPaddedToPowerOfTwo(Dissected):
    """counts rows of a token as if topk were a power of two"""

    def mapping(self, call, slots, filled):
        padded = 1 << (call.topk - 1).bit_length()
        tokens = torch.arange(call.num_tokens, dtype=torch.int32).repeat_interleave(call.topk)
        return torch.where(filled, super().mapping(call, slots, filled) + tokens * (padded - call.topk), -1)


@mutant
class DedupsAtWidth1(Dissected):
    """stores a slot once for one query row, at width 1 too"""

    def mapping(self, call, slots, filled):
        return torch.where(filled, self.first_with_same_slot(call, slots), -1)


@mutant
class WritesWholeTileOfRows(Dissected):
    """writes a whole tile of rows past the last row"""

    def store(self, call, bits, filled):
        super().store(call, bits, filled)
        rows = call.compact_kv
        if rows.shape[0] % 16:
            beyond = rows.as_strided((16, rows.shape[1]), rows.stride(), rows.storage_offset() + rows.numel())
            beyond[: 16 - rows.shape[0] % 16] = 0


@mutant
class WritesIndexPastTheEnd(Dissected):
    """writes one compact index past the last"""

    def store(self, call, bits, filled):
        super().store(call, bits, filled)
        indices = call.compact_indices
        indices.as_strided((1,), (1,), indices.storage_offset() + indices.numel()).fill_(-1)


@mutant
class CleansCacheInPlace(Dissected):
    """replaces NaN bytes in the cache itself"""

    def store(self, call, bits, filled):
        super().store(call, bits, filled)
        nope = call.kv_cache[0, 0, : call.layout.nope_dim]
        nope[(nope & 0x7F) == 0x7F] = 0


@mutant
class ClampsSlotsInPlace(Dissected):
    """clamps topk_indices in place"""

    def store(self, call, bits, filled):
        super().store(call, bits, filled)
        call.topk_indices.clamp_(min=0)


# --- requests of several query rows ---


@mutant
class GroupsOffByOne(Dissected):
    """groups the rows of requests one off"""

    def dedup_keys(self, slots):
        return slots.roll(1)


@mutant
class IndexInsideTheRequest(Dissected):
    """counts rows from the start of the request"""

    def row_of(self, first, base):
        return first


@mutant
class IndexIntoNextRequest(Dissected):
    """points a duplicate into the next request"""

    def row_of(self, first, base):
        own = torch.arange(first.shape[1], device=first.device)
        return torch.where(first == own, first + base, first + base.roll(-1, dims=0))


@mutant
class KeepsTableOfPreviousRequest(Dissected):
    """finds slots in the previous request's table"""

    def first_with_same_slot(self, call, slots):
        rows = super().first_with_same_slot(call, slots).view(-1, call.tokens_per_request * call.topk)
        requests = slots.view(rows.shape)
        seen_before = (requests[1:].unsqueeze(2) == requests[:-1].unsqueeze(1)).int()
        stale = seen_before.argmax(dim=2) + rows.shape[1] * torch.arange(1, len(rows)).unsqueeze(1)
        rows[1:] = torch.where(seen_before.any(dim=2), stale.int(), rows[1:])
        return rows.view(-1)


@mutant
class ComparesHashes(Dissected):
    """takes slots with one hash for one slot"""

    def dedup_keys(self, slots):
        return slots & 0xFF


@mutant
class Compares16Bits(Dissected):
    """compares the low 16 bits of slots"""

    def dedup_keys(self, slots):
        return slots & 0xFFFF


@mutant
class StoresFirstTokenOnly(Dissected):
    """stores only the slots of a request's first row"""

    def store(self, call, bits, filled):
        if call.tokens_per_request > 1:
            first = torch.arange(filled.numel()) // call.topk % call.tokens_per_request == 0
            call.compact_kv.view(torch.int16)[first] = bits[first]
        else:
            super().store(call, bits, filled)


# --- several calls ---


@mutant
class CachesResultByShape(Dissected):
    """returns the result of an earlier call of one shape"""

    def __init__(self, target):
        super().__init__(target)
        self._results = {}

    def gather_dequant(self, call):
        key = (call.topk_indices.shape, call.kv_cache.shape, call.tokens_per_request)
        if key not in self._results:
            super().gather_dequant(call)
            self._results[key] = call.compact_kv.clone(), call.compact_indices.clone()
        call.compact_kv.copy_(self._results[key][0])
        call.compact_indices.copy_(self._results[key][1])


@mutant
class KeepsCacheOfFirstCall(Dissected):
    """keeps the stride of the first call's cache"""

    _stride = None

    def address(self, call, slots):
        self._stride = self._stride or call.kv_cache.stride(0)
        return slots // call.block_size * self._stride + slots % call.block_size * call.layout.row_bytes


@mutant
class SkipsMappingOfEqualShape(Dissected):
    """keeps the unfilled entries of an earlier call of one shape"""

    def __init__(self, target):
        super().__init__(target)
        self._filled = {}

    def filled(self, call, slots):
        return self._filled.setdefault(call.topk_indices.shape, super().filled(call, slots))


@mutant
class ReusesLastMapping(Dissected):
    """on reuse takes the last mapping it wrote, not the one passed"""

    _last = None

    def gather_dequant(self, call):
        if call.reuse_compact_indices:
            call.compact_indices.copy_(self._last)
        super().gather_dequant(call)
        self._last = call.compact_indices.clone()


@mutant
class ReuseLeavesUnfilledRowsDirty(Dissected):
    """on reuse leaves rows of unfilled entries as they were"""

    def store(self, call, bits, filled):
        if call.reuse_compact_indices:
            call.compact_kv.view(torch.int16)[filled] = bits[filled]
        else:
            super().store(call, bits, filled)


@mutant
class ReuseWritesThroughMinusOne(Dissected):
    """on reuse writes unfilled entries to row -1"""

    def store(self, call, bits, filled):
        super().store(call, bits, filled)
        if call.reuse_compact_indices:
            call.compact_kv[call.compact_indices.view(-1)[~filled].long()] = 0


# --- availability ---


@mutant
class RaisesOnUnknownCapability(Dissected):
    """raises where the compute capability is not known"""

    @classmethod
    def unavailable_reasons(cls, target):
        return [] if target.device.type == "cpu" or target.capability >= (8, 0) else ["too old"]


@mutant
class GivesReasonAsString(Dissected):
    """gives a reason as a string"""

    @classmethod
    def unavailable_reasons(cls, target):
        return [] if target.platform == "cpu" else "only CPUs are served"


# --- what only an accelerator shows ---


class _WholeCall(Dissected):
    """Right, and fit for a graph: rows of unfilled entries are masked, none is chosen by data."""

    features = Features()


@gpu_mutant("graph_replay_equals_eager")
class AsksTheHost(_WholeCall):
    """looks at data on the host"""

    def store(self, call, bits, filled):
        if bool(filled.any()):
            super().store(call, bits, filled)
        else:
            call.compact_kv.zero_()


@gpu_mutant("graph_replay_equals_eager")
class FreezesUnfilledEntries(_WholeCall):
    """keeps a mask that is made before a graph is captured"""

    def filled(self, call, slots):
        if not torch.cuda.is_current_stream_capturing():
            self._mask = super().filled(call, slots)
        return self._mask


@gpu_mutant("two_streams_do_not_disturb_each_other")
class SharesScratch(_WholeCall):
    """keeps one scratch buffer for calls on all streams"""

    _scratch = None

    def store(self, call, bits, filled):
        if self._scratch is None or self._scratch.shape != bits.shape:
            self._scratch = torch.empty_like(bits)
        self._scratch.copy_(bits)
        super().store(call, self._scratch, filled)


@gpu_mutant("two_streams_do_not_disturb_each_other")
class LaunchesOnDefaultStream(_WholeCall):
    """launches on the default stream"""

    def gather_dequant(self, call):
        with torch.cuda.stream(torch.cuda.default_stream()):
            super().gather_dequant(call)


@gpu_mutant("outputs_past_4_gib")
class RowOffsets32Bit(_WholeCall):
    """multiplies the row by row_dim in 32 bits"""

    def store(self, call, bits, filled):
        super().store(call, bits, filled)
        call.compact_kv[2**31 // call.layout.row_dim :].zero_()


def describe(cls: Mutant) -> str:
    """The mistake, in a few words."""
    return (cls.__doc__ or "").strip()
