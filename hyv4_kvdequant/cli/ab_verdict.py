"""What `hyv4-kvdequant ab report` shows of a verdict. Whatever stands in a file is printed literally."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from hyv4_kvdequant.ab.counters import LayerCounters
from hyv4_kvdequant.ab.report import Report
from hyv4_kvdequant.ab.verdict import Outcome, Verdict
from hyv4_kvdequant.cli.console import NOT_RIGHT, out

INCONCLUSIVE = 3
EXIT_STATUS: dict[Outcome, int] = {"agree": 0, "differ": NOT_RIGHT, "inconclusive": INCONCLUSIVE}
_COLUMNS = ("layer", "calls", "rows", "rows differ", "elements", "ULP", "indices")


def as_dict(verdict: Verdict) -> dict[str, Any]:
    """The verdict for `--json`."""
    return {
        "run_id": verdict.run_id,
        "verdict": verdict.outcome,
        "ok": verdict.ok,
        "differences": verdict.differences,
        "gaps": verdict.gaps,
        "other_runs": verdict.other_runs,
        "total": asdict(verdict.total),
        "layers": {name: asdict(counters) for name, counters in verdict.layers.items()},
        "ranks": [asdict(rank) for rank in verdict.ranks],
        "missing_ranks": verdict.missing_ranks,
    }


def print_verdict(verdict: Verdict) -> None:
    """The verdict for a person."""
    out.print(_table(verdict))
    if verdict.other_runs:
        runs = ", ".join(verdict.other_runs)
        _say(f"This is run {verdict.run_id}. Also in the folder, the newest first: {runs}. Choose one with --run.")
    for rank in verdict.ranks:
        _say(_describe(rank))
    for name in verdict.layers:
        _print_first(verdict, name)
    for difference in verdict.differences:
        _say(f"wrong: {difference}")
    for gap in verdict.gaps:
        _say(f"not proved: {gap}")
    words = {
        "agree": Text("the backends agree", "green"),
        "differ": Text("not safe: see above", "red"),
        "inconclusive": Text("inconclusive: see what is not proved", "yellow"),
    }
    out.print("Verdict:", words[verdict.outcome])


def _table(verdict: Verdict) -> Table:
    table = Table(title=Text(literal(_title(verdict))), title_justify="left")
    lost = bool(verdict.total.lost_entries)
    for column in (*_COLUMNS, "lost") if lost else _COLUMNS:
        table.add_column(column, justify="left" if column == "layer" else "right", overflow="fold")
    for name, counters in verdict.layers.items():
        table.add_row(Text(literal(name)), *_numbers(counters, lost), end_section=True)
    table.add_row("all", *_numbers(verdict.total, lost))
    return table


def _title(verdict: Verdict) -> str:
    if not verdict.ranks:
        return f"Run {verdict.run_id}"
    first = verdict.ranks[0]
    beside = f"{first.shadow} beside {first.primary}" if first.shadow else f"{first.primary}, no shadow"
    return f"Run {verdict.run_id}: {beside}"


def _numbers(counters: LayerCounters, lost: bool) -> list[str]:
    numbers = [
        counters.calls,
        counters.rows_compared,
        counters.rows_differ,
        counters.elements_differ,
        counters.largest_ulp,
        counters.index_disagreements,
    ]
    return [f"{number:,}" for number in [*numbers, *([counters.lost_entries] if lost else [])]]


def _print_first(verdict: Verdict, layer: str) -> None:
    for rank in verdict.ranks:
        first = rank.layers[layer].first if layer in rank.layers else None
        if first is not None:
            _say(f"first mismatch in {layer}, rank {rank.rank}: {first}")
            return


def _describe(rank: Report) -> str:
    state = "ended in order" if rank.finished else "did not end"
    if rank.shadow is None:
        return f"rank {rank.rank} on {rank.device}: {state}"
    graphs = ", ".join(
        f"{tokens} tokens {'compared' if on else 'not compared'}" for tokens, on in rank.captured.items()
    )
    return (
        f"rank {rank.rank} on {rank.device}: {state}; eager calls compared: every {rank.every}; "
        f"in graphs: {graphs or 'none captured'}"
    )


def _say(text: str) -> None:
    out.print(literal(text), highlight=False, markup=False, emoji=False)


def literal(text: str) -> str:
    """`text` with everything written out that a terminal would act on or could not show."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
