"""What a memory checker should watch the `triton` backend do: slots far out of range, exact allocations, gaps.

    compute-sanitizer --tool memcheck  --error-exitcode 1 python tests/gpu/memcheck_triton.py
    compute-sanitizer --tool initcheck --error-exitcode 1 python tests/gpu/memcheck_triton.py

Every tensor is an allocation of its own, so that a byte too far is seen; outputs, scratch and the memory between
blocks are never initialised, so that a read of them is seen. Exit status 1 when a result is wrong.
"""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from hyv4_kvdequant import FP8_DS_MLA, GatherCall, Target
from hyv4_kvdequant.testing import expected_rows, make_case, rows_equal
from hyv4_kvdequant_triton import TritonBackend

CASES = (
    "out_of_range_on_both_sides",
    "all_unfilled",
    "gaps_between_blocks",
    "gaps_that_are_not_whole_records",
    "topk_not_a_power_of_two",
    "topk_1",
    "cache_of_one_slot",
    "width_3",
    "width_4",
    "width_4_with_an_empty_request",
)


def main() -> None:
    for name in CASES:
        for dedup_from_rows in (0, 2**31):
            check(name, dedup_from_rows)
    print("every row is right")


def check(name: str, dedup_from_rows: int) -> None:
    case = make_case(name)
    num_blocks, block_size, row_bytes = case.kv_cache.shape
    stride = case.kv_cache.stride(0)
    memory = torch.empty((num_blocks - 1) * stride + block_size * row_bytes, dtype=torch.uint8, device="cuda")
    cache = memory.as_strided(case.kv_cache.shape, case.kv_cache.stride())
    for block in range(num_blocks):
        cache[block].copy_(case.kv_cache[block])  # leaves the gaps as they are
    slots = case.topk_indices.cuda()
    call = GatherCall(
        kv_cache=cache,
        topk_indices=slots,
        compact_kv=torch.empty((slots.numel(), FP8_DS_MLA.row_dim), dtype=torch.bfloat16, device="cuda"),
        compact_indices=torch.empty_like(slots),
        tokens_per_request=case.tokens_per_request,
    )
    backend = TritonBackend(Target.detect("cuda"))
    backend._launch.dedup_from_rows = dedup_from_rows
    backend.gather_dequant(call)

    filled = (case.topk_indices >= 0) & (case.topk_indices < case.num_slots)
    indices = call.compact_indices.cpu()
    pointed = indices[filled].long()
    # Rows that no index points to may be uninitialised: they are left out on the device.
    got = torch.stack([call.compact_kv[row].cpu() for row in pointed.tolist()]) if len(pointed) else torch.empty(0, 576)
    expected = expected_rows(case.records(case.topk_indices[filled]), FP8_DS_MLA)
    right = torch.equal(indices >= 0, filled)
    right &= bool(rows_equal(got.to(torch.bfloat16).view(torch.int16), expected, FP8_DS_MLA).all())
    if not right:
        raise SystemExit(f"{name}, dedup_from_rows={dedup_from_rows}: a row or an index is wrong")


if __name__ == "__main__":
    main()
