"""`vllm serve` as its users meet it: start-up failures, and one server with shadow and metrics."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from configurations import BACKEND_IN_LOG, PREFIX, Configuration, without_ours
from processes import run_to_the_end, start, wait
from prompts import long_prompts

READY_SECONDS = 150.0
FAILURES: dict[str, tuple[dict[str, str], list[str], str]] = {
    "unknown backend": ({PREFIX + "_BACKEND": "tritn"}, [], "registers a backend named 'tritn'"),
    "unavailable backend": ({PREFIX + "_BACKEND": "lightop"}, [], "LightOp is not installed"),
    "wrong cache dtype": ({PREFIX + "_BACKEND": "triton"}, ["--kv-cache-dtype", "auto"], "the KV cache dtype is"),
}
"""What is wrong: variables, arguments, and what the output has to say."""


def command(checkpoint: Path, port: int, *more: str) -> list[str]:
    """The server's command line; later arguments win."""
    fixed = Configuration("serve", "triton").engine_arguments(str(checkpoint))
    arguments = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), "--port", str(port)]
    arguments += ["--enforce-eager", "--kv-cache-dtype", "fp8_ds_mla", "--no-enable-prefix-caching"]
    for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "kv_cache_memory_bytes"):
        arguments += ["--" + name.replace("_", "-"), str(fixed[name])]
    for name in ("attention_config", "kernel_config"):
        arguments += ["--" + name.replace("_", "-"), json.dumps(fixed[name])]
    return [*arguments, "--gpu-memory-utilization", "0.08", *more]


def environ(variables: dict[str, str]) -> dict[str, str]:
    """This process's environment with the gate on and the engine in a process of its own, as users have it."""
    return {**without_ours(), "VLLM_ENABLE_V1_MULTIPROCESSING": "1", PREFIX: "1", **variables}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start_up_failure(kind: str, checkpoint: Path, log: Path) -> dict[str, Any]:
    """Starts a server that must not start."""
    variables, arguments, message = FAILURES[kind]
    began = time.monotonic()
    ended = run_to_the_end(command(checkpoint, free_port(), *arguments), environ(variables), log, READY_SECONDS)
    lines = [line for line in log.read_text().splitlines() if message in line]
    return {
        "exit_status": ended.exit_status,
        "left_running": ended.left_running,
        "seconds": time.monotonic() - began,
        "message": lines[0].strip() if lines else None,
    }


def served(checkpoint: Path, folder: Path, log: Path) -> dict[str, Any]:
    """A server with a shadow: completions over HTTP, `/metrics`, and an orderly end."""
    metrics_dir = folder / "prometheus"
    metrics_dir.mkdir(parents=True, exist_ok=True)
    variables = {
        PREFIX + "_BACKEND": "triton",
        PREFIX + "_SHADOW": "torch",
        PREFIX + "_REPORT_DIR": str(folder / "reports"),
        "PROMETHEUS_MULTIPROC_DIR": str(metrics_dir),
        # Without it the server kills its engine the moment it is told to stop, and the report's last state is lost.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "20",
    }
    port = free_port()
    server = start(command(checkpoint, port), environ(variables), log)
    try:
        url = f"http://127.0.0.1:{port}"
        seconds = _wait_until_ready(url, server)
        body = {"model": str(checkpoint), "prompt": long_prompts()[0], "max_tokens": 16, "temperature": 0.0}
        answer = json.loads(_ask(url + "/v1/completions", body))
        time.sleep(12)  # the shadow's counters reach the metrics every few seconds
        metrics = _ask(url + "/metrics")
    finally:
        server.send_signal(signal.SIGTERM)
        ended = wait(server, 60)
    series = re.findall(r"^hyv4_kvdequant_shadow_calls_total\{.*\} ([0-9.e+]+)$", metrics, re.MULTILINE)
    return {
        "ready_seconds": seconds,
        "generated": answer["usage"]["completion_tokens"],
        "series": len(series),
        "shadow_calls": sum(float(value) for value in series),
        "named_in_log": log.read_text().count(BACKEND_IN_LOG),
        "exit_status": ended.exit_status,
        "left_running": ended.left_running,
    }


def _ask(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def _wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> float:
    began = time.monotonic()
    while time.monotonic() < began + READY_SECONDS:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            _ask(url + "/health")
            return time.monotonic() - began
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(f"the server was not ready within {READY_SECONDS:.0f} s")
