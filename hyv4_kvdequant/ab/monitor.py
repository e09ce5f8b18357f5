"""The monitor: owns a device's counters, reads them beside the serving thread, and tells what they say.

It exists whether or not a shadow runs, since entries that attention lost are counted either way.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hyv4_kvdequant.ab.at_exit import call_at_exit
from hyv4_kvdequant.ab.counters import COLUMN, LayerCounters, fresh_row, read_row
from hyv4_kvdequant.ab.metrics import Metrics
from hyv4_kvdequant.ab.report import Report, begin_report, report_path, write_report
from hyv4_kvdequant.contract import ConfigurationError
from hyv4_kvdequant.files import encodable, make_folder, process_name
from hyv4_kvdequant.memory import outside_memory_pools
from hyv4_kvdequant.registry import describe
from hyv4_kvdequant.settings import Settings, variable_name

logger = logging.getLogger(__name__)

READ_EVERY_S = 3.0
_LOST = COLUMN["lost_entries"]


@dataclass
class ShadowState:
    """What a report says of the shadow; `captured` and `errors` grow while it runs."""

    name: str
    every: int
    captured: dict[str, bool] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


class Monitor:
    """Counters of every layer of one device; log lines, metrics and the report made of them."""

    def __init__(
        self,
        primary: str,
        settings: Settings,
        *,
        device: torch.device,
        rank: int = 0,
        run_id: str | None = None,
        world_size: int = 1,
        shadow: ShadowState | None = None,
        max_layers: int = 256,
        read_every_s: float = READ_EVERY_S,
    ) -> None:
        """Allocates the counters, begins the report and starts the reading thread.

        Args:
            primary: name of the backend that serves.
            settings: `report_dir` and `report_group_readable` are read.
            device: where calls run.
            rank: of this worker.
            run_id: the same for all ranks of a run; made up when None.
            world_size: ranks of the run.
            shadow: of the backend that is compared, where there is one.
            max_layers: most layers that are told apart; further ones share the last row.
            read_every_s: seconds between two reads of the counters.

        Raises:
            ConfigurationError: the report folder cannot be made or written.
        """
        self.primary, self.shadow, self.rank, self.world_size = primary, shadow, rank, world_size
        self.run_id = run_id or uuid.uuid4().hex[:8]
        self.report_dir, self._group_readable = settings.report_dir, settings.report_group_readable
        self.layers: dict[str, int] = {}
        self._max_layers, self._device, self._read_every_s = max_layers, device, read_every_s
        rows = [fresh_row() for _ in range(max_layers)]
        # Devices by name: hosts build their layers with the accelerator as PyTorch's default device.
        self._seen = torch.tensor(rows, dtype=torch.int64, device="cpu")
        # The thread reads on while vLLM sleeps, so the counters may not lie where sleep mode takes memory away.
        self.counters = outside_memory_pools(device, lambda: torch.tensor(rows, dtype=torch.int64, device=device))
        self._metrics = Metrics(primary, shadow.name if shadow else None, rank)
        self._told_first = False
        self._told_lost: set[str] = set()
        self._unwritten: tuple[object, ...] | None = None
        self._failures: dict[str, str] = {}
        self._closed = threading.Event()
        # One at a time: two that count up from the same last state would count twice.
        self._telling = threading.RLock()
        self._read_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._seen = self._seen.pin_memory()
            self._read_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._number = self._begin()
        self._thread = threading.Thread(target=self._watch, daemon=True, name=f"hyv4-kvdequant-monitor-{rank}")
        self._thread.start()
        self._at_exit = call_at_exit(self.close)

    def _begin(self) -> int:
        if self.report_dir is None:
            return 1
        try:
            make_folder(self.report_dir, group_readable=self._group_readable)
            first = self._report(finished=False, number=1)
            return begin_report(self.report_dir, first, group_readable=self._group_readable).number
        except OSError as error:
            raise ConfigurationError(
                f"{variable_name('report_dir')} is {self.report_dir}, which cannot be written ({error}). "
                "What to do: name a folder that this process may write, or unset it."
            ) from error

    @property
    def report_file(self) -> Path | None:
        """Where this process's report lies; None without a report folder."""
        report = self._report(finished=False, number=self._number)
        return None if self.report_dir is None else report_path(self.report_dir, report)

    # --- counting ---

    def layer_index(self, name: str) -> int:
        """The counters' row of a layer; the next free one when it is new."""
        if name not in self.layers:
            self.layers[name] = min(len(self.layers), self._max_layers - 1)
        return self.layers[name]

    def row(self, layer: int) -> torch.Tensor:
        """(len(FIELDS),) int64 on the device: a layer's counters, by `layer_index`."""
        return self.counters[layer]

    def lost_counter(self, name: str) -> torch.Tensor:
        """(1,) int64 on the device: the layer's filled entries that became unfilled. Added to, never reset.

        The same memory at every call, so that a captured graph may hold it.
        """
        return self.counters[self.layer_index(name), _LOST : _LOST + 1]

    # --- reading ---

    def _watch(self) -> None:
        while not self._closed.wait(self._read_every_s):
            self.tell(finished=False)

    def tell(self, *, finished: bool) -> None:
        """Reads the counters and passes them on: log lines, metrics, report.

        A failure is logged and tried again at the next call; nothing of what was counted is lost by it.
        """
        with self._telling:
            self._tell_now(finished=finished)

    def _tell_now(self, *, finished: bool) -> None:
        try:
            self._read(wait=finished)
        except RuntimeError as error:
            # The device is gone. What was read last is still to be told, as the state of a process that did not end.
            self._tell_failure(f"The counters of {self._device} cannot be read", error)
            finished = False
        report = self._report(finished=finished, number=self._number)
        self._tell_first(report)
        self._tell_lost(report)
        self._write(report)
        try:
            self._metrics.update(report.layers)
        except Exception as error:  # prometheus-client's files may fail as any file; log and report do not need them
            self._tell_failure("The metrics cannot be brought up to date", error)

    def _tell_failure(self, what: str, error: Exception) -> None:
        """Says it when it is new, not every few seconds."""
        failure = f"{type(error).__name__}: {error}"
        if self._failures.get(what) != failure:
            self._failures[what] = failure
            logger.error("%s, rank %d (%s). It is tried again.", what, self.rank, failure, exc_info=error)

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
        return {encodable(name): read_row(rows[index]) for name, index in list(self.layers.items())}

    def _report(self, *, finished: bool, number: int) -> Report:
        shadow = self.shadow
        return Report(
            run_id=encodable(self.run_id),
            rank=self.rank,
            updated=time.time(),
            finished=finished,
            primary=describe(self.primary),
            shadow=describe(shadow.name) if shadow else None,
            device=str(self._device),
            every=shadow.every if shadow else 1,
            captured=dict(shadow.captured) if shadow else {},
            errors=[encodable(error) for error in shadow.errors] if shadow else [],
            layers=self.snapshot(),
            world_size=self.world_size,
            process=process_name(),
            number=number,
            write_every_s=self._read_every_s,
        )

    def _tell_first(self, report: Report) -> None:
        if self._told_first or report.shadow is None:
            return
        for layer, counters in report.layers.items():
            if counters.first is not None:
                self._told_first = True
                logger.error(
                    "Shadow mismatch: %s differs from %s in layer %s, rank %d: %s",
                    self.shadow.name if self.shadow else None,
                    self.primary,
                    layer,
                    self.rank,
                    counters.first,
                )
                return

    def _tell_lost(self, report: Report) -> None:
        for layer, counters in report.layers.items():
            if counters.lost_entries and layer not in self._told_lost:
                self._told_lost.add(layer)
                logger.error(
                    "Attention lost rows: %d filled entries of layer %s, rank %d, became unfilled between the host's "
                    "indices and the sparse kernel. What was served from them is wrong. What to do: stop serving with "
                    "this configuration, and report it.",
                    counters.lost_entries,
                    layer,
                    self.rank,
                )

    def _write(self, report: Report) -> None:
        if self.report_dir is None:
            return
        try:
            write_report(self.report_dir, report, group_readable=self._group_readable)
        except OSError as error:
            self._tell_unwritten(report, error)
        else:
            if self._unwritten is not None:
                self._unwritten = None
                logger.info("The report of rank %d is written again, with all that was counted meanwhile", self.rank)

    def _tell_unwritten(self, report: Report, error: OSError) -> None:
        """Says what no file holds now: at first, and whenever what a reader of the log has to know changes."""
        every = report.total
        # Calls are counted all the time; a line for each state of theirs would be noise.
        unwritten = (error.errno, every.mismatches, every.lost_entries, len(report.errors), report.finished)
        if unwritten == self._unwritten:
            return
        self._unwritten = unwritten
        logger.error(
            "The report of rank %d cannot be written to %s (%s); %s. Counted so far: %s",
            self.rank,
            self.report_dir,
            error,
            "this was the last attempt" if self._closed.is_set() else f"tried again every {self._read_every_s:g} s",
            every,
        )

    def close(self) -> None:
        """Reads the counters a last time, writes the report and a summary line, and ends the thread."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        self._at_exit.cancel()
        self.tell(finished=True)
        every = self._report(finished=True, number=self._number).total
        if self.shadow is not None:
            logger.info(
                "Shadow %s beside %s, rank %d: %d calls, %d rows compared, %d rows differ, %d indices disagree",
                self.shadow.name,
                self.primary,
                self.rank,
                every.calls,
                every.rows_compared,
                every.rows_differ,
                every.index_disagreements,
            )
        if every.lost_entries:
            logger.error("Attention lost rows, rank %d: %d filled entries in all", self.rank, every.lost_entries)
