"""What there is to know about one kind of record, and the records by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hyv4_kvdequant.records.layout import RecordLayout


@dataclass(frozen=True)
class Hostile:
    """Contents of a record that break kernels, for tests to draw from.

    Attributes:
        nope: bytes of NoPE values.
        scale: tile scales.
        rope: bits of RoPE values; empty where a record has none.
    """

    nope: tuple[int, ...]
    scale: tuple[float, ...]
    rope: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Record:
    """One kind of cache record. Everything that knows its bytes takes them from here.

    Attributes:
        layout: where the parts lie; what a backend reads records by.
        scale_rules: the rules by which a writer may choose scales; the first is the default.
        encode: `encode(kv_c (n, nope_dim) bf16, k_pe (n, rope_dim) bf16, scale_rule)` gives the records that a host's
            writer stores, (n, row_bytes) uint8, on the device of `kv_c`.
        decode: `decode(records (n, row_bytes) uint8)` gives what the contract's numerics make of them, (n, row_dim)
            int16, the bits of bf16, on the CPU. It is the oracle: plain, and independent of every backend.
        hostile: contents worth testing.
    """

    layout: RecordLayout
    scale_rules: tuple[str, ...]
    encode: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]
    hostile: Hostile


RECORDS: dict[str, Record] = {}
"""Records by their layouts' names, as step files name them."""

LAYOUTS: dict[str, RecordLayout] = {}
"""Layouts of `RECORDS`, by name."""


def register_record(record: Record) -> Record:
    """Makes a record known to step files, the contract kit and the reference. Returns it.

    Raises:
        ValueError: a different record has its name.
    """
    name = record.layout.name
    if RECORDS.setdefault(name, record) is not record:
        raise ValueError(f"the record {name!r} is registered already, as {LAYOUTS[name]}; give this one another name")
    LAYOUTS[name] = record.layout
    return record


def unregister_record(name: str) -> None:
    """Takes a record back; KeyError when none has this name."""
    del RECORDS[name], LAYOUTS[name]
