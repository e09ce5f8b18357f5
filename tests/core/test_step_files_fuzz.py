"""Step files from elsewhere: whatever one holds, it is read and can be worked with, or refused in a sentence."""

from __future__ import annotations

import json
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hyv4_kvdequant as h
from hyv4_kvdequant.ab.replay import replay
from hyv4_kvdequant.reference import sparse_attention
from hyv4_kvdequant.selector import get_backend
from hyv4_kvdequant.steps import load_step

CPU = torch.device("cpu")
ROW_BYTES, ROW_DIM, NOPE_DIM = 656, 576, 512
ITEM_SIZES = {"U8": 1, "I8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F4": 1, "I16": 2, "U16": 2, "BF16": 2, "F16": 2}
ITEM_SIZES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8, "F6_E2M3": 1, "Q7": 1}
NOISE = np.random.default_rng(0).bytes(1 << 17)


@dataclass
class File:
    """A safetensors file as what its header declares, so that what no library would write can be written."""

    tensors: dict[str, list[Any]] = field(default_factory=dict)
    """{name: [dtype, shape]}"""
    metadata: Any = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)
    """What is put over the header in the end."""

    def to_bytes(self) -> bytes:
        header: dict[str, Any] = {"__metadata__": self.metadata} if self.metadata else {}
        end = 0
        for name, (dtype, shape) in self.tensors.items():
            size = ITEM_SIZES[dtype] * int(np.prod([int(size) for size in shape], dtype=object))
            size = min(max(size, 0), len(NOISE))
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps({**header, **self.header}).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + (NOISE * (end // len(NOISE) + 1))[:end]


@st.composite
def right_files(draw: st.DrawFn) -> File:
    """A file that is right, with or without each of its optional parts."""
    num_blocks, block_size, gap = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([None, 0, 100])),
    )
    width = draw(st.integers(1, 2))
    tokens, topk, heads = width * draw(st.integers(0, 2)), draw(st.integers(0, 5)), draw(st.integers(1, 2))
    metadata = {
        "format": "hyv4_kvdequant.step",
        "version": "1",
        "block_size": str(block_size),
        "layout": "fp8_ds_mla",
        "tokens_per_request": str(width),
        "softmax_scale": "0.04",
        "layer": "model.layers.0",
    }
    kept = draw(st.sets(st.sampled_from(sorted(metadata)))) | {"softmax_scale", "tokens_per_request"}
    cache = [num_blocks, block_size, ROW_BYTES]
    if gap is not None:
        stride = block_size * ROW_BYTES + gap
        metadata["block_stride"], cache = str(stride), [num_blocks, stride]
        kept |= {"block_size", "block_stride"}
    tensors: dict[str, list[Any]] = {"kv_cache": ["U8", cache], "slots": ["I32", [tokens, topk]]}
    beside: dict[str, list[Any]] = {
        "query": ["BF16", [tokens, heads, ROW_DIM]],
        "attn_sink": ["F32", [heads]],
        "rows": ["BF16", [num_blocks * block_size, ROW_DIM]],
        "fp8_out": ["BF16", [tokens, heads, NOPE_DIM]],
        "bf16_lse": ["F32", [tokens, heads]],
        "mine": ["F64", [3]],
    }
    tensors |= {name: beside[name] for name in draw(st.sets(st.sampled_from(sorted(beside))))}
    return File(tensors, {key: value for key, value in metadata.items() if key in kept})


NUMBERS = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "64",
    "1.0",
    "+1",
    " 1",
    "1_0",
    "0x1",
    "\u0663",
    "2147483648",
    "9" * 30,
    "9" * 5000,
]
FLOATS = ["nan", "inf", "-inf", "-0.0", "1e999", "1e39", "1e-320", "-0.04"]
TEXTS = ["", " ", "\0", "[/]l0", "true", "None", "fp8_ds_mla", "nvfp4_ds_mla", "hyv4_kvdequant.step", "x" * 10_000]
texts = st.one_of(st.sampled_from(NUMBERS + FLOATS + TEXTS), st.text(max_size=6))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=4,
)
sizes = st.one_of(st.integers(0, 5), st.sampled_from([8, 64, ROW_DIM, ROW_BYTES, 2**31, 2**32, 2**60, 2**63, 2**64]))
names = st.one_of(st.sampled_from(["kv_cache", "slots", "query", "attn_sink", "rows", "fp8_out", "bf16_out"]), texts)
keys = st.one_of(
    st.sampled_from(["version", "block_size", "block_stride", "layout", "tokens_per_request", "softmax_scale"]), texts
)


@st.composite
def broken_files(draw: st.DrawFn) -> File:
    """A right file to which one to three things were done; often it is still right."""
    file = draw(right_files())
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["text", "text", "shape", "shape", "dtype", "drop", "add", "json", "header"]))
        name = draw(st.sampled_from(sorted(file.tensors))) if file.tensors else "kv_cache"
        if kind == "text" and isinstance(file.metadata, dict):
            file.metadata[draw(keys)] = draw(texts)
        elif kind == "json":
            file.metadata = draw(st.one_of(json_values, st.dictionaries(keys, json_values, max_size=2)))
        elif kind == "shape" and file.tensors:
            shape = list(file.tensors[name][1])
            how = draw(st.sampled_from(["any", "one", "more", "less"]))
            if how == "any" or not shape:
                shape = draw(st.lists(sizes, max_size=4))
            elif how == "one":
                shape[draw(st.integers(0, len(shape) - 1))] = draw(sizes)
            else:
                shape = [*shape, 1] if how == "more" else shape[:-1]
            file.tensors[name] = [file.tensors[name][0], shape]
        elif kind == "dtype" and file.tensors:
            file.tensors[name] = [draw(st.sampled_from(sorted(ITEM_SIZES))), file.tensors[name][1]]
        elif kind == "drop" and file.tensors:
            del file.tensors[name]
        elif kind == "add":
            added = [draw(st.sampled_from(sorted(ITEM_SIZES))), draw(st.lists(sizes, max_size=4))]
            file.tensors[draw(names)] = added
        elif kind == "header":
            file.header[draw(names)] = draw(json_values)
    return file


def work_with(path: Path) -> str:
    """Reads a file and does with it what our commands do; anything but a result or StepFileError is a defect."""
    backend = get_backend("torch", h.Target.detect(CPU))
    try:
        step = load_step(path)
    except h.StepFileError:
        with pytest.raises(h.StepFileError) as caught:  # a trace is read by the same rules
            list(replay([path], backend, backend, CPU, runs=0))
        assert str(caught.value).startswith(str(path))
        assert len(str(caught.value)) < 2000, "a file's text is shown in part"
        return "refused"
    (replayed,) = replay([path], backend, backend, CPU, runs=0)
    assert replayed.counters.rows_differ == 0
    scale = step.softmax_scale
    assert scale is None or 0 < scale < float("inf")
    result = h.gather_dequantize(step.kv_cache, step.topk_indices, backend="torch")
    if "query" in step.tensors and scale is not None:
        out, lse = sparse_attention(step.tensors["query"], *result, scale, step.tensors.get("attn_sink"))
        for name, ours in (("out", out), ("lse", lse)):
            for recorded in (step.tensors.get(f"{kernel}_{name}") for kernel in ("fp8", "bf16")):
                assert recorded is None or (recorded.shape, recorded.dtype) == (ours.shape, ours.dtype)
    if "rows" in step.tensors:
        assert step.tensors["rows"].shape == (step.kv_cache.shape[0] * step.kv_cache.shape[1], ROW_DIM)
    return "read"


def test_a_right_file_is_read(tmp_path: Path) -> None:
    @settings(max_examples=200, deadline=None)
    @given(right_files())
    def check(file: File) -> None:
        path = tmp_path / "step"
        path.write_bytes(file.to_bytes())
        assert work_with(path) == "read"

    check()


def test_whatever_a_header_declares_is_read_or_refused(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=2200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(broken_files())
    def check(file: File) -> None:
        path = tmp_path / "step"
        path.write_bytes(file.to_bytes())
        seen[work_with(path)] += 1

    check()
    assert seen["read"] > 200, seen
    assert seen["refused"] > 500, seen


def test_whatever_bytes_a_file_holds_are_read_or_refused(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    right = File(
        {"kv_cache": ["U8", [2, 2 * ROW_BYTES + 100]], "slots": ["I32", [2, 3]], "query": ["BF16", [2, 1, ROW_DIM]]},
        {
            "block_size": "2",
            "block_stride": str(2 * ROW_BYTES + 100),
            "tokens_per_request": "2",
            "softmax_scale": "1.5",
        },
    ).to_bytes()
    header = struct.unpack("<Q", right[:8])[0] + 8
    flips = st.tuples(st.integers(0, header - 1) | st.integers(0, len(right) - 1), st.integers(0, 7))

    @settings(max_examples=1500, deadline=None)
    @given(st.lists(flips, max_size=3), st.none() | st.integers(0, len(right)), st.binary(max_size=4))
    def check(flipped: list[tuple[int, int]], cut: int | None, added: bytes) -> None:
        data = bytearray(right)
        for place, bit in flipped:
            data[place] ^= 1 << bit
        path = tmp_path / "step"
        path.write_bytes(bytes(data[:cut]) + added)
        seen[work_with(path)] += 1

    check()
    assert seen["read"] > 20, seen
    assert seen["refused"] > 300, seen
