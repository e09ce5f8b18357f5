"""What the reports of one run prove together: that the backends agree, that something is wrong, or neither."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hyv4_kvdequant.ab.counters import LayerCounters, add, total
from hyv4_kvdequant.ab.report import Report, Reports
from hyv4_kvdequant.contract import ConfigurationError
from hyv4_kvdequant.files import file_part

# A report is written every few seconds; one that is older by this much is of a process that is gone or stuck.
STALE_AFTER_S = 60.0
_STATES_MISSED = 10

Outcome = Literal["agree", "differ", "inconclusive"]


@dataclass(frozen=True)
class Verdict:
    """All ranks of one run together.

    Attributes:
        run_id: the run.
        ranks: its reports, by rank; none where no report of it can be read.
        layers: counters of each layer, over all ranks.
        differences: sentences that say what is wrong; any makes the outcome "differ".
        gaps: sentences that say what is not proved; without a difference any makes the outcome "inconclusive".
        other_runs: ids of the other runs in the folder, the newest first.
    """

    run_id: str
    ranks: list[Report]
    layers: dict[str, LayerCounters]
    differences: list[str]
    gaps: list[str]
    other_runs: list[str]

    @property
    def total(self) -> LayerCounters:
        """Every rank and layer together."""
        return total(self.layers.values())

    @property
    def outcome(self) -> Outcome:
        """`agree` only where every rank compared rows and none differed, until the end."""
        if self.differences:
            return "differ"
        return "inconclusive" if self.gaps else "agree"

    @property
    def ok(self) -> bool:
        """Whether the backends are known to agree."""
        return self.outcome == "agree"

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the run that have no report here."""
        return _missing(self.ranks)


def merge(reports: Reports, run_id: str | None = None, *, now: float | None = None) -> Verdict:
    """One run's verdict.

    Args:
        reports: of a folder.
        run_id: the run; None is the one that was begun last, by the reports' numbers and by no clock.
        now: Unix time to hold the age of unfinished reports against; the present where None.

    Raises:
        ConfigurationError: no report is of the named run.
    """
    runs = _newest_first(reports)
    if run_id is not None and file_part(run_id) not in runs:
        known = ", ".join(run.shown for run in runs.values())
        raise ConfigurationError(f"No report is of run {run_id!r}; the folder holds {known}.")
    chosen = next(iter(runs)) if run_id is None else file_part(run_id)
    run = runs.pop(chosen)
    ranks = sorted(run.reports, key=lambda report: (report.rank, report.number))
    layers: dict[str, LayerCounters] = {}
    for report in ranks:
        for name, counters in report.layers.items():
            layers[name] = add(layers.get(name, LayerCounters()), counters)
    gaps = [
        *_doubtful_choice(run, runs.values() if run_id is None else ()),
        *(f"a report cannot be read: {one.problem}" for one in reports.unreadable if one.name.run in (None, chosen)),
        *_of_the_run(ranks),
        *(gap for report in ranks for gap in _of_a_rank(report, time.time() if now is None else now)),
    ]
    others = [other.shown for other in runs.values()]
    return Verdict(run.shown, ranks, layers, list(_differences(layers)), gaps, others)


@dataclass
class _Run:
    shown: str
    reports: list[Report]
    number: int = 0


def _newest_first(reports: Reports) -> dict[str, _Run]:
    """The runs by id, as file names have it; also those of which no report can be read."""
    runs: dict[str, _Run] = {}
    for report in reports.readable:
        run = runs.setdefault(file_part(report.run_id), _Run(report.run_id, []))
        run.reports.append(report)
        run.number = max(run.number, report.number)
    for one in reports.unreadable:
        if one.name.run is not None:
            run = runs.setdefault(one.name.run, _Run(one.name.run, []))
            run.number = max(run.number, one.name.number)
    return dict(sorted(runs.items(), key=lambda item: item[1].number, reverse=True))


def _doubtful_choice(run: _Run, others: Iterable[_Run]) -> Iterator[str]:
    for other in others:
        if other.number == run.number:
            yield (
                f"which of the runs {run.shown} and {other.shown} is the newer one cannot be told: their reports come "
                "from different folders; name one with --run"
            )


def _differences(layers: dict[str, LayerCounters]) -> Iterator[str]:
    every = total(layers.values())
    if every.mismatches or every.elements_differ or every.first is not None:
        yield f"{every.rows_differ:,} rows and {every.index_disagreements:,} indices differ"
    for name, counters in layers.items():
        if counters.lost_entries:
            yield (
                f"attention lost rows: {counters.lost_entries:,} filled entries of layer {name} became unfilled "
                "between the host's indices and the sparse kernel"
            )


def _missing(ranks: list[Report]) -> list[int]:
    expected = max((report.world_size for report in ranks), default=0)
    return sorted(set(range(expected)) - {report.rank for report in ranks})


def _of_the_run(ranks: list[Report]) -> Iterator[str]:
    if not ranks:
        yield "no report of this run can be read"
        return
    if missing := _missing(ranks):
        world = max(report.world_size for report in ranks)
        shown = ", ".join(map(str, missing[:16])) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
        yield f"of {world} ranks these have no report in this folder: {shown}"
    if strangers := sorted({report.rank for report in ranks if report.rank >= report.world_size}):
        yield "ranks beyond the number of ranks that they name: " + ", ".join(map(str, strangers))
    if len({report.world_size for report in ranks}) > 1:
        yield "the reports name different numbers of ranks: " + _listed(str(one.world_size) for one in ranks)
    # One process may build two intercepts, each with a report; two processes are not one rank.
    writers = Counter(rank for rank, _ in {(report.rank, report.process) for report in ranks})
    for rank, count in writers.items():
        if count > 1:
            yield f"{count} processes reported as rank {rank}, so this is more than one run under one id"
    pairs = {(report.primary, report.shadow) for report in ranks}
    if len(pairs) > 1:
        yield "the ranks did not compare the same backends: " + _listed(
            f"{shadow or 'no shadow'} beside {primary}" for primary, shadow in pairs
        )


def _listed(values: Iterable[str]) -> str:
    return "; ".join(sorted(set(values)))


def _of_a_rank(report: Report, now: float) -> Iterator[str]:
    rank, every = f"rank {report.rank}", report.total
    for error in report.errors:
        yield f"{rank}: the shadow was switched off: {error}"
    if report.shadow is None:
        yield f"{rank}: no shadow ran, so nothing was compared"
    elif not every.calls:
        yield f"{rank}: nothing was compared"
    elif not every.rows_compared:
        yield f"{rank}: {every.calls:,} calls compared not one row"
    else:
        for layer, counters in report.layers.items():
            if not counters.rows_compared:
                yield f"{rank}: not one row of layer {layer} was compared"
    if not report.finished:
        yield f"{rank}: {_unfinished(report, now)}"


def _unfinished(report: Report, now: float) -> str:
    age = now - report.updated
    if age < -STALE_AFTER_S:
        return "never ended in order, and its last state is from the future: one of the clocks is wrong"
    if age <= max(STALE_AFTER_S, _STATES_MISSED * report.write_every_s):
        agree = report.total.rows_compared > 0 and report.total.mismatches == 0
        return "still running" + (": agree so far" if agree else "")
    return f"stale: its last state is {_in_words(age)} old, and the process never ended in order"


def _in_words(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 60:.0f} minutes"
