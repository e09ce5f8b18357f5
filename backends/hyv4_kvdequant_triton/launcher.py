"""From a gather call to one kernel launch. Imports Triton; the backend imports this module when it is first asked."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton

from hyv4_kvdequant.contract import BackendError, GatherCall, Target
from hyv4_kvdequant_triton import dedup, kernel

INTERPRETED = not isinstance(kernel.gather_dequant_kernel, triton.JITFunction)
"""Whether the kernels run in Triton's interpreter: decided by TRITON_INTERPRET when they were imported."""

NATIVE_E4M3_CAPABILITY = (8, 9)
INTERPRETER_ROWS = 64  # a program costs the interpreter milliseconds, whatever its size
DEDUP_FROM_ROWS = 65536
"""Selected slots in a call from which finding duplicates costs less than writing them again (32 tokens, topk 2048)."""


class Launcher:
    """Launches the kernel that serves a call. What it launches depends on the target and the call's shapes alone."""

    def __init__(self, target: Target, dedup_from_rows: int = DEDUP_FROM_ROWS) -> None:
        on_nvidia = target.platform == "cuda" and not INTERPRETED
        self.target = target
        self.dedup_from_rows = dedup_from_rows
        # Triton's barrier promises to order memory, not only threads, on NVIDIA and in the interpreter.
        self.can_dedup = on_nvidia or INTERPRETED
        self._num_processors = _num_processors(target.device)
        if target.device.type == "cuda":
            triton.runtime.driver.active.get_current_target()  # Triton builds its driver now, not in the first call
        self._compiled_distinct: set[tuple[object, ...]] = set()
        self._numerics = {
            "NATIVE_E4M3": on_nvidia and target.capability is not None and target.capability >= NATIVE_E4M3_CAPABILITY,
            "NATIVE_BF16": on_nvidia,
        }

    def __call__(self, call: GatherCall) -> None:
        num_rows = call.topk_indices.numel()
        num_entries = call.tokens_per_request * call.topk
        may_dedup = self.can_dedup and call.tokens_per_request > 1 and num_entries <= dedup.MAX_ENTRIES
        if not may_dedup or call.reuse_compact_indices:
            self._gather(call, num_rows)
        elif num_rows >= self.dedup_from_rows:
            self._gather_distinct(call, num_rows // num_entries, num_entries)
        else:
            self._compile_distinct(call, num_entries)
            self._gather(call, num_rows)

    def _gather(self, call: GatherCall, num_rows: int) -> None:
        skip_duplicates = call.reuse_compact_indices and call.tokens_per_request > 1
        rows = kernel.ROWS_WHEN_MOST_ARE_SKIPPED if skip_duplicates else kernel.ROWS
        rows = INTERPRETER_ROWS if INTERPRETED else rows
        self._run(
            kernel.gather_dequant_kernel,
            (num_rows + rows - 1) // rows,
            call.kv_cache,
            call.topk_indices,
            call.compact_kv,
            call.compact_indices,
            num_rows,
            call.num_slots,
            WRITE_INDICES=not call.reuse_compact_indices,
            SKIP_DUPLICATES=skip_duplicates,
            ROWS=rows,
            num_warps=kernel.NUM_WARPS,
            **self._constants(call),
        )

    def _gather_distinct(self, call: GatherCall, num_requests: int, num_entries: int) -> None:
        # About one program a processor: more would look at every entry more often, fewer would leave processors idle.
        log_parts = max(self._num_processors // num_requests, 1).bit_length() - 1
        entries = triton.next_power_of_2(num_entries)
        self._run_distinct(
            call, num_requests << log_parts, num_entries, log_parts, min(4 * entries >> log_parts, entries)
        )

    def _compile_distinct(self, call: GatherCall, num_entries: int) -> None:
        """Once: compiles and loads the kernel that a later, larger call of this kind needs, on an empty request."""
        key = (call.kv_cache.shape[1:], call.kv_cache.stride(), call.layout.name, num_entries)
        if key not in self._compiled_distinct:
            self._run_distinct(call, 1, 0, 0, 1)
            self._compiled_distinct.add(key)

    def _run_distinct(
        self, call: GatherCall, num_programs: int, num_entries: int, log_parts: int, num_buckets: int
    ) -> None:
        shape, device = (num_programs, num_buckets + num_entries), call.topk_indices.device
        self._run(
            dedup.gather_distinct_kernel,
            num_programs,
            call.kv_cache,
            call.topk_indices,
            call.compact_kv,
            call.compact_indices,
            torch.empty(shape, dtype=torch.int32, device=device),
            call.num_slots,
            num_entries,
            log_parts,
            num_buckets,
            ENTRIES=triton.next_power_of_2(call.tokens_per_request * call.topk),
            ROWS=dedup.ROWS,
            num_warps=dedup.NUM_WARPS,
            **self._constants(call),
        )

    def _constants(self, call: GatherCall) -> dict[str, Any]:
        """What is compiled into a kernel: the record, the cache's blocks, and how to convert."""
        layout = call.layout
        num_blocks, block_size, row_bytes = call.kv_cache.shape
        stride = call.kv_cache.stride(0)
        if num_blocks == 1 or stride == block_size * row_bytes:
            block_size, stride = 1, row_bytes  # packed: a slot's number is all that its address needs
        return {
            "BLOCK_SIZE": block_size,
            "BLOCK_STRIDE": stride,
            "ROW_BYTES": row_bytes,
            "NOPE_DIM": layout.nope_dim,
            "ROPE_DIM": layout.rope_dim,
            "TILE_DIM": layout.tile_dim,
            "NOPE_OFFSET": layout.nope_offset,
            "SCALE_OFFSET": layout.scale_offset,
            "ROPE_OFFSET": layout.rope_offset,
            **self._numerics,
        }

    def _run(self, function: Any, num_programs: int, *arguments: Any, **constants: Any) -> None:
        """Launches on the current stream; nothing may be fused into the fp32 product.

        Raises:
            BackendError: the kernel does not compile or launch.
        """
        try:
            function[(num_programs,)](*arguments, enable_fp_fusion=False, **constants)
        except Exception as error:
            where = "Triton's interpreter" if INTERPRETED else f"{self.target.arch or self.target.device}"
            raise BackendError(
                f"The kernel {function.__name__} of the triton backend does not compile or launch for {where} with "
                f"Triton {triton.__version__}: {type(error).__name__}: {error}"
            ) from error


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
