"""Recording intercepted calls as step files: the selected records, renumbered, and nothing else of the cache.

A recorded call holds slots, cache records and, only when asked for, queries: activations, from which no prompt text can
be read off. Eager calls only; a captured graph runs no Python.
"""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch

from hyv4_kvdequant.ab.at_exit import call_at_exit
from hyv4_kvdequant.contract import ConfigurationError, GatherCall, GatherDequantBackend, RecordLayout
from hyv4_kvdequant.files import encodable, file_part, make_folder, unique_name
from hyv4_kvdequant.registry import describe
from hyv4_kvdequant.settings import Settings, variable_name
from hyv4_kvdequant.steps import Step, save_step
from hyv4_kvdequant.versions import installed_versions

logger = logging.getLogger(__name__)

_MIB = 2**20


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """One call's input as it was, on the device; `records` is (num_tokens * topk, row_bytes) uint8."""

    records: torch.Tensor
    slots: torch.Tensor
    num_slots: int
    layout: RecordLayout
    tokens_per_request: int
    layer: str
    number: int
    query: torch.Tensor | None
    evidence: torch.Tensor | None


class Recorder:
    """Writes the first calls, or the first that a shadow found wrong, from a thread of its own."""

    def __init__(self, primary: GatherDequantBackend, settings: Settings, rank: int, run_id: str | None = None) -> None:
        """Makes the folder and starts the writing thread.

        Raises:
            ConfigurationError: no report folder is set, or it cannot be made.
        """
        if settings.report_dir is None:
            raise ConfigurationError(
                f"{variable_name('trace')} or {variable_name('trace_on_mismatch')} is set, but "
                f"{variable_name('report_dir')} is not. What to do: name a folder for the traces."
            )
        try:
            make_folder(settings.report_dir, group_readable=settings.report_group_readable)
        except OSError as error:
            raise ConfigurationError(
                f"{variable_name('report_dir')}: {error}. Name a folder that can be made."
            ) from error
        self.folder, self.rank, self.run_id = settings.report_dir, rank, run_id or uuid.uuid4().hex[:8]
        self.group_readable = settings.report_group_readable
        self.only_mismatches, self.with_queries = settings.trace_on_mismatch, settings.trace_queries
        self.left = settings.trace or (1 if settings.trace_on_mismatch else 0)
        self.bytes_left = settings.trace_mb * _MIB
        self.backend = describe(primary.name)
        self.written: list[Path] = []
        self.failed_layers: set[str] = set()
        self._counting = threading.Lock()
        self._number, self._writer = 0, unique_name()
        self._queue: queue.Queue[_Snapshot | None] = queue.Queue(maxsize=4)
        self._thread = threading.Thread(target=self._write_all, daemon=True, name=f"hyv4-kvdequant-trace-{rank}")
        self._thread.start()
        self._at_exit = call_at_exit(self.close)

    def record(
        self, call: GatherCall, layer: str, query: torch.Tensor | None = None, evidence: torch.Tensor | None = None
    ) -> None:
        """Takes a snapshot of an eager call on the current stream, to be written later.

        Args:
            call: the call; its cache may change as soon as this returns.
            layer: the layer's name.
            query: (num_tokens, num_heads, row_dim) bf16; kept only when queries were asked for.
            evidence: what `Shadow.observe` returned; decides later whether a mismatch was seen in this call.
        """
        if self.left <= 0 or layer in self.failed_layers or not self._thread.is_alive():
            return
        if call.kv_cache.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        if self.only_mismatches and evidence is None:
            return
        self._number += 1
        size = call.topk_indices.numel() * call.layout.row_bytes
        if size > self.bytes_left or self._queue.full():
            return
        try:
            snapshot = self._snapshot(call, layer, query, evidence)
        except RuntimeError as error:  # no memory left for it: serving goes on
            self._stop(layer, error)
            return
        if not self.only_mismatches:
            self._count(-1)
        self._queue.put(snapshot)

    def _snapshot(
        self, call: GatherCall, layer: str, query: torch.Tensor | None, evidence: torch.Tensor | None
    ) -> _Snapshot:
        return _Snapshot(
            _selected_records(call),
            call.topk_indices.clone(),
            call.num_slots,
            call.layout,
            call.tokens_per_request,
            layer,
            self._number,
            query.clone() if query is not None and self.with_queries else None,
            evidence,
        )

    def _stop(self, layer: str, error: Exception) -> None:
        self.failed_layers.add(layer)
        logger.error(
            "Recording of layer %s stops: no trace of it can be made in %s (%s: %s)",
            encodable(layer),
            self.folder,
            type(error).__name__,
            encodable(str(error)),
        )

    def _count(self, change: int) -> None:
        # Both threads do.
        with self._counting:
            self.left += change

    def _write_all(self) -> None:
        while (snapshot := self._queue.get()) is not None:
            # Calls that were queued before the failure would each fail again, with a line of its own.
            if snapshot.layer not in self.failed_layers:
                try:
                    self._write(snapshot)
                    continue
                except Exception as error:  # whatever it is, it may end neither this thread nor the other layers
                    self._stop(snapshot.layer, error)
            if not self.only_mismatches:
                self._count(1)

    def _write(self, snapshot: _Snapshot) -> None:
        # Which queued calls differ is known only here, so calls beyond the last one wanted may be waiting.
        if self.only_mismatches and (self.left <= 0 or not _saw_mismatch(snapshot.evidence)):
            return
        step = _renumbered(snapshot, self._notes(snapshot))
        size = step.kv_cache.numel()
        if size > self.bytes_left:
            return
        path = self.folder / self._name(snapshot)
        save_step(path, step, group_readable=self.group_readable)
        self.bytes_left -= size
        if self.only_mismatches:
            self._count(-1)
        self.written.append(path)

    def _name(self, snapshot: _Snapshot) -> str:
        """What makes it unique, whoever else writes into the folder; then what a person looks for."""
        run, layer = file_part(self.run_id), file_part(snapshot.layer)
        return f"trace-{run}-rank{self.rank}-{self._writer}-{snapshot.number:05d}-{layer}.safetensors"

    def _notes(self, snapshot: _Snapshot) -> dict[str, str]:
        versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items() if version)
        return {
            "layer": encodable(snapshot.layer),
            "rank": str(self.rank),
            "run_id": self.run_id,
            "call": str(snapshot.number),
            "primary": self.backend,
            "versions": versions,
        }

    def close(self) -> None:
        """Writes what is waiting and ends the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._at_exit.cancel()


def _selected_records(call: GatherCall) -> torch.Tensor:
    slots = call.topk_indices.view(-1)
    readable = torch.where((slots >= 0) & (slots < call.num_slots), slots, 0).long()
    return call.kv_cache[readable // call.block_size, readable % call.block_size]


def _saw_mismatch(evidence: torch.Tensor | None) -> bool:
    if evidence is None:
        return False
    before, after = evidence.tolist()
    return bool(after > before)


def _renumbered(snapshot: _Snapshot, notes: dict[str, str]) -> Step:
    """A step of the selected records alone: slot 0, 1, ... in order of the original numbers; unfilled ones are -1."""
    slots = snapshot.slots.cpu().view(-1)
    filled = (slots >= 0) & (slots < snapshot.num_slots)
    unique, position = torch.unique(slots[filled], return_inverse=True)
    records = torch.zeros((max(len(unique), 1), snapshot.layout.row_bytes), dtype=torch.uint8, device="cpu")
    records[position] = snapshot.records.cpu()[filled]
    renumbered = torch.full_like(slots, -1)
    renumbered[filled] = position.int()
    tensors = {} if snapshot.query is None else {"query": snapshot.query.cpu()}
    return Step(
        records.unsqueeze(1),
        renumbered.view(snapshot.slots.shape),
        snapshot.layout,
        snapshot.tokens_per_request,
        tensors=tensors,
        notes=notes,
    )


def make_recorder(
    primary: GatherDequantBackend, settings: Settings, rank: int, run_id: str | None = None
) -> Recorder | None:
    """The recorder that the settings ask for, or None.

    Raises:
        ConfigurationError: as `Recorder`, or mismatches are to be recorded without a shadow.
    """
    if settings.trace_on_mismatch and settings.shadow is None:
        raise ConfigurationError(
            f"{variable_name('trace_on_mismatch')} is set, but no shadow would find a mismatch. "
            f"What to do: name one with {variable_name('shadow')}."
        )
    if not settings.trace and not settings.trace_on_mismatch:
        return None
    return Recorder(primary, settings, rank, run_id)
