"""Checks of a gather call's arguments. None of them reads a tensor's values, except `check_values`."""

from __future__ import annotations

import torch

from hyv4_kvdequant.contract import GatherCall, InvalidCallError, RecordLayout

INT32_MAX = 2**31 - 1


def _fail(argument: str, given: str, expected: str, remedy: str) -> InvalidCallError:
    return InvalidCallError(f"{argument} is {given}; expected {expected}. {remedy}")


def _tensor(argument: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise _fail(argument, f"a {type(value).__name__}", "a torch.Tensor", "Pass a tensor.")
    return value


def validate_cache(kv_cache: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """Checks the cache and returns it as (num_blocks, block_size, row_bytes) uint8, a view of the same memory."""
    shape = tuple(_tensor("kv_cache", kv_cache).shape)
    if kv_cache.dtype not in (torch.uint8, layout.nope_dtype):
        raise _fail(
            "kv_cache", f"of dtype {kv_cache.dtype}", f"uint8 or {layout.nope_dtype}", "Pass the raw cache, not a copy."
        )
    if kv_cache.dim() not in (2, 3) or shape[-1] != layout.row_bytes:
        raise _fail(
            "kv_cache",
            f"of shape {shape}",
            f"(num_blocks, block_size, {layout.row_bytes}) or (num_slots, {layout.row_bytes}) for record {layout.name}",
            f"A last dimension other than {layout.row_bytes} is another record: check the KV cache dtype.",
        )
    if kv_cache.dim() == 2:
        # Packed rows are one block; rows with gaps are blocks of one slot.
        packed = shape[0] <= 1 or kv_cache.stride(0) == layout.row_bytes
        kv_cache = kv_cache.unsqueeze(0 if packed else 1)
    _validate_strides(kv_cache, layout)
    return kv_cache if kv_cache.dtype == torch.uint8 else kv_cache.view(torch.uint8)


def _validate_strides(kv_cache: torch.Tensor, layout: RecordLayout) -> None:
    num_blocks, block_size, row_bytes = kv_cache.shape
    strides = kv_cache.stride()
    if strides[2] != 1 or (block_size > 1 and strides[1] != row_bytes):
        raise _fail(
            "kv_cache",
            f"of strides {strides}",
            f"stride(-1) == 1 and stride(-2) == {row_bytes} (records contiguous and adjacent in a block)",
            "Pass the cache as the host allocated it, not a transposed or sliced view.",
        )
    if num_blocks > 1 and strides[0] < block_size * row_bytes:
        raise _fail(
            "kv_cache",
            f"of stride(0) {strides[0]}",
            f"at least block_size * row_bytes = {block_size * row_bytes}",
            "Overlapping blocks (an expanded view) are not a cache.",
        )
    if (num_blocks > 1 and strides[0] % layout.alignment) or kv_cache.data_ptr() % layout.alignment:
        raise _fail(
            "kv_cache",
            f"at address {kv_cache.data_ptr():#x} with stride(0) {strides[0]}",
            f"both multiples of {layout.alignment} bytes, so that scales can be read",
            "Align the cache.",
        )


def validate_slots(topk_indices: torch.Tensor, kv_cache: torch.Tensor, tokens_per_request: int) -> None:
    """Checks the selected slots and the request width against the cache."""
    shape = tuple(_tensor("topk_indices", topk_indices).shape)
    if topk_indices.dtype != torch.int32:
        raise _fail(
            "topk_indices",
            f"of dtype {topk_indices.dtype}",
            "int32",
            "Convert once where the slots are made (.to(torch.int32)); a cast here would cost every step.",
        )
    if topk_indices.dim() != 2 or not topk_indices.is_contiguous():
        raise _fail(
            "topk_indices",
            f"of shape {shape} and strides {topk_indices.stride()}",
            "(num_tokens, topk), contiguous",
            "Reshape it, or make it contiguous where it is made.",
        )
    if topk_indices.device != kv_cache.device:
        raise _fail("topk_indices", f"on {topk_indices.device}", f"kv_cache's device {kv_cache.device}", "Move one.")
    if topk_indices.numel() > INT32_MAX:
        raise _fail(
            "topk_indices",
            f"of {topk_indices.numel()} entries",
            f"at most {INT32_MAX}, since compact_indices is int32",
            "Split the tokens into several calls.",
        )
    width = tokens_per_request
    if not isinstance(width, int) or isinstance(width, bool) or width < 1 or shape[0] % width:
        raise _fail(
            "tokens_per_request",
            repr(width),
            f"a whole number of at least 1 that divides num_tokens = {shape[0]}",
            "Use 1 for a ragged batch.",
        )


def validate_call(call: GatherCall) -> None:
    """Checks both outputs: dtype, shape, contiguity, device, and that no two tensors of the call overlap."""
    _validate_output(
        "compact_kv", call.compact_kv, torch.bfloat16, (call.topk_indices.numel(), call.layout.row_dim), call
    )
    _validate_output("compact_indices", call.compact_indices, torch.int32, (call.num_tokens, call.topk), call)
    tensors = {
        "compact_kv": call.compact_kv,
        "compact_indices": call.compact_indices,
        "topk_indices": call.topk_indices,
        "kv_cache": call.kv_cache,
    }
    for output in ("compact_kv", "compact_indices"):
        for other, tensor in tensors.items():
            if other != output and _overlap(tensors[output], tensor):
                raise _fail(output, f"overlapping {other} in memory", "memory of its own", "Allocate it separately.")


def _validate_output(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int], call: GatherCall
) -> None:
    _tensor(name, tensor)
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        given = f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        raise _fail(name, given, f"{dtype} of shape {shape}, contiguous", "Pass such a buffer or None.")
    if tensor.device != call.kv_cache.device:
        raise _fail(name, f"on {tensor.device}", f"kv_cache's device {call.kv_cache.device}", "Allocate it there.")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.numel() == 0 or b.numel() == 0:
        return False
    return a.data_ptr() < b.data_ptr() + _extent(b) and b.data_ptr() < a.data_ptr() + _extent(a)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def check_values(call: GatherCall) -> None:
    """Raises where a slot is below -1 or at or above the number of slots. Copies to the host."""
    slots = call.topk_indices
    wrong = ((slots < -1) | (slots >= call.num_slots)).nonzero()
    if wrong.numel():
        token, k = wrong[0].tolist()
        raise _fail(
            "topk_indices",
            f"{slots[token, k].item()} at [{token}, {k}] ({wrong.shape[0]} such entries)",
            f"-1 (unfilled) or a slot in [0, {call.num_slots})",
            "Without check_indices such an entry counts as unfilled.",
        )
