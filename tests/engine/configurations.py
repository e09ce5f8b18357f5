"""Which engines the suite starts, and what each of them is asked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

PREFIX = "VLLM_HCU_HYV4_FP8_KV_DEQUANT"
BACKEND_IN_LOG = "HY V4 fp8 KV dequantization is on: backend"


def without_ours() -> dict[str, str]:
    """This process's variables but for this package's: a gate that is on in somebody's shell would be on in all."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


@dataclass(frozen=True)
class Configuration:
    """One engine in a process of its own.

    Attributes:
        name: of its files.
        backend: None for the gate off: vLLM's fp8 kernel.
        shadow: a backend beside it.
        graphs: FULL_AND_PIECEWISE CUDA graphs; eager mode otherwise.
        heads: 8 take vLLM's mixed batch, 32 its separate decode and prefill.
        mtp: with the MTP layer as a draft of 3 tokens.
        checks: of `child.CHECKS`.
        profiled: vLLM sizes the KV cache itself, so that its memory can be compared; runs alone on its GPU.
        tensor_parallel: GPUs.
    """

    name: str
    backend: str | None
    shadow: str | None = None
    graphs: bool = False
    heads: int = 8
    mtp: bool = False
    checks: tuple[str, ...] = ("short",)
    profiled: bool = False
    tensor_parallel: int = 1

    @property
    def checkpoint(self) -> str:
        """Folder name of the checkpoint it loads."""
        return f"tiny-{self.heads}{'-mtp' if self.mtp else ''}"

    def asked(self) -> dict[str, Any]:
        """What the judge has to know of it."""
        return {
            "gate": self.backend is not None,
            "graphs": self.graphs,
            "heads": self.heads,
            "mtp": self.mtp,
            "ranks": self.tensor_parallel,
        }

    def environ(self, report_dir: str) -> dict[str, str]:
        """The variables of its process."""
        if self.backend is None:
            return {}
        variables = {PREFIX: "1", PREFIX + "_BACKEND": self.backend}
        if self.shadow is not None:
            variables |= {PREFIX + "_SHADOW": self.shadow, PREFIX + "_REPORT_DIR": report_dir}
        return variables

    def engine_arguments(self, checkpoint: str) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`."""
        soak = "soak" in self.checks
        arguments: dict[str, Any] = {
            "model": checkpoint,
            "skip_tokenizer_init": True,
            "kv_cache_dtype": "fp8_ds_mla",
            "attention_config": {"backend": "FLASHMLA_SPARSE"},
            "kernel_config": {"enable_flashinfer_autotune": False},
            "max_model_len": 4096,
            "max_num_batched_tokens": 2048,
            # With 32 requests of 4 query tokens the triton backend stores shared slots once.
            "max_num_seqs": 32 if self.mtp else 8,
            "gpu_memory_utilization": 0.08,
            "enable_prefix_caching": soak,
            "async_scheduling": False,
            "disable_log_stats": False,
        }
        if not self.profiled:
            arguments["kv_cache_memory_bytes"] = SMALL_CACHE if soak else 2**30
        if self.graphs:
            arguments["compilation_config"] = {
                "cudagraph_mode": "FULL_AND_PIECEWISE",
                "cudagraph_capture_sizes": [1, 2, 4, 8, 32, 128] if self.mtp else [1, 2, 4, 8],
            }
        else:
            arguments["enforce_eager"] = True
        if self.mtp:
            arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 3}
        if self.tensor_parallel > 1:
            arguments |= {"tensor_parallel_size": self.tensor_parallel, "disable_custom_all_reduce": True}
        return arguments


SMALL_CACHE = 18 * 2**20
"""Bytes of a KV cache that the random traffic overflows, so that requests are preempted."""

_BOTH: dict[str, Any] = {"backend": "triton", "shadow": "torch"}

CONFIGURATIONS = (
    Configuration("off-eager", None, profiled=True, checks=("short", "teacher", "long")),
    Configuration("triton-eager", "triton", profiled=True, checks=("short", "teacher", "long", "on_off")),
    Configuration("off-graphs", None, graphs=True, checks=("short", "long")),
    Configuration("triton-graphs", "triton", graphs=True, checks=("short", "long")),
    Configuration("torch-eager", "torch", checks=("short",)),
    Configuration("torch-graphs", "torch", graphs=True, checks=("short",)),
    Configuration("shadow-graphs", **_BOTH, graphs=True, checks=("short", "long")),
    Configuration("shadow-eager", **_BOTH, checks=("short", "long")),
    Configuration("soak", **_BOTH, graphs=True, checks=("soak",)),
    Configuration("heads32-off-eager", None, heads=32, checks=("short", "teacher")),
    Configuration("heads32-eager", **_BOTH, heads=32, checks=("short", "teacher", "long", "on_off")),
    Configuration("heads32-graphs", **_BOTH, heads=32, graphs=True, checks=("short", "long")),
    Configuration("mtp-graphs", **_BOTH, graphs=True, mtp=True, checks=("long",)),
    Configuration("mtp-eager", **_BOTH, mtp=True, checks=("long",)),
    Configuration("heads32-mtp-eager", **_BOTH, heads=32, mtp=True, checks=("long", "on_off")),
    Configuration("tensor-parallel", **_BOTH, graphs=True, tensor_parallel=2, checks=("long",)),
)
