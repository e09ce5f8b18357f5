"""`hyv4-kvdequant verify NAME`: hold a backend to the contract on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hyv4_kvdequant.cli.console import NOT_RIGHT, DeviceOption, JsonOption, default_device, err, out, print_json
from hyv4_kvdequant.contract import Target
from hyv4_kvdequant.selector import get_backend
from hyv4_kvdequant.steps import Step, save_step
from hyv4_kvdequant.testing import CheckResult, run_checks

_SHOWN_FAILURES = 3


def verify(
    name: Annotated[str, typer.Argument(help="The backend's registered name.")],
    device: DeviceOption = None,
    seed: Annotated[int, typer.Option(help="Seed of every input; a failure is repeated with the same seed.")] = 0,
    save_dir: Annotated[
        Path, typer.Option(help="Where failing inputs are saved as step files, made when first needed.")
    ] = Path("hyv4-kvdequant-failures"),
    as_json: JsonOption = False,
) -> None:
    """Runs every clause of the contract; exit status 1 when one does not hold."""
    chosen = default_device(device)
    backend = get_backend(name, Target.detect(chosen), "the argument NAME")
    with err.status(f"verifying {name} on {chosen}, seed {seed}"):
        results = list(run_checks(backend, chosen, seed))
    saved = {result.clause: _save(result, name, seed, save_dir) for result in results if result.failing_case}
    if as_json:
        print_json(_as_dict(name, str(chosen), seed, results, saved))
    else:
        _print(name, str(chosen), seed, results, saved)
    if any(result.failures for result in results):
        raise typer.Exit(NOT_RIGHT)


def _save(result: CheckResult, name: str, seed: int, folder: Path) -> str:
    case = result.failing_case
    assert case is not None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{case.name}-seed{seed}.safetensors"
    notes = {"case": case.name, "seed": str(seed), "backend": name, "clause": result.clause}
    save_step(path, Step(case.kv_cache, case.topk_indices, case.layout, case.tokens_per_request, notes=notes))
    return str(path)


def _as_dict(name: str, device: str, seed: int, results: list[CheckResult], saved: dict[str, str]) -> dict[str, Any]:
    clauses = []
    for result in results:
        row = {key: value for key, value in asdict(result).items() if key != "failing_case"}
        clauses.append({**row, "passed": result.passed, "saved_input": saved.get(result.clause)})
    ok = not any(result.failures for result in results)
    return {"backend": name, "device": device, "seed": seed, "ok": ok, "clauses": clauses}


def _print(name: str, device: str, seed: int, results: list[CheckResult], saved: dict[str, str]) -> None:
    table = Table(title=f"{name} on {device}, seed {seed}", title_justify="left")
    table.add_column("clause", overflow="fold")
    table.add_column("result")
    table.add_column("cases", justify="right")
    for result in results:
        mark = "[green]holds[/]" if result.passed else "[red]broken[/]" if result.failures else "not run"
        table.add_row(result.title, mark, str(result.cases))
    out.print(table)
    for result in results:
        if result.not_run:
            out.print(f"not run: {result.clause}: {result.not_run}", highlight=False, markup=False)
        for case, problem in result.failures[:_SHOWN_FAILURES]:
            out.print(f"{result.clause}, case {case}: {problem}", highlight=False, markup=False)
        if len(result.failures) > _SHOWN_FAILURES:
            out.print(f"{result.clause}: {len(result.failures) - _SHOWN_FAILURES} more cases fail")
        if result.clause in saved:
            out.print(f"  input saved: {saved[result.clause]}", highlight=False)
