"""The interface: one call, and the class that serves it. Write a backend against this page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from hyv4_kvdequant.contract.layout import FP8_DS_MLA, RecordLayout
from hyv4_kvdequant.contract.target import Target

API_VERSION = 1
"""The version of this interface. `docs/reference.md` says what may change within a version."""


@dataclass(frozen=True)
class Features:
    """Plain facts about a backend. The core sets an optional field of a call only where a feature admits it.

    Attributes:
        request_dedup: understands `tokens_per_request` > 1 and may store a slot once for one request's query rows.
        mapping_reuse: with `reuse_compact_indices` it skips the mapping work; without this feature the core
            never sets that field and the backend writes the mapping every time.
        graph_safe: may be recorded in a CUDA or HIP graph and replayed on other contents.
    """

    request_dedup: bool = False
    mapping_reuse: bool = False
    graph_safe: bool = True


@dataclass(frozen=True, eq=False)
class GatherCall:
    """One gather + dequantize, already validated by the core. New optional fields may be added.

    Attributes:
        kv_cache: (num_blocks, block_size, row_bytes) uint8; record of slot `s` starts at byte
            `(s // block_size) * stride(0) + (s % block_size) * stride(1)`; `stride(1) == row_bytes`,
            `stride(0)` may exceed `block_size * row_bytes`. Offsets may pass 2**31.
        topk_indices: (num_tokens, topk) int32, contiguous; a value outside [0, num_slots) is unfilled.
        compact_kv: (num_tokens * topk, row_dim) bf16, contiguous; written in place.
        compact_indices: (num_tokens, topk) int32, contiguous; written in place.
        layout: the cache's record.
        tokens_per_request: adjacent query rows of one request; divides num_tokens. 1 unless `request_dedup`.
        reuse_compact_indices: `compact_indices` already holds this backend's mapping for these very
            `topk_indices` (an earlier layer of a group that shares an indexer). False unless `mapping_reuse`.

    `num_tokens` and `topk` are at least 1 when a backend is called.
    """

    kv_cache: torch.Tensor
    topk_indices: torch.Tensor
    compact_kv: torch.Tensor
    compact_indices: torch.Tensor
    layout: RecordLayout = FP8_DS_MLA
    tokens_per_request: int = 1
    reuse_compact_indices: bool = False

    @property
    def num_tokens(self) -> int:
        return self.topk_indices.shape[0]

    @property
    def topk(self) -> int:
        return self.topk_indices.shape[1]

    @property
    def block_size(self) -> int:
        return self.kv_cache.shape[1]

    @property
    def num_slots(self) -> int:
        return self.kv_cache.shape[0] * self.kv_cache.shape[1]


class GatherDequantBackend(ABC):
    """Gathers selected slots of a paged fp8 KV cache and dequantizes them to BF16.

    A subclass sets `name` (the entry point's name), `api_version` and `features`, and implements two methods.
    One instance serves one `Target`; it must not keep state that changes from call to call.
    """

    api_version: ClassVar[int] = API_VERSION
    name: ClassVar[str]
    features: Features = Features()

    def __init__(self, target: Target) -> None:
        """Called once per target, after `unavailable_reasons(target)` returned an empty list."""
        self.target = target

    @classmethod
    @abstractmethod
    def unavailable_reasons(cls, target: Target) -> list[str]:
        """Every reason why this backend cannot serve `target`, as sentences; an empty list means it can.

        Never raises and never guesses: a fact of the target that is None is no reason.
        """

    @abstractmethod
    def gather_dequant(self, call: GatherCall) -> None:
        """Fills `call.compact_kv` and `call.compact_indices` in place, on the current stream.

        1. For every filled entry, `compact_kv[compact_indices[t, k]]` is the dequantized record of
           `topk_indices[t, k]`, bit for bit (any NaN equals any other NaN in the NoPE part).
        2. For every unfilled entry, `compact_indices[t, k] == -1`, and nothing is read through it.
        3. With `tokens_per_request == 1`, `compact_indices[t, k] == t * topk + k` for filled entries and
           rows of unfilled entries are all zero bits.
        4. With more, an index may point to any row of this call that holds its slot; rows that no index
           points to are unspecified.

        NoPE value i is the fp32 product `float(e4m3 byte) * scale[i // tile_dim]` rounded to nearest even
        in bf16, subnormals kept. RoPE bits are copied. No host synchronisation, no allocation whose size
        depends on data.
        """
