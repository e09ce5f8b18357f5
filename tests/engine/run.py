"""Runs the engine suite on this machine's GPU: `python tests/engine/run.py --out DIR [--only NAME ...]`.

Each engine is a process of its own with a log of its own; vLLM and this package have to be importable. Exit status 1
when something that was run does not hold.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import serve
import torch
from checks import Line, judge
from configurations import BACKEND_IN_LOG, CONFIGURATIONS, Configuration, without_ours
from processes import kill_all, run_to_the_end
from tiny_model import write_checkpoint

from hyv4_kvdequant.versions import describe_versions

HERE = Path(__file__).parent
ENGINE_SECONDS = 300.0
# The checks reach into the engine, so it has to be in their process; spawned workers end in order, forked ones do not
# run what Python does at exit.
ENGINE_VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
OTHER_NAMES = ("serve", "start-up")


class Suite:
    """The runs of one folder, and the time that is left for them."""

    def __init__(self, out: Path, soak_seconds: float, budget_seconds: float) -> None:
        self.out, self.soak_seconds = out, soak_seconds
        self.deadline = time.monotonic() + budget_seconds
        self.results: dict[str, Any] = {}
        out.mkdir(parents=True, exist_ok=True)

    def engine(self, configuration: Configuration) -> None:
        """One engine, from its start to its end."""
        if torch.cuda.device_count() < configuration.tensor_parallel:
            self.results[configuration.name] = {"not_run": f"needs {configuration.tensor_parallel} GPUs"}
            return
        self._guarded(configuration.name, lambda: self._engine(configuration))

    def _engine(self, configuration: Configuration) -> dict[str, Any]:
        name = configuration.name
        reports, path = self.out / name / "reports", self.out / f"{name}.json"
        checkpoints = self.out / "checkpoints"
        # What an earlier run left here would be read as this one's.
        path.unlink(missing_ok=True)
        shutil.rmtree(reports, ignore_errors=True)
        command = [sys.executable, str(HERE / "child.py"), name, str(checkpoints), str(path), str(self.soak_seconds)]
        environ = {**without_ours(), **ENGINE_VARIABLES, **configuration.environ(str(reports))}
        log = self.out / f"{name}.log"
        limit = ENGINE_SECONDS + (self.soak_seconds if "soak" in configuration.checks else 0)
        ended = run_to_the_end(command, environ, log, limit)
        if not path.exists():
            return {"error": f"the process ended with status {ended.exit_status} and no result"}
        result: dict[str, Any] = json.loads(path.read_text())
        result |= {"exit_status": ended.exit_status, "left_running": ended.left_running}
        result["named_in_log"] = log.read_text().count(BACKEND_IN_LOG)
        result["asked"] = configuration.asked()
        if configuration.shadow is not None and "error" not in result:
            result["shadow_report"] = _verdict(reports)
        return result

    def start_up_failure(self, kind: str) -> None:
        """One `vllm serve` that must not start."""
        log = self.out / f"start-up {kind}.log".replace(" ", "-")
        self._guarded(f"start-up: {kind}", lambda: serve.start_up_failure(kind, self._checkpoint, log))

    def serve(self) -> None:
        """The server."""
        self._guarded("serve", self._serve)

    def _serve(self) -> dict[str, Any]:
        folder = self.out / "serve"
        shutil.rmtree(folder, ignore_errors=True)
        result = serve.served(self._checkpoint, folder, self.out / "serve.log")
        result["shadow_report"] = _verdict(folder / "reports")
        return result

    @property
    def _checkpoint(self) -> Path:
        return self.out / "checkpoints" / "tiny-8"

    def _guarded(self, name: str, function: Callable[[], dict[str, Any]]) -> None:
        if time.monotonic() > self.deadline:
            self.results[name] = {"not_run": "no time was left"}
            return
        start = time.monotonic()
        try:
            self.results[name] = function()
        except Exception:
            self.results[name] = {"error": traceback.format_exc()}
        self.results[name]["wall_seconds"] = time.monotonic() - start
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


def _verdict(reports: Path) -> dict[str, Any]:
    """What `hyv4-kvdequant ab report` says."""
    command = [sys.executable, "-m", "hyv4_kvdequant", "ab", "report", str(reports), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    verdict = json.loads(done.stdout)
    ranks = verdict["ranks"]
    return {
        "exit_status": done.returncode,
        "total": verdict["total"],
        "ranks": len(ranks),
        "finished": all(rank["finished"] for rank in ranks),
        "captured": sorted({int(size) for rank in ranks for size, compared in rank["captured"].items() if compared}),
        "left_in_folder": sorted(path.name for path in reports.iterdir()),
    }


def run(suite: Suite, names: list[str], parallel: int) -> None:
    """Engines whose memory is measured one after the other; everything else side by side."""
    known = [*(one.name for one in CONFIGURATIONS), *OTHER_NAMES]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [one for one in CONFIGURATIONS if not names or one.name in names]
    for checkpoint in {one.checkpoint: one for one in CONFIGURATIONS}.values():
        write_checkpoint(suite.out / "checkpoints" / checkpoint.checkpoint, checkpoint.heads, mtp=checkpoint.mtp)
    for configuration in chosen:
        if configuration.profiled:
            suite.engine(configuration)
            if "error" in suite.results[configuration.name]:
                print(suite.results[configuration.name]["error"], "\nNothing else is started.")
                rest = [one.name for one in chosen] + [name for name in OTHER_NAMES if not names or name in names]
                for name in rest:
                    suite.results.setdefault(name, {"not_run": f"{configuration.name} did not start"})
                return
    with ThreadPoolExecutor(parallel) as pool:
        # The soak first: it is what the others have to be done beside.
        rest = sorted((one for one in chosen if not one.profiled), key=lambda one: "soak" not in one.checks)
        jobs = [pool.submit(suite.engine, one) for one in rest]
        if not names or "serve" in names:
            jobs.append(pool.submit(suite.serve))
        if not names or "start-up" in names:
            jobs += [pool.submit(suite.start_up_failure, kind) for kind in serve.FAILURES]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            kill_all()
            raise


def as_markdown(lines: list[Line], results: dict[str, Any]) -> str:
    """The verdict as a table, and what it was run on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    count = torch.cuda.device_count()
    rows = ["| claim | holds | seen |", "| --- | --- | --- |"]
    words = {True: "yes", False: "**no**", None: "not run"}
    rows += [f"| {line.claim} | {words[line.holds]} | {line.detail} |" for line in lines]
    about = f"{count} x {gpu}, Python {platform.python_version()}, {describe_versions()}"
    shapes = [
        f"- {name}: {shape} ({count} calls)"
        for name, result in results.items()
        for shape, count in (result.get("on_off") or {}).get("shapes", {}).items()
    ]
    plans = [f"- {name}: {result['memory'].get('plans')}" for name, result in results.items() if "memory" in result]
    return "\n".join(
        [about, "", *rows, "", "Shapes that the kernel was called with:", *shapes, "", "Plans:", *plans, ""]
    )


def write(suite: Suite) -> list[Line]:
    """Judges the results; leaves them and the verdict in the suite's folder."""
    lines = judge(suite.results)
    (suite.out / "results.json").write_text(json.dumps(suite.results))
    (suite.out / "verdict.md").write_text(as_markdown(lines, suite.results))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, logs and results")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="configurations, serve, start-up")
    parser.add_argument("--soak-seconds", type=float, default=60.0)
    parser.add_argument("--budget-seconds", type=float, default=3600.0, help="start nothing new after this")
    parser.add_argument("--parallel", type=int, default=3, help="engines at a time, where memory is not measured")
    options = parser.parse_args()
    # `timeout` and batch systems end a run this way; what it started has to end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    suite = Suite(options.out, options.soak_seconds, options.budget_seconds)
    try:
        run(suite, options.only, options.parallel)
    except ValueError as error:
        parser.error(str(error))
    lines = write(suite)
    print((options.out / "verdict.md").read_text())
    sys.exit(any(line.holds is False for line in lines))


if __name__ == "__main__":
    main()
