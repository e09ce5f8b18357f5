"""What the runs have to show, judged from their results alone: {configuration: result} to lines of a report."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Results = dict[str, dict[str, Any]]

# What one kernel differs by from the other on the same inputs was measured before this package existed: relative
# error of the output 6.0e-4 in prefill and 2.2e-3 in decode, LSE 5.5e-6 absolute. Twice that is allowed.
OUT_BOUND = {"prefill": 2 * 6.0e-4, "decode": 2 * 2.2e-3}
LSE_BOUND = 2 * 5.5e-6
# A last bit of bf16 in attention's output moves logits of order one by a few hundredths after five layers.
LOGPROB_BOUND = 0.15
MEMORY_DRIFT = 0.01
MIB = 2**20
RESERVE_SLACK = 64 * MIB


class Line(NamedTuple):
    """One line of the verdict; `holds` is None where it was not run."""

    claim: str
    holds: bool | None
    detail: str


def _ran(results: Results) -> Iterator[Line]:
    for name, result in results.items():
        if name.startswith("start-up: ") and "exit_status" in result:
            continue
        if "not_run" in result:
            yield Line(f"{name} runs", None, result["not_run"])
        else:
            errors = {key: value["error"] for key, value in _parts(result) if "error" in value}
            if "error" in result:
                errors["the process"] = result["error"]
            last = "; ".join(f"{key}: {error.strip().splitlines()[-1]}" for key, error in errors.items())
            yield Line(f"{name} runs", not errors, last or _up(result))


def _up(result: dict[str, Any]) -> str:
    return f"engine up in {result['start_seconds']:.0f} s" if "start_seconds" in result else ""


def _parts(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(key, value) for key, value in result.items() if isinstance(value, dict)]


def _good(result: dict[str, Any] | None, key: str) -> Any:
    value = (result or {}).get(key)
    return None if value is None or (isinstance(value, dict) and "error" in value) else value


def _asked(result: dict[str, Any], key: str) -> Any:
    """What a configuration asked for; None for what is not an engine of ours."""
    return result.get("asked", {}).get(key)


def _equal(results: Results) -> Iterator[Line]:
    """Contexts that topk holds whole: tokens and logprobs by bits."""
    for name, result in results.items():
        short = _good(result, "short")
        if short:
            yield Line(f"{name}: a second run gives the same tokens and logprobs", short["first"] == short["again"], "")
    for left, right in (
        ("torch-eager", "triton-eager"),
        ("torch-graphs", "triton-graphs"),
        ("triton-eager", "triton-graphs"),
        ("torch-eager", "torch-graphs"),
        ("shadow-eager", "triton-eager"),
        ("shadow-graphs", "triton-graphs"),
        ("heads32-eager", "heads32-graphs"),
    ):
        pair = [_good(results.get(name), "short") for name in (left, right)]
        if all(pair):
            same = pair[0]["first"] == pair[1]["first"]
            detail = "" if same else _first_difference(pair[0]["first"], pair[1]["first"])
            yield Line(f"{left} and {right} give the same tokens and logprobs", same, detail)


def _first_difference(left: list[Any], right: list[Any]) -> str:
    tokens = sum(a != b for one, two in zip(left, right, strict=True) for a, b in zip(one[0], two[0], strict=True))
    most = 0.0
    for one, two in zip(left, right, strict=True):
        for a, b in zip(one[1], two[1], strict=True):
            values = dict(map(tuple, b))
            most = max([most, *(abs(value - values[token]) for token, value in a if token in values)])
    return f"{tokens} tokens differ, logprobs by at most {most:.2g}"


def _shadows(results: Results) -> Iterator[Line]:
    for name, result in results.items():
        verdict = _good(result, "shadow_report")
        if verdict:
            total = verdict["total"]
            detail = f"{total['calls']} calls, {total['rows_compared']} rows compared, captured: {verdict['captured']}"
            right = total["rows_differ"] == 0 and total["index_disagreements"] == 0 and total["rows_compared"] > 0
            yield Line(f"{name}: the shadow finds no mismatch", right and verdict["exit_status"] == 0, detail)
            if _asked(result, "graphs") and _asked(result, "ranks") == 1:
                plans = (_good(result, "memory") or {}).get("plans")
                seen = sum(plans.values()) if plans is not None else None
                replayed = seen is not None and bool(verdict["captured"]) and total["calls"] > seen
                yield Line(f"{name}: replays are compared", replayed, f"Python saw {seen} of {total['calls']} calls")
            ended = (
                result["exit_status"] == 0
                and verdict["finished"]
                and len(verdict["left_in_folder"]) == verdict["ranks"]
            )
            detail = f"exit status {result['exit_status']}, in the folder: {', '.join(verdict['left_in_folder'])}"
            yield Line(f"{name}: ends in order, with its report and nothing else", ended, detail)


def _on_off(results: Results) -> Iterator[Line]:
    for name, result in results.items():
        found = _good(result, "on_off")
        for kind in ("prefill", "decode") if found else ():
            if kind not in found:
                # With draft tokens no prompt need be short enough to come to this kernel as one decode.
                if kind == "decode" or not (_asked(result, "mtp") and _asked(result, "heads") == 32):
                    yield Line(f"{name}: {kind} agrees with the fp8 kernel", False, "no call was compared")
            else:
                errors = found[kind]
                good = errors["out"] <= OUT_BOUND[kind] and errors["lse"] <= LSE_BOUND
                detail = f"{errors['calls']} calls, output {errors['out']:.2g} relative, LSE {errors['lse']:.2g}"
                yield Line(
                    f"{name}: {kind} agrees with the fp8 kernel", good and not errors["infinite_lse_differs"], detail
                )


def _decode_shapes(results: Results) -> Iterator[Line]:
    """32 heads are more than mixed batch takes: decode has to come as (requests, query rows, heads, 576)."""
    for name, result in results.items():
        found = _good(result, "on_off")
        if found and _asked(result, "heads") == 32:
            shapes = [shape for shape in found["shapes"] if re.match(r"decode: q \(([2-9]|\d\d+),", shape)]
            if _asked(result, "mtp"):
                shapes = [shape for shape in shapes if not re.match(r"decode: q \(\d+, 1,", shape)]
            yield Line(f"{name}: decode comes as rows of requests", bool(shapes), "; ".join(shapes[:2]))


def _ends(results: Results) -> Iterator[Line]:
    """What is left once an engine is shut down, and once its process has ended."""
    for name, result in results.items():
        left = _good(result, "left")
        if left is not None:
            detail = ", ".join([*left["threads"], *left["files"]]) or "nothing"
            yield Line(f"{name}: no thread and no open file is left after shutdown", detail == "nothing", detail)
        if "left_running" in result:
            detail = ", ".join(result["left_running"]) or "nothing"
            yield Line(f"{name}: leaves no process", detail == "nothing", detail)


def _named(results: Results) -> Iterator[Line]:
    """The log names the backend once for each worker process, and never with the gate off."""
    for name, result in results.items():
        if "named_in_log" in result:
            asked = result.get("asked", {"gate": True, "ranks": 1})  # the server is no configuration
            expected = asked["ranks"] if asked["gate"] else 0
            times = f"{result['named_in_log']} times in the log of {asked['ranks']}"
            yield Line(f"{name}: each worker names its backend once", result["named_in_log"] == expected, times)


def _teachers(results: Results) -> Iterator[Line]:
    for off, on in (("off-eager", "triton-eager"), ("heads32-off-eager", "heads32-eager")):
        pair = [_good(results.get(name), "teacher") for name in (off, on)]
        if all(pair):
            differences = [abs(a - b) for one, two in zip(*pair, strict=True) for a, b in zip(one, two, strict=True)]
            most, mean = max(differences), math.fsum(differences) / len(differences)
            detail = f"{len(differences)} tokens, at most {most:.3f}, on average {mean:.4f}"
            yield Line(f"{on}: teacher-forced log-probabilities as with the gate off", most <= LOGPROB_BOUND, detail)


def _memory(results: Results) -> Iterator[Line]:
    """Where vLLM sizes its cache itself, and where its size is given, so that peaks can be compared."""
    pair = [_good(results.get(name), "memory") for name in ("off-eager", "triton-eager")]
    if all(pair):
        off, on = pair
        reserved, less = on["workspace_bytes"], off["kv_cache_bytes"] - on["kv_cache_bytes"]
        detail = (
            f"{off['kv_blocks']} blocks off, {on['kv_blocks']} on: {less / MIB:.0f} MiB less for a workspace of "
            f"{reserved / MIB:.0f} MiB"
        )
        yield Line("vLLM's KV cache makes room for the workspace", less >= reserved - RESERVE_SLACK, detail)
    pair = [_good(results.get(name), "memory") for name in ("off-graphs", "triton-graphs")]
    if all(pair):
        off, on = pair
        more = on["peak_allocated"] - off["peak_allocated"]
        detail = (
            f"{off['peak_allocated'] / MIB:.0f} MiB off, {on['peak_allocated'] / MIB:.0f} MiB on, with a workspace of "
            f"{on['workspace_bytes'] / MIB:.0f} MiB"
        )
        good = more <= on["workspace_bytes"] + RESERVE_SLACK
        yield Line("peak memory is the gate-off run's and the workspace at most", good, detail)


def _soak(results: Results) -> Iterator[Line]:
    soak = _good(results.get("soak"), "soak")
    if not soak:
        return
    first, last = soak["tenths"]["first"], soak["tenths"]["last"]
    aborted = ("aborted", "aborted_before_a_token")
    counted = ("requests", "finished", *aborted, "steps", "prompt_tokens", "preemptions", "prefix_hit_tokens")
    detail = f"{soak['seconds']:.0f} s: " + ", ".join(f"{soak.get(name, 0)} {name}" for name in counted)
    yield Line("soak: aborts, preemptions and prefix hits happened", all(soak.get(name) for name in counted), detail)
    names = ("memory", "open files", "threads")
    for name, before, after, slack in zip(names, first, last, (MEMORY_DRIFT, 0.0, 0.0), strict=True):
        detail = f"median {before:.0f} in the first tenth, {after:.0f} in the last"
        yield Line(f"soak: {name} stay flat", abs(after - before) <= slack * before, detail)


def _serve(results: Results) -> Iterator[Line]:
    for name, result in results.items():
        if name.startswith("start-up: ") and "exit_status" in result:
            good = result["exit_status"] != 0 and result["message"] is not None
            yield Line(
                f"{name} stops the start-up with our message", good, f"{result['seconds']:.0f} s: {result['message']}"
            )
    serve = results.get("serve", {})
    if "series" in serve:
        yield Line("serve: completions over HTTP", serve["generated"] == 16, f"ready in {serve['ready_seconds']:.0f} s")
        shown = f"{serve['series']} series, {serve['shadow_calls']:.0f} calls"
        yield Line("serve: /metrics shows our series", serve["shadow_calls"] > 0, shown)


CHECKS: dict[str, Callable[[Results], Iterator[Line]]] = {
    "ran": _ran,
    "equal": _equal,
    "shadow": _shadows,
    "on_off": _on_off,
    "decode_shapes": _decode_shapes,
    "teacher": _teachers,
    "memory": _memory,
    "soak": _soak,
    "ends": _ends,
    "named": _named,
    "serve": _serve,
}


def judge(results: Results) -> list[Line]:
    """Every claim over every result that bears on it."""
    return [line for check in CHECKS.values() for line in check(results)]
