"""Step files: one recorded attention step as safetensors, what `run`, `verify` and traces read and write.

Tensors: `kv_cache` (num_blocks, block_size, row_bytes) uint8, or (num_blocks, block_stride) uint8 where blocks have
gaps; `slots` (num_tokens, topk) int32; and any of `query` (num_tokens, num_heads, row_dim) bf16, `attn_sink`
(num_heads,) fp32, and what another implementation made of them: `rows` (num_slots, row_dim) bf16, `fp8_out`,
`bf16_out` (num_tokens, num_heads, nope_dim) bf16, `fp8_lse`, `bf16_lse` (num_tokens, num_heads) fp32.
Metadata (strings): `format`, `version`, `block_size`, `layout`, `tokens_per_request`, `softmax_scale`, and notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from hyv4_kvdequant.contract import FP8_DS_MLA, LAYOUTS, InvalidCallError, RecordLayout, StepFileError
from hyv4_kvdequant.files import write_whole
from hyv4_kvdequant.validation import validate_cache, validate_slots

FORMAT = "hyv4_kvdequant.step"
VERSION = 1
_OWN_KEYS = ("format", "version", "block_size", "block_stride", "layout", "tokens_per_request", "softmax_scale")


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


def load_step(path: Path) -> Step:
    """Reads a step file whole, or not at all.

    Raises:
        StepFileError: it is missing, truncated, not a step, newer than this package, or inconsistent.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError as error:
        raise StepFileError(f"{path} does not exist. Pass the path of a step file.") from error
    except (SafetensorError, OSError) as error:
        raise StepFileError(
            f"{path} is not a readable safetensors file ({error}); it may be truncated. Record it again."
        ) from error
    _check_format(path, metadata)
    missing = [name for name in ("kv_cache", "slots") if name not in tensors]
    if missing:
        raise StepFileError(
            f"{path} is a safetensors file but not a step: it lacks {' and '.join(missing)}; it has {sorted(tensors)}."
        )
    return _build(path, metadata, tensors)


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    given = metadata.get("format", FORMAT)
    if given != FORMAT:
        raise StepFileError(f"{path} has the format {given!r}; expected {FORMAT!r}. It was written by something else.")
    version = metadata.get("version", str(VERSION))
    if not version.isdecimal() or int(version) > VERSION:
        raise StepFileError(
            f"{path} has step format version {version!r}; this release reads up to {VERSION}. Upgrade hyv4-kvdequant."
        )


def _build(path: Path, metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> Step:
    layout_name = metadata.get("layout", FP8_DS_MLA.name)
    if layout_name not in LAYOUTS:
        raise StepFileError(f"{path} holds records of layout {layout_name!r}; this release knows {sorted(LAYOUTS)}.")
    layout = LAYOUTS[layout_name]
    try:
        blocks = _view_blocks(tensors["kv_cache"], metadata, layout)
        width = int(metadata.get("tokens_per_request", "1"))
        scale = float(metadata["softmax_scale"]) if "softmax_scale" in metadata else None
        validate_slots(tensors["slots"], blocks, width)
    except (InvalidCallError, ValueError, RuntimeError) as error:
        raise StepFileError(f"{path} is inconsistent: {error}") from error
    return Step(
        kv_cache=blocks,
        topk_indices=tensors["slots"],
        layout=layout,
        tokens_per_request=width,
        softmax_scale=scale,
        tensors={name: tensors[name] for name in tensors if name not in ("kv_cache", "slots")},
        notes={key: value for key, value in metadata.items() if key not in _OWN_KEYS},
    )


def _view_blocks(stored: torch.Tensor, metadata: Mapping[str, str], layout: RecordLayout) -> torch.Tensor:
    if "block_stride" in metadata:
        block_size, stride = int(metadata["block_size"]), int(metadata["block_stride"])
        shape = (stored.shape[0], block_size, layout.row_bytes)
        if tuple(stored.shape) != (stored.shape[0], stride) or block_size * layout.row_bytes > stride:
            raise ValueError(f"kv_cache {tuple(stored.shape)} does not fit block_stride {stride}")
        stored = stored.as_strided(shape, (stride, layout.row_bytes, 1))
    return validate_cache(stored, layout)
