"""Reports: one JSON file a process and rank, replaced whole each time. `verdict.py` puts those of a run together."""

from __future__ import annotations

import json
import os
import random
import re
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from hyv4_kvdequant.ab.counters import FROM_FILES, LayerCounters, total
from hyv4_kvdequant.contract import ConfigurationError
from hyv4_kvdequant.files import file_part, write_whole

FORMAT = "hyv4_kvdequant.report"
VERSION = 2
LARGEST_BYTES = 64 * 2**20
MOST_RANKS = 2**20
LAST_NUMBER = 999_999_999

_NAME = re.compile(r"report-(?P<number>\d{6,9})-(?P<run>.+)-rank\d+-\d+-[0-9a-f]{8}\.json", re.ASCII)


@dataclass(frozen=True)
class Report:
    """What one process saw as one rank.

    Attributes:
        run_id: the same for all ranks of one run.
        rank: the worker's rank.
        updated: Unix time of this state, seconds.
        finished: whether the process ended in order.
        primary: name and distribution of the backend that serves.
        shadow: the same of the one that is compared with it; None where none was asked for.
        device: the rank's device.
        every: in eager mode, every how-manieth call is compared.
        captured: for each number of tokens captured in a graph, whether its calls are compared.
        errors: what the shadow raised while serving; it is switched off at the first.
        layers: counters of each layer, in order of first use.
        world_size: ranks of the run; each is to have a report.
        process: the process that wrote it; no two ever have the same.
        number: place among the reports that were begun in this folder, from 1. No two runs share one.
        write_every_s: seconds between two states while the process runs.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FROM_FILES

    run_id: str
    rank: Annotated[int, Field(ge=0, lt=MOST_RANKS)]
    updated: Annotated[float, Field(ge=0, le=1e12)]
    finished: bool
    primary: str
    shadow: str | None
    device: str
    every: Annotated[int, Field(ge=1, lt=2**63)] = 1
    captured: dict[str, bool] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    layers: dict[str, LayerCounters] = field(default_factory=dict)
    world_size: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 1
    process: str = ""
    number: Annotated[int, Field(ge=1, le=LAST_NUMBER)] = 1
    write_every_s: Annotated[float, Field(ge=0, le=86400)] = 3.0

    @property
    def total(self) -> LayerCounters:
        """All layers together."""
        return total(self.layers.values())


@dataclass(frozen=True)
class _Head:
    """What any version's file begins with; the rest is for the version to say."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="ignore", strict=True)

    format: str
    version: Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True)
class _File:
    __pydantic_config__: ClassVar[ConfigDict] = FROM_FILES

    format: Literal["hyv4_kvdequant.report"]
    version: Literal[2]
    report: Report


_HEAD, _FILE = TypeAdapter(_Head), TypeAdapter(_File)


# --- writing ---


def report_path(folder: Path, report: Report) -> Path:
    """Where a report lies: the name holds what makes it unique."""
    run = file_part(report.run_id)
    return folder / f"report-{report.number:06d}-{run}-rank{report.rank}-{report.process}.json"


def write_report(folder: Path, report: Report, *, group_readable: bool = False) -> Path:
    """Replaces this process's report. A process that is killed at any point leaves the last complete one.

    Raises:
        OSError: the folder cannot be written.
    """
    path = report_path(folder, report)
    content = json.dumps({"format": FORMAT, "version": VERSION, "report": asdict(report)}, indent=1)
    write_whole(path, content.encode(), group_readable=group_readable)
    return path


_beginning = threading.Lock()


def begin_report(folder: Path, report: Report, *, group_readable: bool = False) -> Report:
    """Writes a report for the first time, under the folder's next number, which no other run gets.

    Clocks have no say in which run is the newer one. The number is taken by writing the report and looking whether
    another run wrote the same one: whoever looks last sees the other. Who does, takes the next.

    Returns:
        The report with its number, for the `write_report` calls that follow.

    Raises:
        OSError: the folder cannot be written, or its numbers are used up.
    """
    # Two in one process would not tell each other's report from their own.
    with _beginning:
        while True:
            number = max((name.number for name in _names(folder)), default=0) + 1
            if number > LAST_NUMBER:
                raise OSError(f"a report there has the last number, {LAST_NUMBER}; name another folder")
            numbered = replace(report, number=number)
            path = write_report(folder, numbered, group_readable=group_readable)
            run = file_part(report.run_id)
            if all(name.number != number or name.run == run for name in _names(folder)):
                return numbered
            path.unlink()
            time.sleep(random.uniform(0, 0.02))


@dataclass(frozen=True)
class ReportName:
    """What a report's file name says: its place in the folder, and the run's id as a file name can hold it.

    Both are unknown, 0 and None, where the name is none that this package gives.
    """

    path: Path
    number: int = 0
    run: str | None = None


def _names(folder: Path) -> Iterator[ReportName]:
    for path in sorted(folder.glob("report-*.json")):
        match = _NAME.fullmatch(path.name)
        yield ReportName(path, int(match["number"]), match["run"]) if match else ReportName(path)


# --- reading ---


def read_report(path: Path) -> Report:
    """Reads one report.

    Raises:
        ConfigurationError: the file is not a report, or of another version of this package.
    """
    content = _read_bytes(path)
    try:
        head = _HEAD.validate_json(content)
    except ValidationError as error:
        raise ConfigurationError(f"{path} is not a report ({_first_problem(error)}). Pass a run's folder.") from None
    if head.format != FORMAT or head.version != VERSION:
        raise ConfigurationError(
            f"{path} has format {head.format[:80]!r} version {head.version}; this release reads {FORMAT!r} version "
            f"{VERSION}. Read it with the release that wrote it."
        )
    try:
        return _FILE.validate_json(content).report
    except ValidationError as error:
        raise ConfigurationError(
            f"{path} is damaged or was not written by this package ({_first_problem(error)}). Remove it, or run again."
        ) from None


def _read_bytes(path: Path) -> bytes:
    try:
        # Without waiting: what lies there may be a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigurationError(f"{path} is not a report (no regular file). Remove it.")
            content = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error}).") from error
    if len(content) > LARGEST_BYTES:
        raise ConfigurationError(f"{path} is not a report (more than {LARGEST_BYTES // 2**20} MiB). Remove it.")
    return content


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # A key may be as long and odd as a file can make it.
    place = ".".join(str(part)[:80].encode("unicode_escape").decode("ascii") for part in problem["loc"])
    return f"{place}: {problem['msg']}" if place else str(problem["msg"])


@dataclass(frozen=True)
class Unreadable:
    """A report that cannot be read, and why."""

    name: ReportName
    problem: str


@dataclass(frozen=True)
class Reports:
    """Every report of a folder."""

    readable: list[Report]
    unreadable: list[Unreadable] = field(default_factory=list)


def read_reports(folder: Path) -> Reports:
    """Every report in a folder, those that cannot be read with the reason.

    Raises:
        ConfigurationError: there is no such folder, no report in it, or none that can be read.
    """
    reports = Reports([])
    for name in _names(folder):
        try:
            reports.readable.append(read_report(name.path))
        except ConfigurationError as error:
            reports.unreadable.append(Unreadable(name, str(error)))
    if not reports.readable:
        if reports.unreadable:
            problems = "\n".join(one.problem for one in reports.unreadable)
            raise ConfigurationError(f"{folder} holds no report that can be read:\n{problems}")
        raise ConfigurationError(
            f"{folder} holds no report. Pass the folder that VLLM_HCU_HYV4_FP8_KV_DEQUANT_REPORT_DIR named; "
            "a report appears when the first layer is built."
        )
    return reports
