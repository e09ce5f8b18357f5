"""The kernel: gathers records, dequantizes them to bf16 and writes the mapping, in one launch.

A program is one warp and owns ROWS rows of `compact_kv`. For each it reads one slot and one record (656 bytes for
`fp8_ds_mla`) and writes one row (1152 bytes) and one index. `docs/performance.md` tells how the tile was found.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 2
NUM_WARPS = 1
# A layer that reuses a mapping moves about a third of its rows; with ROWS = 2 it would wait for programs to start.
ROWS_WHEN_MOST_ARE_SKIPPED = 4


@triton.jit
def decode_e4m3(byte, NATIVE: tl.constexpr):
    """The fp32 value of e4m3fn bytes, exact; 0x7F and 0xFF give NaN."""
    if NATIVE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    # The 7 bits of exponent and mantissa, moved to where fp32 has its lowest 4 exponent bits, are the value over
    # 2**(127 - 7), subnormals included. The shift leaves the sign in bit 31 and copies of it in between.
    bits = (byte.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    return tl.where(tl.abs(value) > 448.0, float("nan"), value)


@triton.jit
def round_to_bf16_bits(value, NATIVE: tl.constexpr):
    """The bf16 bits of fp32 values, rounded to nearest even; any NaN stays one."""
    if NATIVE:
        return value.to(tl.bfloat16).to(tl.int16, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value != value, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def move_rows(
    kv_cache,
    compact_kv,
    slot,  # i32 [n]
    row,  # i64 [n]
    filled,  # i1 [n]: read the record; else the row is zero bits
    write,  # i1 [n]: write the row
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    NOPE_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    NATIVE_E4M3: tl.constexpr,
    NATIVE_BF16: tl.constexpr,
):
    """Dequantizes the records of n slots into n rows. Unfilled lanes form addresses but nothing is read there."""
    NUM_TILES: tl.constexpr = NOPE_DIM // TILE_DIM
    in_block = (slot % BLOCK_SIZE).to(tl.int64) * ROW_BYTES
    record = kv_cache + (slot // BLOCK_SIZE).to(tl.int64) * BLOCK_STRIDE + in_block
    out = compact_kv.to(tl.pointer_type(tl.int16)) + row * (NOPE_DIM + ROPE_DIM)

    # All loads come before the first store, which the compiler has to take for a store to the cache.
    tile = tl.arange(0, NUM_TILES)[None, :, None]
    nope = tile * TILE_DIM + tl.arange(0, TILE_DIM)[None, None, :]
    scale_at = (record + SCALE_OFFSET).to(tl.pointer_type(tl.float32))
    byte = tl.load(record[:, None, None] + NOPE_OFFSET + nope, mask=filled[:, None, None], other=0)
    scale = tl.load(scale_at[:, None, None] + tile, mask=filled[:, None, None], other=0.0)
    if ROPE_DIM > 0:
        rope = tl.arange(0, ROPE_DIM)[None, :]
        rope_at = (record + ROPE_OFFSET).to(tl.pointer_type(tl.int16))
        rope_bits = tl.load(rope_at[:, None] + rope, mask=filled[:, None], other=0)
        tl.store(out[:, None] + NOPE_DIM + rope, rope_bits, mask=write[:, None])
    product = decode_e4m3(byte, NATIVE_E4M3) * scale
    tl.store(out[:, None, None] + nope, round_to_bf16_bits(product, NATIVE_BF16), mask=write[:, None, None])


@triton.jit(
    do_not_specialize=["num_rows", "num_slots"], do_not_specialize_on_alignment=["topk_indices", "compact_indices"]
)
def gather_dequant_kernel(
    kv_cache,  # u8: records
    topk_indices,  # i32 (num_rows,)
    compact_kv,  # bf16 (num_rows, NOPE_DIM + ROPE_DIM)
    compact_indices,  # i32 (num_rows,)
    num_rows,
    num_slots,
    WRITE_INDICES: tl.constexpr,
    SKIP_DUPLICATES: tl.constexpr,  # compact_indices is a mapping to follow: rows it does not point to stay as they are
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    NOPE_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ROPE_OFFSET: tl.constexpr,
    NATIVE_E4M3: tl.constexpr,
    NATIVE_BF16: tl.constexpr,
):
    """Row r holds the record of the r-th selected slot. Grid: one program for every ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    write = row < num_rows
    slot = tl.load(topk_indices + row, mask=write, other=-1)
    filled = (slot >= 0) & (slot < num_slots)
    if WRITE_INDICES:
        tl.store(compact_indices + row, tl.where(filled, row, -1).to(tl.int32), mask=write)
    if SKIP_DUPLICATES:
        index = tl.load(compact_indices + row, mask=write, other=-1)
        write = write & ((index == row) | (index < 0))
        filled = filled & write
    move_rows(
        kv_cache,
        compact_kv,
        slot,
        row,
        filled,
        write,
        BLOCK_SIZE,
        BLOCK_STRIDE,
        ROW_BYTES,
        NOPE_DIM,
        ROPE_DIM,
        TILE_DIM,
        NOPE_OFFSET,
        SCALE_OFFSET,
        ROPE_OFFSET,
        NATIVE_E4M3,
        NATIVE_BF16,
    )
