"""A record from outside: `fp8_ds_mla` without RoPE, 528 bytes. All that this package is told of it is in this file."""

from __future__ import annotations

from hyv4_kvdequant.records import RecordLayout, make_record

LAYOUT = RecordLayout(
    name="fp8_ds_mla_no_rope",
    row_bytes=528,
    nope_dim=512,
    rope_dim=0,
    tile_dim=128,
    nope_offset=0,
    scale_offset=512,
    rope_offset=528,
)

RECORD = make_record(LAYOUT)
