"""`hyv4-kvdequant verify NAME`: hold a backend to the contract on this machine."""

from __future__ import annotations

from dataclasses import dataclass
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

if TYPE_CHECKING:
    import torch

    from hyv4_kvdequant.testing import Case, CheckResult

HELP_END = help_end(
    "verify torch",
    "verify mychip --device cuda --seed 3",
    "verify mychip --step hyv4-kvdequant-failures/FILE.safetensors",
    status="0 no clause is broken; 1 one is; 2 the backend, the device or the step file cannot be used.",
)

_SHOWN_FAILURES = 3
_LARGEST_SAVED_BYTES = 2**28


def verify(
    name: Annotated[str, typer.Argument(help="The backend's registered name.", autocompletion=complete_backend)],
    *,
    device: DeviceOption = None,
    seed: Annotated[int, typer.Option(help="Seed of every input; a failure is repeated with the same seed.")] = 0,
    clause: Annotated[
        list[str] | None, typer.Option(help="Only this clause, by name; repeat for several. Default: all.")
    ] = None,
    step: Annotated[
        Path | None, typer.Option(help="A step file, such as a saved failing input, in place of the inputs made here.")
    ] = None,
    save_dir: Annotated[
        Path, typer.Option(help="Where failing inputs are saved as step files, made when first needed.")
    ] = Path("hyv4-kvdequant-failures"),
    timeout: TimeoutOption = DEFAULT_TIMEOUT,
    as_json: JsonOption = False,
) -> None:
    """Runs every clause of the contract; exit status 1 when one does not hold."""
    from hyv4_kvdequant.registry import find_registration

    origin = "the argument NAME"
    find_registration(name, origin)
    with looking_at([name], timeout) as prober:
        from hyv4_kvdequant.contract import FP8_DS_MLA, Target
        from hyv4_kvdequant.testing import run_checks

        chosen = default_device(device)
        cases = None if step is None else [_case_of(step, chosen)]
        layout = cases[0].layout if cases else FP8_DS_MLA
        backend = prober.get_backends({name: origin}, Target.detect(chosen, layout))[name]
    with err.status(Text(f"verifying {name} on {chosen}, seed {seed}")):
        results = list(run_checks(backend, chosen, seed, clauses=clause or None, cases=cases, layout=layout))
    report = Report(name, str(chosen), seed, step, results, {})
    if step is None:
        report.saved.update(_save_failing(report, save_dir))
    if as_json:
        print_json(_as_dict(report))
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(NOT_RIGHT)


@dataclass(frozen=True)
class Report:
    """What `verify` found; `saved` maps a clause to the file of its failing input."""

    backend: str
    device: str
    seed: int
    step: Path | None
    results: list[CheckResult]
    saved: dict[str, Path]

    @property
    def ok(self) -> bool:
        return not any(result.failures for result in self.results)


def _case_of(path: Path, device: torch.device) -> Case:
    from hyv4_kvdequant.steps import cache_on, load_step
    from hyv4_kvdequant.testing import Case

    step = load_step(path)
    return Case(path.stem, cache_on(step, device), step.topk_indices.to(device), step.tokens_per_request, step.layout)


def _save_failing(report: Report, folder: Path) -> dict[str, Path]:
    """Saves the first failing input of each clause, unless its cache is too large for a file."""
    from hyv4_kvdequant.steps import Step, save_step

    saved = {}
    for result in report.results:
        case = result.failing_case
        if case is None or case.kv_cache.shape[0] * case.kv_cache.stride(0) > _LARGEST_SAVED_BYTES:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        saved[result.clause] = folder / f"{report.backend}-{result.clause}-{case.name}-seed{report.seed}.safetensors"
        notes = {"case": case.name, "seed": str(report.seed), "backend": report.backend, "clause": result.clause}
        step = Step(case.kv_cache, case.topk_indices, case.layout, case.tokens_per_request, notes=notes)
        save_step(saved[result.clause], step)
    return saved


def _how_to_repeat(report: Report, result: CheckResult) -> str:
    from hyv4_kvdequant.testing import CASE_CLAUSES

    command = f"hyv4-kvdequant verify {report.backend} --device {report.device}"
    if result.clause in report.saved and result.clause in [clause.name for clause in CASE_CLAUSES]:
        return f"input saved; replay it with: {command} --step {report.saved[result.clause]}"
    repeat = f"{command} --seed {report.seed} --clause {result.clause}"
    if result.clause in report.saved:
        return f"last input saved: {report.saved[result.clause]}; repeat all calls with: {repeat}"
    return f"input not saved; repeat with: {repeat}"


def _as_dict(report: Report) -> dict[str, Any]:
    clauses = []
    for result in report.results:
        row = {key: value for key, value in vars(result).items() if key != "failing_case"}
        for kind in ("failures", "refused"):
            row[kind] = [one._asdict() for one in row[kind]]
        clauses.append({**row, "passed": result.passed, "saved_input": report.saved.get(result.clause)})
    about = {"backend": report.backend, "device": report.device, "seed": report.seed, "step": report.step}
    return {**about, "ok": report.ok, "clauses": clauses}


def _print(report: Report) -> None:
    inputs = f"seed {report.seed}" if report.step is None else f"input {report.step.name}"
    table = Table(title=f"{report.backend} on {report.device}, {inputs}", title_justify="left")
    table.add_column("clause", overflow="fold")
    table.add_column("result")
    table.add_column("inputs", justify="right")
    for result in report.results:
        mark = Text("holds", "green") if result.passed else Text("broken", "red") if result.failures else "not run"
        table.add_row(result.title, mark, str(result.cases) if result.cases else "")
    out.print(table)
    for case, problem in dict.fromkeys(one for result in report.results for one in result.refused):
        out.print(f"not served by this backend: {case} {problem}")
    for result in report.results:
        if result.not_run:
            out.print(f"not run: {result.clause}: {result.not_run}")
        for failure in result.failures[:_SHOWN_FAILURES]:
            out.print(f"{result.clause}: {failure.case}: {failure.problem}")
        if len(result.failures) > _SHOWN_FAILURES:
            out.print(f"{result.clause}: {len(result.failures) - _SHOWN_FAILURES} more inputs fail")
        if result.failures and report.step is None:
            out.print(f"  {_how_to_repeat(report, result)}", soft_wrap=True)
