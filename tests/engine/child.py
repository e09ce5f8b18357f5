"""One engine in one process: `python child.py NAME CHECKPOINTS RESULT.json`, started by run.py with its variables set.

Every check answers with plain data, or with the traceback of what went wrong; `checks.py` judges.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from configurations import CONFIGURATIONS, Configuration
from prompts import long_prompts, short_prompts, traffic

TOPK = 512
SHORT_TOKENS = 24
LONG_TOKENS = 32


def generate(llm: Any, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    """Greedy completions of token prompts."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **sampling)
    return list(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False))


def short(llm: Any, seconds: float) -> dict[str, Any]:
    """Tokens and logprobs of contexts that topk holds whole, twice."""
    runs = []
    for _ in range(2):
        outputs = generate(llm, short_prompts(TOPK, SHORT_TOKENS), max_tokens=SHORT_TOKENS, logprobs=4)
        runs.append([[list(one.outputs[0].token_ids), _logprobs(one.outputs[0].logprobs)] for one in outputs])
    return {"first": runs[0], "again": runs[1]}


def _logprobs(steps: Any) -> list[list[Any]]:
    return [sorted([token, entry.logprob] for token, entry in step.items()) for step in steps]


def teacher(llm: Any, seconds: float) -> list[list[float]]:
    """The log-probability of every prompt token after the first, given those before it."""
    prompts = short_prompts(TOPK, SHORT_TOKENS)
    outputs = generate(llm, prompts, max_tokens=1, prompt_logprobs=1)
    return [
        [step[token].logprob for token, step in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def long(llm: Any, seconds: float) -> dict[str, int]:
    """Contexts of which topk selects a part, twice: what matters here is what the shadow counts."""
    prompts = long_prompts()
    prompts = prompts * (llm.llm_engine.vllm_config.scheduler_config.max_num_seqs // len(prompts))
    outputs = [one for _ in range(2) for one in generate(llm, prompts, max_tokens=LONG_TOKENS)]
    return {
        "requests": len(outputs),
        "prompt_tokens": 2 * sum(map(len, prompts)),
        "generated": sum(len(one.outputs[0].token_ids) for one in outputs),
    }


def on_off(llm: Any, seconds: float) -> dict[str, Any]:
    """The intercept beside the fp8 kernel that it replaces, on the same inputs, inside one running engine."""
    from vllm.models.hy_v4.nvidia.flashmla_sparse import HYV4FlashMLASparseImpl as Impl

    hooked = Impl.__dict__["_fp8_flash_mla_kernel"]
    original = hooked.__wrapped__
    errors: dict[str, list[torch.Tensor]] = defaultdict(list)
    shapes: Counter[str] = Counter()

    def both(impl: Any, *args: Any, **kwargs: Any) -> Any:
        out, lse = hooked.__get__(impl, Impl)(*args, **kwargs)
        fp8_out, fp8_lse = original(impl, *args, **kwargs)
        q = kwargs["q"] if "q" in kwargs else args[0]
        kind = "prefill" if q.shape[1] > 8 else "decode"
        shapes[f"{kind}: q {tuple(q.shape)}"] += 1
        finite = fp8_lse.isfinite()
        difference = (out.double() - fp8_out.double()).norm() / fp8_out.double().norm()
        steps = torch.where(finite, (lse - fp8_lse).abs(), 0.0).max()
        errors[kind].append(torch.stack([difference, steps.double(), (lse.isfinite() != finite).sum().double()]))
        return out, lse

    Impl._fp8_flash_mla_kernel = both
    try:
        generate(llm, long_prompts(), max_tokens=LONG_TOKENS)
        generate(llm, short_prompts(TOPK, SHORT_TOKENS), max_tokens=SHORT_TOKENS)
    finally:
        Impl._fp8_flash_mla_kernel = hooked
    found: dict[str, Any] = {"shapes": dict(shapes.most_common(12))}
    for kind, values in errors.items():
        out, lse, infinite = torch.stack(values).max(0).values.tolist()
        found[kind] = {"calls": len(values), "out": out, "lse": lse, "infinite_lse_differs": int(infinite)}
    return found


def soak(llm: Any, seconds: float) -> dict[str, Any]:
    """Random traffic through the engine's own steps: arrivals, aborts, prefix hits, preemption."""
    from vllm import SamplingParams

    engine, requests = llm.llm_engine, traffic(3)
    aborts: dict[str, int] = {}
    counts: Counter[str] = Counter()
    samples: list[list[float]] = []
    step = next_arrival = 0
    upcoming = next(requests)
    start = time.monotonic()
    while time.monotonic() < start + seconds or engine.has_unfinished_requests():
        arriving = time.monotonic() < start + seconds
        while arriving and step >= next_arrival and engine.get_num_unfinished_requests() < 24:
            name = f"r{counts['requests']}"
            parameters = SamplingParams(
                temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=upcoming.max_tokens
            )
            engine.add_request(name, {"prompt_token_ids": upcoming.prompt}, parameters)
            counts["requests"] += 1
            counts["prompt_tokens"] += len(upcoming.prompt)
            if upcoming.abort_after is not None:
                aborts[name] = upcoming.abort_after
            upcoming = next(requests)
            next_arrival = step + upcoming.wait
        # Who hangs up before the first token may still wait, or be in the middle of its prompt.
        silent = {name for name, tokens in aborts.items() if tokens == 0}
        spoken = set()
        for output in engine.step():
            name, done = output.request_id, len(output.outputs[0].token_ids)
            silent.discard(name)
            if output.finished:
                aborts.pop(name, None)
                counts["finished"] += 1
            elif name in aborts and done >= aborts[name]:
                spoken.add(name)
        for name in silent | spoken:
            engine.abort_request([name])
            del aborts[name]
        counts["aborted"] += len(spoken)
        counts["aborted_before_a_token"] += len(silent)
        step += 1
        open_files = len(list(Path("/proc/self/fd").iterdir()))
        samples.append([torch.cuda.memory_allocated(), open_files, threading.active_count()])
    counts["steps"] = step
    return {"seconds": time.monotonic() - start, **counts, **_metrics(), "tenths": _tenths(samples)}


def _tenths(samples: list[list[float]]) -> dict[str, list[float]]:
    """Medians of memory, open files and threads over the first and the last tenth; the warm-up's first tenth is left
    out."""
    tenth = len(samples) // 11
    parts = {"first": samples[tenth : 2 * tenth], "last": samples[-tenth:]}
    return {name: torch.tensor(part, dtype=torch.float64).median(0).values.tolist() for name, part in parts.items()}


def _metrics() -> dict[str, float]:
    """Of vLLM's own counters, those that say that the traffic did what it was made for."""
    from prometheus_client import REGISTRY

    wanted = {
        "vllm:num_preemptions_total": "preemptions",
        "vllm:prefix_cache_hits_total": "prefix_hit_tokens",
        "hyv4_kvdequant_shadow_calls_total": "shadow_calls_in_metrics",
    }
    found: Counter[str] = Counter()
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name in wanted:
                found[wanted[sample.name]] += int(sample.value)
    return dict(found)


CHECKS: dict[str, Callable[[Any, float], Any]] = {
    "short": short,
    "teacher": teacher,
    "long": long,
    "on_off": on_off,
    "soak": soak,
}


def attempt(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception:
        return {"error": traceback.format_exc()}


def memory(llm: Any) -> dict[str, Any]:
    """What vLLM made of its memory, and what the process took at most; nothing where workers have processes of their
    own."""
    from hyv4_kvdequant.hosts import vllm_mainline

    config = llm.llm_engine.vllm_config
    if config.parallel_config.world_size > 1:
        return {}
    cache = config.cache_config
    intercepts = list(vllm_mainline._intercepts.values())
    return {
        "kv_blocks": cache.num_gpu_blocks,
        # Absent where the cache's size was given and vLLM measured nothing.
        "kv_cache_bytes": getattr(_worker(llm), "available_kv_cache_memory_bytes", None),
        "kv_block_size": cache.block_size,
        "workspace_bytes": sum(one.workspace_bytes for one in intercepts),
        "plans": dict(sum((one.plans_taken for one in intercepts), Counter())),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }


def _worker(llm: Any) -> Any:
    """The worker of an engine that runs in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def run(configuration: Configuration, checkpoints: Path, seconds: float) -> dict[str, Any]:
    """Starts the engine and asks everything."""
    start = time.monotonic()
    from vllm import LLM

    llm = LLM(**configuration.engine_arguments(str(checkpoints / configuration.checkpoint)))
    result: dict[str, Any] = {"start_seconds": time.monotonic() - start}
    for name in configuration.checks:
        before = time.monotonic()
        result[name] = attempt(lambda check=CHECKS[name]: check(llm, seconds))  # type: ignore[misc]
        result[f"{name}_seconds"] = time.monotonic() - before
    result["memory"] = attempt(lambda: memory(llm))
    result["left"] = attempt(lambda: left_after_shutdown(llm))
    return result


def left_after_shutdown(llm: Any) -> dict[str, list[str]]:
    """Threads and open files of this package once the engine and its monitor are shut down."""
    from hyv4_kvdequant.hosts import vllm_mainline

    llm.llm_engine.engine_core.shutdown()
    monitors = [one.monitor for one in vllm_mainline._intercepts.values()]
    folders = {str(monitor.report_dir) for monitor in monitors if monitor.report_dir is not None}
    for monitor in monitors:
        monitor.close()
    files = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder's own entry is gone by now
            files.append(str(entry.readlink()))
    return {
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("hyv4")],
        "files": [file for file in files if any(file.startswith(folder) for folder in folders)],
    }


def main() -> None:
    name, checkpoints, result_path, seconds = sys.argv[1:]
    configuration = next(one for one in CONFIGURATIONS if one.name == name)
    result = attempt(lambda: run(configuration, Path(checkpoints), float(seconds)))
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
