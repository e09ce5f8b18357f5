"""A record that this package does not have, from one file outside: backends, the kit, the reference and step files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import no_rope_record
import numpy as np
import pytest
import torch
from no_rope_record import LAYOUT, RECORD
from typer.testing import CliRunner

import hyv4_kvdequant as h
from hyv4_kvdequant.ab.replay import replay
from hyv4_kvdequant.cli.app import app
from hyv4_kvdequant.records import RECORDS, make_record, put_parts, record_of, register_record, unregister_record
from hyv4_kvdequant.reference import sparse_attention, write_cache
from hyv4_kvdequant.selector import get_backend
from hyv4_kvdequant.steps import Step, load_step, save_step
from hyv4_kvdequant.testing import expected_rows, run_checks

CPU = torch.device("cpu")
TOKENS, TOPK, HEADS, SCALE = 6, 16, 2, 0.05
# Interpreted, a kernel takes milliseconds a program, so not every clause is asked of it.
CLAUSES = {
    "torch": None,
    "triton": ["filled_rows_are_exact", "width_1_unfilled_rows_are_zero", "outputs_stay_in_bounds"],
}


@pytest.fixture
def known() -> Iterator[None]:
    register_record(RECORD)
    yield
    unregister_record(LAYOUT.name)


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> h.GatherDequantBackend:
    if request.param == "triton":
        launcher = pytest.importorskip("hyv4_kvdequant_triton.launcher", reason="Triton is not installed")
        if not launcher.INTERPRETED:
            pytest.skip("Triton's interpreter is off (it runs on CPUs)")
    return get_backend(request.param, h.Target.detect(CPU, LAYOUT))


def written_step() -> tuple[Step, torch.Tensor]:
    """A step whose cache the reference wrote, and the latents it wrote (num_slots, nope_dim)."""
    torch.manual_seed(0)
    latents = torch.randn(64, 512, dtype=torch.bfloat16)
    cache = torch.zeros(4, 16, LAYOUT.row_bytes, dtype=torch.uint8)
    write_cache(latents, torch.empty(64, 0, dtype=torch.bfloat16), cache, torch.arange(64), layout=LAYOUT)
    slots = torch.randint(-8, 72, (TOKENS, TOPK), dtype=torch.int32)
    query = torch.randn(TOKENS, HEADS, LAYOUT.row_dim, dtype=torch.bfloat16)
    return Step(cache, slots, LAYOUT, softmax_scale=SCALE, tensors={"query": query}), latents


def test_the_kit_holds_backends_to_it(known: None, backend: h.GatherDequantBackend) -> None:
    with np.errstate(all="ignore"):  # the interpreter computes in NumPy, which warns of overflow
        results = list(run_checks(backend, layout=LAYOUT, clauses=CLAUSES[backend.name]))
    assert [result.failures for result in results if result.failures] == []
    assert sum(result.passed for result in results) >= 3


def test_what_the_reference_writes_comes_back(known: None, backend: h.GatherDequantBackend) -> None:
    step, latents = written_step()
    kv, indices = h.gather_dequantize(step.kv_cache, step.topk_indices, backend=backend, layout=LAYOUT)
    filled = (step.topk_indices >= 0) & (step.topk_indices < 64)
    assert filled.any()
    assert (indices[~filled] == -1).all()
    chosen = step.topk_indices[filled].long()
    got = kv[indices[filled].long()]
    assert got.shape == (int(filled.sum()), 512)
    assert torch.equal(got.view(torch.int16), expected_rows(step.kv_cache.view(-1, LAYOUT.row_bytes)[chosen], LAYOUT))
    # Three bits of mantissa: half a step is one part in 16, of the largest value for those near zero.
    assert (got.float() - latents[chosen].float()).abs().max() < latents.float().abs().max() / 16


def test_a_step_file_of_it_is_read_run_and_replayed(
    known: None, backend: h.GatherDequantBackend, tmp_path: Path
) -> None:
    step, _ = written_step()
    plain = h.gather_dequantize(step.kv_cache, step.topk_indices, backend="torch", layout=LAYOUT)
    out, lse = sparse_attention(step.tensors["query"], *plain, SCALE)
    path = tmp_path / "step.safetensors"
    save_step(path, replace(step, tensors={**step.tensors, "bf16_out": out, "bf16_lse": lse}))
    read = load_step(path)
    assert read.layout is LAYOUT
    assert torch.equal(read.kv_cache, step.kv_cache)
    done = CliRunner().invoke(app, ["run", str(path), "--backend", backend.name, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "wrong" not in done.output
    (replayed,) = replay([path], get_backend("torch", h.Target.detect(CPU, LAYOUT)), backend, CPU, runs=0)
    assert (replayed.counters.rows_compared > 0, replayed.counters.rows_differ) == (True, 0)


def test_it_is_unknown_until_it_is_registered(tmp_path: Path) -> None:
    save_step(tmp_path / "step", written_step()[0])
    with pytest.raises(h.StepFileError, match=r"layout 'fp8_ds_mla_no_rope'; this release knows \['fp8_ds_mla'\]"):
        load_step(tmp_path / "step")


def test_the_kit_asks_the_record_and_nobody_else() -> None:
    """A record whose own decode is wrong makes a right backend fail."""

    def off_by_one(records: torch.Tensor) -> torch.Tensor:
        return RECORD.decode(records) ^ 1

    register_record(replace(RECORD, decode=off_by_one))
    try:
        (result,) = run_checks(h.load_backend("torch"), layout=LAYOUT, clauses=["filled_rows_are_exact"])
    finally:
        unregister_record(LAYOUT.name)
    assert result.failures


def test_one_name_is_one_record(known: None) -> None:
    assert register_record(RECORD) is RECORD
    with pytest.raises(ValueError, match="'fp8_ds_mla_no_rope' is registered already"):
        register_record(make_record(LAYOUT))
    assert list(h.LAYOUTS.items()) == [("fp8_ds_mla", h.FP8_DS_MLA), (LAYOUT.name, LAYOUT)]
    assert RECORDS.keys() == h.LAYOUTS.keys()
    assert record_of(no_rope_record.LAYOUT) is RECORD


def test_a_record_of_other_types_has_to_bring_its_own_numerics() -> None:
    with pytest.raises(ValueError, match="'fnuz' is not e4m3fn values"):
        record_of(replace(LAYOUT, name="fnuz", nope_dtype=torch.float8_e4m3fnuz))


def test_a_part_that_does_not_fill_its_place_is_refused() -> None:
    records = torch.zeros(3, LAYOUT.row_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"4 values of torch\.float64"):
        put_parts(LAYOUT, records, scale=torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"64 values of torch\.bfloat16"):
        put_parts(LAYOUT, records, rope=torch.zeros(64, dtype=torch.bfloat16))
    assert not records.any()
