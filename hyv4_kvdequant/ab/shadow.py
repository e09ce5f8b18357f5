"""The shadow: a second backend that runs beside the first on live traffic and is compared with it on the device."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from dataclasses import replace

import torch

from hyv4_kvdequant.ab.at_exit import call_at_exit
from hyv4_kvdequant.ab.compare import compare
from hyv4_kvdequant.ab.counters import COLUMN, LayerCounters, fresh_row, read_row
from hyv4_kvdequant.ab.metrics import ShadowMetrics
from hyv4_kvdequant.ab.report import Report, write_report
from hyv4_kvdequant.contract import ConfigurationError, GatherCall, GatherDequantBackend, Target
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.probe import load_for_start_up
from hyv4_kvdequant.registry import describe
from hyv4_kvdequant.selector import get_backend
from hyv4_kvdequant.settings import Settings, variable_name

logger = logging.getLogger(__name__)

READ_EVERY_S = 3.0


class Shadow:
    """Runs the shadow backend after the primary, compares, and reports. One a device."""

    def __init__(
        self,
        primary: GatherDequantBackend,
        shadow: GatherDequantBackend,
        *,
        device: torch.device,
        rank: int,
        settings: Settings,
        run_id: str | None = None,
        world_size: int = 1,
        max_layers: int = 256,
        read_every_s: float = READ_EVERY_S,
    ) -> None:
        """Allocates the counters and starts the reading thread.

        Args:
            primary: the backend that serves.
            shadow: the backend that is compared with it.
            device: where calls run.
            rank: of this worker.
            settings: `shadow_every` and `report_dir` are read.
            run_id: the same for all ranks of a run; made up when None.
            world_size: ranks of the run.
            max_layers: most layers that are told apart; further ones share the last row.
            read_every_s: seconds between two reads of the counters.

        Raises:
            ConfigurationError: the report folder cannot be made or written.
        """
        self.primary, self.backend, self.rank = primary, shadow, rank
        self.world_size = world_size
        self.run_id = run_id or uuid.uuid4().hex[:8]
        self.report_dir = settings.report_dir
        self.every = settings.shadow_every
        self.captured: dict[str, bool] = {}
        self.errors: list[str] = []
        self.layers: dict[str, int] = {}
        self._max_layers, self._device, self._read_every_s = max_layers, device, read_every_s
        rows = [fresh_row() for _ in range(max_layers)]
        # Devices by name: hosts build their layers with the accelerator as PyTorch's default device.
        self.counters = torch.tensor(rows, dtype=torch.int64, device=device)
        self._seen = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self._turns = [0] * max_layers
        self._metrics = ShadowMetrics(shadow.name, rank)
        self._told_first = False
        self._closed = threading.Event()
        self._read_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._seen = self._seen.pin_memory()
            self._read_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._prepare_folder()
        logger.info(
            "Shadow is on: %s beside %s, rank %d, run %s, every call of %d of a layer in eager mode; reports in %s",
            describe(shadow.name),
            describe(primary.name),
            rank,
            self.run_id,
            self.every,
            self.report_dir,
        )
        self._thread = threading.Thread(target=self._watch, daemon=True, name=f"hyv4-kvdequant-shadow-{rank}")
        self._thread.start()
        self._at_exit = call_at_exit(self.close)

    def _prepare_folder(self) -> None:
        if self.report_dir is None:
            return
        try:
            self.report_dir.mkdir(parents=True, exist_ok=True)
            write_report(self.report_dir, self._report(finished=False))
        except OSError as error:
            raise ConfigurationError(
                f"{variable_name('report_dir')} is {self.report_dir}, which cannot be written ({error}). "
                "What to do: name a folder that this process may write, or unset it."
            ) from error

    def layer_index(self, name: str) -> int:
        """The counters' row of a layer; the next free one when it is new."""
        if name not in self.layers:
            self.layers[name] = min(len(self.layers), self._max_layers - 1)
        return self.layers[name]

    def observe(
        self, call: GatherCall, compact_kv: torch.Tensor, compact_indices: torch.Tensor, layer: int
    ) -> torch.Tensor | None:
        """Runs the shadow on the primary's call and compares, on the current stream.

        Args:
            call: the call, filled by the primary.
            compact_kv, compact_indices: buffers of the call's shapes for the shadow.
            layer: from `layer_index`.

        Returns:
            (2,) int64 on the device, this layer's mismatches before and after this call; None in a captured graph,
            where sampling skips the call, or once the shadow is switched off.
        """
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.errors or not self._sampled(layer, call.num_tokens, capturing):
            return None
        row = self.counters[layer]
        try:
            before = None if capturing else _mismatches(row)
            # The shadow's own buffers hold no mapping to reuse.
            run_call(
                self.backend,
                replace(call, compact_kv=compact_kv, compact_indices=compact_indices, reuse_compact_indices=False),
            )
            compare(call, compact_kv, compact_indices, row)
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            logger.exception(
                "The shadow %s raised and is switched off; %s serves on", self.backend.name, self.primary.name
            )
            return None
        return None if before is None else torch.stack([before, _mismatches(row)])

    def _sampled(self, layer: int, num_tokens: int, capturing: bool) -> bool:
        sampled = self._turns[layer] % self.every == 0
        self._turns[layer] += 1
        if capturing:
            # What a graph holds is fixed now: a batch size is compared in every replay, or in none.
            key = str(num_tokens)
            sampled = self.captured.setdefault(key, sampled)
        return sampled

    # --- reading ---

    def _watch(self) -> None:
        while not self._closed.wait(self._read_every_s):
            self._tell(finished=False)

    def _tell(self, *, finished: bool) -> None:
        """Reads the counters and passes them on: log line at the first mismatch, report, metrics."""
        self._read(wait=finished)
        report = self._report(finished=finished)
        self._metrics.update(report.layers)
        self._tell_first(report)
        if self.report_dir is None:
            return
        try:
            write_report(self.report_dir, report)
        except OSError as error:
            logger.error("Shadow reports stop: %s cannot be written (%s)", self.report_dir, error)
            self.report_dir = None

    def _read(self, *, wait: bool) -> None:
        if self._read_stream is None:
            self._seen.copy_(self.counters)
            return
        # No synchronisation and no event: either could break a graph capture on another thread. What this copy
        # brings is used at the next read, when it has long landed.
        with torch.cuda.stream(self._read_stream):
            if wait:
                torch.cuda.synchronize(self._device)
            self._seen.copy_(self.counters, non_blocking=True)
        if wait:
            torch.cuda.synchronize(self._device)

    def snapshot(self) -> dict[str, LayerCounters]:
        """Counters of every layer as last read."""
        rows = self._seen.tolist()
        return {name: read_row(rows[index]) for name, index in list(self.layers.items())}

    def _report(self, *, finished: bool) -> Report:
        return Report(
            run_id=self.run_id,
            rank=self.rank,
            world_size=self.world_size,
            updated=time.time(),
            finished=finished,
            primary=describe(self.primary.name),
            shadow=describe(self.backend.name),
            device=str(self._device),
            every=self.every,
            captured=dict(self.captured),
            errors=list(self.errors),
            layers=self.snapshot(),
        )

    def _tell_first(self, report: Report) -> None:
        if self._told_first:
            return
        for layer, counters in report.layers.items():
            if counters.first is not None:
                self._told_first = True
                logger.error(
                    "Shadow mismatch: %s differs from %s in layer %s, rank %d: %s",
                    self.backend.name,
                    self.primary.name,
                    layer,
                    self.rank,
                    counters.first,
                )
                return

    def close(self) -> None:
        """Reads the counters a last time, writes the report and a summary line, and ends the thread."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        self._at_exit.cancel()
        self._tell(finished=True)
        total = self._report(finished=True).total
        logger.info(
            "Shadow %s beside %s, rank %d: %d calls, %d rows compared, %d rows differ, %d indices disagree",
            self.backend.name,
            self.primary.name,
            self.rank,
            total.calls,
            total.rows_compared,
            total.rows_differ,
            total.index_disagreements,
        )


def _mismatches(row: torch.Tensor) -> torch.Tensor:
    return row[COLUMN["rows_differ"]] + row[COLUMN["index_disagreements"]]


def make_shadow(
    primary: GatherDequantBackend,
    settings: Settings,
    target: Target,
    rank: int,
    run_id: str | None = None,
    *,
    world_size: int = 1,
) -> Shadow | None:
    """The shadow that the settings ask for, or None when they ask for none.

    Raises:
        ConfigurationError: the shadow is the primary, or the report folder cannot be written.
        BackendError: the shadow cannot be had; as for a primary, nothing is tried in its place.
    """
    if settings.shadow is None:
        return None
    if settings.shadow == primary.name:
        raise ConfigurationError(
            f"{variable_name('shadow')} is {settings.shadow!r}, the backend that already serves; comparing it with "
            "itself would prove nothing. What to do: name another backend, or unset it."
        )
    load_for_start_up({settings.shadow: settings.source("shadow")})
    backend = get_backend(settings.shadow, target, settings.source("shadow"))
    return Shadow(
        primary, backend, device=target.device, rank=rank, settings=settings, run_id=run_id, world_size=world_size
    )
