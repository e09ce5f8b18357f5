"""Step files: one recorded attention step as safetensors, what `run`, `verify` and traces read and write.

Tensors: `kv_cache` (num_blocks, block_size, row_bytes) uint8, or (num_blocks, block_stride) uint8 where blocks have
gaps; `slots` (num_tokens, topk) int32; and any of `query` (num_tokens, num_heads, row_dim) bf16, `attn_sink`
(num_heads,) fp32, and what another implementation made of them: `rows` (num_slots, row_dim) bf16, `fp8_out`,
`bf16_out` (num_tokens, num_heads, nope_dim) bf16, `fp8_lse`, `bf16_lse` (num_tokens, num_heads) fp32.
Metadata (strings): `format`, `version`, `block_size`, `layout`, `tokens_per_request`, `softmax_scale`, and notes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as _shown  # text from a file can be of any length
from textwrap import shorten
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from hyv4_kvdequant.contract import FP8_DS_MLA, InvalidCallError, RecordLayout, StepFileError
from hyv4_kvdequant.files import write_whole
from hyv4_kvdequant.records import RECORDS
from hyv4_kvdequant.validation import INT32_MAX, validate_cache, validate_slots

FORMAT: Literal["hyv4_kvdequant.step"] = "hyv4_kvdequant.step"
VERSION = 1


@dataclass(frozen=True, eq=False)
class Step:
    """One gather call's input and, where recorded, the attention around it. Shapes as in the module's table."""

    kv_cache: torch.Tensor
    topk_indices: torch.Tensor
    layout: RecordLayout = FP8_DS_MLA
    tokens_per_request: int = 1
    softmax_scale: float | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


def save_step(path: Path, step: Step, *, group_readable: bool = False) -> None:
    """Writes a step, whole or not at all, readable by the owner alone, or by the group too.

    A cache with gaps between blocks is stored with its gaps, so that a replay sees the same strides.

    Raises:
        OSError, SafetensorError: the file cannot be written.
    """
    blocks = step.kv_cache
    packed = blocks.shape[1] * blocks.shape[2]
    gapped = blocks.shape[0] > 1 and blocks.stride(0) != packed
    stored = _with_gaps(blocks) if gapped else blocks.contiguous()
    metadata = {
        **step.notes,
        "format": FORMAT,
        "version": str(VERSION),
        "block_size": str(blocks.shape[1]),
        "layout": step.layout.name,
        "tokens_per_request": str(step.tokens_per_request),
    }
    if gapped:
        metadata["block_stride"] = str(blocks.stride(0))
    if step.softmax_scale is not None:
        metadata["softmax_scale"] = repr(step.softmax_scale)
    tensors = {"kv_cache": stored, "slots": step.topk_indices, **step.tensors}
    content = save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, metadata)
    write_whole(path, content, group_readable=group_readable)


def _with_gaps(blocks: torch.Tensor) -> torch.Tensor:
    num_blocks, block_size, row_bytes = blocks.shape
    stored = torch.zeros((num_blocks, blocks.stride(0)), dtype=torch.uint8, device=blocks.device)
    stored[:, : block_size * row_bytes] = blocks.reshape(num_blocks, -1)
    return stored


def cache_on(step: Step, device: torch.device) -> torch.Tensor:
    """The step's cache on `device` with the strides it was recorded with; a plain copy would close the gaps."""
    cache = step.kv_cache
    if cache.device == device:
        return cache
    stride = cache.stride(0) if cache.shape[0] > 1 else cache[:1].numel()
    memory = torch.zeros(cache.shape[0] * stride, dtype=torch.uint8, device=device)
    return memory.as_strided(cache.shape, (stride, *cache.stride()[1:])).copy_(cache)


def _count(text: object) -> int:
    if not isinstance(text, str) or not re.fullmatch(r"[1-9][0-9]{0,9}", text) or int(text) > INT32_MAX:
        raise ValueError(f"a whole number from 1 to {INT32_MAX} is expected")
    return int(text)


def _layout(name: object) -> RecordLayout:
    if name not in RECORDS:
        raise ValueError(f"one of {sorted(RECORDS)} is expected")
    return RECORDS[str(name)].layout


_Count = Annotated[int, BeforeValidator(_count)]


class _Metadata(BaseModel):
    """What we read of a file's metadata, whose values are all text; a file may leave out each. Other keys are notes."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    format: Literal["hyv4_kvdequant.step"] = FORMAT
    version: Annotated[_Count, Field(le=VERSION)] = VERSION
    layout: Annotated[RecordLayout, BeforeValidator(_layout)] = FP8_DS_MLA
    block_size: _Count | None = None
    block_stride: _Count | None = None
    tokens_per_request: _Count = 1
    softmax_scale: Annotated[float, Field(gt=0, le=torch.finfo(torch.float32).max)] | None = None


# Dtype and shape of each tensor that may stand beside the two; a name is a size, equal wherever it stands.
_BESIDE: dict[str, tuple[torch.dtype, tuple[str, ...]]] = {
    "query": (torch.bfloat16, ("num_tokens", "num_heads", "row_dim")),
    "attn_sink": (torch.float32, ("num_heads",)),
    "rows": (torch.bfloat16, ("num_slots", "row_dim")),
    "fp8_out": (torch.bfloat16, ("num_tokens", "num_heads", "nope_dim")),
    "bf16_out": (torch.bfloat16, ("num_tokens", "num_heads", "nope_dim")),
    "fp8_lse": (torch.float32, ("num_tokens", "num_heads")),
    "bf16_lse": (torch.float32, ("num_tokens", "num_heads")),
}


def load_step(path: Path) -> Step:
    """Reads a step file whole, or not at all.

    Raises:
        StepFileError: it is missing, truncated, not a step, newer than this package, or inconsistent.
    """
    texts, tensors = _read(path)
    try:
        metadata = _Metadata.model_validate({key: texts[key] for key in _Metadata.model_fields if key in texts})
    except ValidationError as error:
        raise _explain(path, error) from None
    missing = [name for name in ("kv_cache", "slots") if name not in tensors]
    if missing:
        raise StepFileError(
            f"{path} is a safetensors file but not a step: it lacks {' and '.join(missing)}; "
            f"it has {_shown(sorted(tensors))}."
        )
    slots = tensors["slots"]
    try:
        blocks = _view_blocks(tensors["kv_cache"], metadata)
        validate_slots(slots, blocks, metadata.tokens_per_request)
        if max(slots.shape) > INT32_MAX:  # possible where the other size is 0
            raise ValueError(f"slots is of shape {tuple(slots.shape)}; neither size can pass {INT32_MAX}")
        _check_beside(tensors, slots, blocks, metadata.layout)
    except (InvalidCallError, ValueError) as error:
        raise StepFileError(f"{path} is inconsistent: {error}") from error
    return Step(
        kv_cache=blocks,
        topk_indices=slots,
        layout=metadata.layout,
        tokens_per_request=metadata.tokens_per_request,
        softmax_scale=metadata.softmax_scale,
        tensors={name: tensors[name] for name in tensors if name not in ("kv_cache", "slots")},
        notes={key: value for key, value in texts.items() if key not in _Metadata.model_fields},
    )


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError as error:
        raise StepFileError(f"{path} does not exist. Pass the path of a step file.") from error
    # The last two are PyTorch's, for a header that declares what no tensor can be.
    except (SafetensorError, OSError, TypeError, RuntimeError) as error:
        raise StepFileError(
            f"{path} is not a readable safetensors file ({shorten(str(error), 200, placeholder=' ...')}); it may be "
            "truncated. Record it again."
        ) from error


def _explain(path: Path, error: ValidationError) -> StepFileError:
    first = error.errors()[0]  # in the order of the fields: a newer version explains whatever else is odd
    key, given = first["loc"][0], _shown(first["input"])
    if key == "format":
        return StepFileError(f"{path} has the format {given}; expected {FORMAT!r}. It was written by something else.")
    if key == "version":
        return StepFileError(
            f"{path} has step format version {given}; this release reads up to {VERSION}. Upgrade hyv4-kvdequant."
        )
    if key == "layout":
        return StepFileError(f"{path} holds records of layout {given}; this release knows {sorted(RECORDS)}.")
    return StepFileError(f"{path} is inconsistent: {key} is {given}: {first['msg'].removeprefix('Value error, ')}.")


def _view_blocks(stored: torch.Tensor, metadata: _Metadata) -> torch.Tensor:
    """The cache as (num_blocks, block_size, row_bytes) uint8, with its gaps."""
    row_bytes, block_size, stride = metadata.layout.row_bytes, metadata.block_size, metadata.block_stride
    if stored.data_ptr() % metadata.layout.alignment:  # tensors of an odd size before it in the file
        stored = stored.clone()
    if stride is not None:
        if block_size is None:
            raise ValueError(f"block_stride is {stride}, but there is no block_size to read it with")
        if stored.dim() != 2 or stored.shape[1] != stride or block_size * row_bytes > stride:
            raise ValueError(
                f"kv_cache {tuple(stored.shape)} and block_size {block_size} do not fit block_stride {stride}"
            )
        stored = stored.as_strided((stored.shape[0], block_size, row_bytes), (stride, row_bytes, 1))
    blocks = validate_cache(stored, metadata.layout)
    if not 1 <= blocks.shape[1] <= INT32_MAX or block_size not in (None, blocks.shape[1]):
        expected = f"1 to {INT32_MAX}" if block_size is None else block_size
        raise ValueError(f"kv_cache {tuple(stored.shape)} has blocks of {blocks.shape[1]} slots; expected {expected}")
    return blocks


def _check_beside(
    tensors: Mapping[str, torch.Tensor], slots: torch.Tensor, blocks: torch.Tensor, layout: RecordLayout
) -> None:
    """Holds the optional tensors to `_BESIDE`; ValueError when one is not what it says."""
    sizes = {
        "num_tokens": slots.shape[0],
        "num_slots": blocks.shape[0] * blocks.shape[1],
        "row_dim": layout.row_dim,
        "nope_dim": layout.nope_dim,
    }
    for name, (dtype, dims) in _BESIDE.items():
        if (tensor := tensors.get(name)) is None:
            continue
        shape = tuple(tensor.shape)
        if "num_heads" in dims and "num_heads" not in sizes and len(shape) == len(dims):
            sizes["num_heads"] = max(shape[dims.index("num_heads")], 1)
        if tensor.dtype != dtype or shape != tuple(sizes.get(dim) for dim in dims):
            expected = ", ".join(f"{dim} = {sizes[dim]}" if dim in sizes else dim for dim in dims)
            raise ValueError(f"{name} is {tensor.dtype} of shape {shape}; expected {dtype} of shape ({expected})")
