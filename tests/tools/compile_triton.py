"""Compiles every kernel of the triton backend and of the core ahead of time, for GPUs that need not be there.

    python tests/tools/compile_triton.py [--save FOLDER] [TARGET ...]

Prints a line a kernel; exit status 1 with the compiler's message when one does not compile. With `--save` it writes
the assembly (PTX or AMDGCN) as `TARGET, CALL.s`. It drives the code that launches, so that what is compiled is what
a call would launch.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hyv4_kvdequant import FP8_DS_MLA, GatherCall, Target
from hyv4_kvdequant.ab import compare_triton
from hyv4_kvdequant.plans import remap_triton
from hyv4_kvdequant_triton.launcher import Launcher

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
_POINTERS = {
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bfloat16: "*bf16",
}
_OPTIONS = ("num_warps", "enable_fp_fusion")


class Compiled(NamedTuple):
    """One kernel compiled for one target."""

    kernel: str
    assembly: str
    seconds: float


class AheadOfTime(Launcher):
    """Compiles for `gpu` where the launcher would launch."""

    def __init__(self, gpu: GPUTarget) -> None:
        on_nvidia = gpu.backend == "cuda"
        capability = (int(gpu.arch) // 10, int(gpu.arch) % 10) if on_nvidia else None
        platform = "cuda" if on_nvidia else "rocm"
        super().__init__(Target(torch.device("cpu"), platform, arch=str(gpu.arch), capability=capability), 0)
        self.gpu = gpu
        self.compiled: list[Compiled] = []

    def _run(self, function: Any, num_programs: int, *arguments: Any, **constants: Any) -> None:
        self.compiled.append(compile_launch(self.gpu, function, arguments, {"enable_fp_fusion": False, **constants}))


class Compiling:
    """Stands for a kernel in its module: `kernel[grid](...)` compiles for `gpu` instead of launching."""

    def __init__(self, function: Any, gpu: GPUTarget, compiled: dict[str, Compiled]) -> None:
        self.function, self.gpu, self.compiled = function, gpu, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self

    def __call__(self, *arguments: Any, **constants: Any) -> None:
        name = self.function.__name__.strip("_")
        self.compiled[name] = compile_launch(self.gpu, self.function, arguments, constants)


def compile_launch(gpu: GPUTarget, function: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Compiled:
    """Compiles what a launch with these arguments would."""
    options = {name: constants.pop(name) for name in _OPTIONS if name in constants}
    signature = dict.fromkeys(constants, "constexpr")
    attributes = {}
    for index, (name, value) in enumerate(zip(function.arg_names, arguments, strict=False)):
        signature[name] = _POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        if isinstance(value, torch.Tensor) and name not in ("topk_indices", "compact_indices"):
            attributes[(index,)] = [["tt.divisibility", 16]]  # PyTorch's allocations are
    start = time.perf_counter()
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    kernel = triton.compile(source, target=gpu, options=options)
    assembly = kernel.asm["ptx" if gpu.backend == "cuda" else "amdgcn"]
    return Compiled(function.__name__, assembly, time.perf_counter() - start)


def compile_for(gpu: GPUTarget) -> dict[str, Compiled]:
    """Every kernel a call can ask for, by what asks for it."""
    launcher = AheadOfTime(gpu)
    calls = {
        "width 1, packed": _call(1),
        "width 1, gaps between blocks": _call(1, gap=64 * FP8_DS_MLA.row_bytes),
        "width 1, mapping reused": _call(1, reuse=True),
        "width 4, mapping reused": _call(4, reuse=True),
        "width 4": _call(4),
    }
    for call in calls.values():
        launcher(call)
    return {**dict(zip(calls, launcher.compiled, strict=True)), **_compile_core(gpu)}


def _compile_core(gpu: GPUTarget) -> dict[str, Compiled]:
    compiled: dict[str, Compiled] = {}
    for module in (compare_triton, remap_triton):
        for name, function in list(vars(module).items()):
            if name.endswith("_kernel"):
                original = function.function if isinstance(function, Compiling) else function
                setattr(module, name, Compiling(original, gpu, compiled))
    call = _call(1)
    counters = torch.zeros(16, dtype=torch.int64)
    compare_triton.compare_triton(call, call.compact_kv, call.compact_indices, counters)
    blocks, lost = torch.empty(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    remap_triton.remap_slots_triton(
        call.topk_indices, blocks, call.compact_indices, lost, num_slots=128, block_slots=64, block_stride=64
    )
    return compiled


def _call(width: int, *, reuse: bool = False, gap: int = 0) -> GatherCall:
    layout, topk = FP8_DS_MLA, 2048
    stride = 64 * layout.row_bytes + gap
    memory = torch.empty(2 * stride, dtype=torch.uint8)
    return GatherCall(
        kv_cache=memory.as_strided((2, 64, layout.row_bytes), (stride, layout.row_bytes, 1)),
        topk_indices=torch.empty((width, topk), dtype=torch.int32),
        compact_kv=torch.empty((width * topk, layout.row_dim), dtype=torch.bfloat16),
        compact_indices=torch.empty((width, topk), dtype=torch.int32),
        tokens_per_request=width,
        reuse_compact_indices=reuse,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    for name in arguments.targets:
        for asked, compiled in compile_for(TARGETS[name]).items():
            print(f"{name:7} {asked:29} {compiled.kernel} compiled in {compiled.seconds:.2f} s")
            if arguments.save:
                (arguments.save / f"{name}, {asked}.s").write_text(compiled.assembly)


if __name__ == "__main__":
    main()
