"""`hyv4-kvdequant ab`: merge shadow reports into a verdict, and replay traces with two backends."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hyv4_kvdequant.cli.backends import complete_backend, looking_at
from hyv4_kvdequant.cli.console import (
    DEFAULT_TIMEOUT,
    NOT_RIGHT,
    DeviceOption,
    JsonOption,
    TimeoutOption,
    default_device,
    err,
    help_end,
    out,
    print_json,
)
from hyv4_kvdequant.contract.errors import ConfigurationError
from hyv4_kvdequant.defaults import REPLAY_RUNS

if TYPE_CHECKING:
    from hyv4_kvdequant.ab.replay import Evidence, ReplayedCall

REPORT_HELP_END = help_end(
    "ab report /var/log/hyv4",
    "ab report /var/log/hyv4 --run RUN --plot mismatches.png",
    "ab report /var/log/hyv4 --json",
    status="0 the backends agree; 1 they differ; 3 inconclusive: what was compared decides nothing, and the reasons "
    "are shown; 2 the reports cannot be read.",
)
REPLAY_HELP_END = help_end(
    "ab replay TRACE.safetensors --a torch --b triton",
    "ab replay traces/*.safetensors --a triton --b mychip --runs 100 --json",
    status="0 the backends agree; 1 they differ; 2 a trace, a backend or the device cannot be used.",
)
app = typer.Typer(
    help="A/B two backends: reports of a shadow, replay of traces.",
    epilog=help_end(
        "ab report /var/log/hyv4",
        "ab replay TRACE.safetensors --a torch --b triton",
        status="0 agree; 1 differ; 2 could not be carried out; 3 (ab report) inconclusive.",
    ),
    no_args_is_help=True,
)
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Also draw it, into this file.")]


@app.command(epilog=REPORT_HELP_END)
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of the reports.")],
    run: Annotated[str | None, typer.Option(help="A run's id. Default: the run begun last.")] = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Puts all ranks of a run together: do the backends agree?

    Exit status 0: every rank compared rows and none differed, until the end. 1: something differs, or attention lost
    rows. 3: inconclusive, with the reasons. 2: no report can be read.
    """
    from hyv4_kvdequant.ab.report import read_reports
    from hyv4_kvdequant.ab.verdict import merge
    from hyv4_kvdequant.cli.ab_verdict import EXIT_STATUS, as_dict, print_verdict

    verdict = merge(read_reports(folder), run)
    if plot is not None:
        from hyv4_kvdequant.ab.plot import plot_report

        plot_report(verdict, plot)
    if as_json:
        print_json(as_dict(verdict))
    else:
        print_verdict(verdict)
    raise typer.Exit(EXIT_STATUS[verdict.outcome])


@app.command("replay", epilog=REPLAY_HELP_END)
def replay_command(  # noqa: PLR0917 - options of a command, given by name
    traces: Annotated[list[Path], typer.Argument(help="Recorded calls (step files).")],
    a: Annotated[str, typer.Option("--a", help="One backend.", autocompletion=complete_backend)],
    b: Annotated[str, typer.Option("--b", help="The other.", autocompletion=complete_backend)],
    device: DeviceOption = None,
    runs: Annotated[int, typer.Option(min=0, help="Timed pairs of runs a call; 0 compares only.")] = REPLAY_RUNS,
    plot: PlotOption = None,
    timeout: TimeoutOption = DEFAULT_TIMEOUT,
    as_json: JsonOption = False,
) -> None:
    """Both backends on recorded calls, in turn; exit status 1 when they differ."""
    if a == b:
        raise ConfigurationError(f"--a and --b are both {a!r}; comparing a backend with itself proves nothing.")
    if plot is not None and not runs:
        raise ConfigurationError("--plot draws times, and --runs 0 takes none. Leave one of them out.")
    with looking_at([a, b], timeout) as prober:
        from hyv4_kvdequant.ab.replay import replay
        from hyv4_kvdequant.contract import Target

        chosen = default_device(device)
        backends = prober.get_backends({a: "--a", b: "--b"}, Target.detect(chosen))
    with err.status(Text(f"replaying {len(traces)} calls on {chosen}")):
        calls = list(replay(traces, backends[a], backends[b], chosen, runs=runs))
    if plot is not None:
        from hyv4_kvdequant.ab.plot import plot_replay

        plot_replay(calls, (a, b), plot)
    if as_json:
        print_json(_replay_dict(calls, a, b, str(chosen)))
    else:
        _print_replay(calls, a, b, str(chosen))
    if any(call.counters.mismatches for call in calls):
        raise typer.Exit(NOT_RIGHT)


def _ratios(calls: list[ReplayedCall]) -> dict[str, Any]:
    from hyv4_kvdequant.ab.replay import bootstrap_ratio

    modes = calls[0].times if calls else {}
    return {mode: asdict(bootstrap_ratio([call.ratio(mode) for call in calls])) for mode in modes}


def _replay_dict(calls: list[ReplayedCall], a: str, b: str, device: str) -> dict[str, Any]:
    ok = not any(call.counters.mismatches for call in calls)
    rows = [
        {
            "trace": call.trace,
            "layer": call.layer,
            "counters": asdict(call.counters),
            "evidence": asdict(call.evidence) if call.evidence else None,
            "ratio": {mode: call.ratio(mode) for mode in call.times},
        }
        for call in calls
    ]
    return {"a": a, "b": b, "device": device, "ok": ok, "ratio": _ratios(calls), "calls": rows}


def _print_replay(calls: list[ReplayedCall], a: str, b: str, device: str) -> None:
    modes = list(calls[0].times) if calls else []
    table = Table(title=f"{a} (A) against {b} (B) on {device}", title_justify="left")
    for column in ("call", "layer", "rows", "differ", *(f"A/B {mode}" for mode in modes)):
        table.add_column(column, justify="left" if column in ("call", "layer") else "right", overflow="fold")
    for call in calls:
        ratios = (f"{call.ratio(mode):.3f}" for mode in modes)
        counters = call.counters
        table.add_row(call.trace, call.layer, f"{counters.rows_compared:,}", f"{counters.mismatches:,}", *ratios)
    out.print(table)
    for mode, ratio in _ratios(calls).items():
        out.print(
            f"{mode}: A takes {ratio['median']:.3f} times B's time (95 % interval {ratio['low']:.3f} to "
            f"{ratio['high']:.3f}, {len(calls)} calls)",
        )
    for call in calls:
        if call.evidence is not None:
            _print_evidence(call.trace, call.evidence, a, b)


def _print_evidence(trace: str, evidence: Evidence, a: str, b: str) -> None:
    out.print(f"{trace}: first mismatch at slot {evidence.slot}, element {evidence.element}")
    if evidence.element < 0:
        out.print(f"  index of {a}: {evidence.a}, of {b}: {evidence.b}")
    else:
        expected = "unknown" if evidence.expected is None else f"{evidence.expected:#06x}"
        bits = f"  {a}: {evidence.a:#06x}   {b}: {evidence.b:#06x}   expected: {expected}"
        out.print(bits)
    out.print(f"  record: {evidence.record}", soft_wrap=True)
