"""Shadow reports: one JSON file a rank, replaced whole each time, and their merge into one verdict."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hyv4_kvdequant.ab.counters import FirstMismatch, LayerCounters, add
from hyv4_kvdequant.contract import ConfigurationError

FORMAT = "hyv4_kvdequant.shadow_report"
VERSION = 1


@dataclass(frozen=True)
class Report:
    """What one rank saw.

    Attributes:
        run_id: the same for all ranks of one run.
        rank: the worker's rank.
        updated: Unix time of this state, seconds.
        finished: whether the process ended in order.
        primary, shadow: name and distribution of each backend.
        device: the rank's device.
        every: in eager mode, every how-manieth call is compared.
        captured: for each number of tokens captured in a graph, whether its calls are compared.
        errors: what the shadow raised while serving; it is switched off at the first.
        layers: counters of each layer, in order of first use.
        world_size: ranks of the run; each is to have a report.
    """

    run_id: str
    rank: int
    updated: float
    finished: bool
    primary: str
    shadow: str
    device: str
    every: int
    captured: dict[str, bool] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    layers: dict[str, LayerCounters] = field(default_factory=dict)
    world_size: int = 1

    @property
    def total(self) -> LayerCounters:
        """All layers together."""
        total = LayerCounters()
        for counters in self.layers.values():
            total = add(total, counters)
        return total


def report_path(folder: Path, run_id: str, rank: int) -> Path:
    """Where a rank's report lies."""
    return folder / f"shadow-{run_id}-rank{rank}.json"


def write_report(folder: Path, report: Report) -> None:
    """Replaces a rank's report. A process that is killed at any point leaves the last complete one.

    Raises:
        OSError: the folder cannot be written.
    """
    path = report_path(folder, report.run_id, report.rank)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({"format": FORMAT, "version": VERSION, **asdict(report)}, indent=1))
    os.replace(partial, path)  # noqa: PTH105 - atomic on POSIX, which Path.replace does not promise by name


def read_report(path: Path) -> Report:
    """Reads one report.

    Raises:
        ConfigurationError: the file is not a report, or newer than this package.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        kind, version = content.pop("format"), content.pop("version")
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise ConfigurationError(f"{path} is not a shadow report ({error}). Pass the folder the run wrote.") from error
    if kind != FORMAT or version > VERSION:
        raise ConfigurationError(
            f"{path} has format {kind!r} version {version}; this release reads {FORMAT!r} up to {VERSION}. Upgrade it."
        )
    layers = {name: _read_counters(counters) for name, counters in content.pop("layers").items()}
    return Report(**content, layers=layers)


def _read_counters(content: dict[str, Any]) -> LayerCounters:
    first = content.pop("first")
    return LayerCounters(**content, first=FirstMismatch(**first) if first else None)


def read_reports(folder: Path) -> list[Report]:
    """Every report in a folder.

    Raises:
        ConfigurationError: there is no such folder, no report in it, or one that cannot be read.
    """
    paths = sorted(folder.glob("shadow-*.json")) if folder.is_dir() else []
    if not paths:
        raise ConfigurationError(
            f"{folder} holds no shadow report. Pass the folder that VLLM_HCU_HYV4_FP8_KV_DEQUANT_REPORT_DIR named; "
            "a report appears when the first layer is built."
        )
    return [read_report(path) for path in paths]


@dataclass(frozen=True)
class Verdict:
    """All ranks of one run together."""

    run_id: str
    ranks: list[Report]
    layers: dict[str, LayerCounters]

    @property
    def total(self) -> LayerCounters:
        """Every rank and layer together."""
        total = LayerCounters()
        for counters in self.layers.values():
            total = add(total, counters)
        return total

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the run that have no report here."""
        expected = max(report.world_size for report in self.ranks)
        return sorted(set(range(expected)) - {report.rank for report in self.ranks})

    @property
    def ok(self) -> bool:
        """Whether every rank reported, something was compared, nothing differed and no shadow was switched off."""
        quiet = not any(report.errors for report in self.ranks) and not self.missing_ranks
        return quiet and self.total.mismatches == 0 and self.total.calls > 0


def merge(reports: Iterable[Report], run_id: str | None = None) -> Verdict:
    """One run's verdict: the named run, or the one that was updated last.

    Raises:
        ConfigurationError: no report is of the named run.
    """
    reports = list(reports)
    chosen = run_id or max(reports, key=lambda report: report.updated).run_id
    ranks = sorted((report for report in reports if report.run_id == chosen), key=lambda report: report.rank)
    if not ranks:
        known = ", ".join(sorted({report.run_id for report in reports}))
        raise ConfigurationError(f"No report is of run {chosen!r}; the folder holds {known}.")
    layers: dict[str, LayerCounters] = {}
    for report in ranks:
        for name, counters in report.layers.items():
            layers[name] = add(layers.get(name, LayerCounters()), counters)
    return Verdict(chosen, ranks, layers)
