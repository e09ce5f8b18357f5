"""The `triton` backend in Triton's interpreter: the contract, the integer conversions, deduplication, bad targets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from test_torch import SCALES_FIRST, SMALL_TILES, WITHOUT_ROPE

from hyv4_kvdequant import FP8_DS_MLA, BackendError, GatherDequantBackend, RecordLayout, Target, load_backend
from hyv4_kvdequant.gather import run_call
from hyv4_kvdequant.testing import Case, ContractTests, check_case, expected_rows, make_case, rows_equal, run_checks
from hyv4_kvdequant.testing import strategies as st
from hyv4_kvdequant.testing.outcome import Buffers

launcher = pytest.importorskip("hyv4_kvdequant_triton.launcher", reason="Triton is not installed")
needs_interpreter = pytest.mark.skipif(not launcher.INTERPRETED, reason="Triton's interpreter is off (it runs on CPUs)")

CPU = Target.detect("cpu")
GPU = Target(torch.device("cuda", 0), "cuda", arch="sm_90", capability=(9, 0))


@pytest.fixture(autouse=True)
def _quiet_numpy() -> Iterator[None]:
    """The interpreter computes in NumPy, which warns of overflow where a GPU does not."""
    with np.errstate(all="ignore"):
        yield


def make_backend(dedup_from_rows: int | None = None) -> GatherDequantBackend:
    backend = load_backend("triton")(CPU)
    if dedup_from_rows is not None:
        backend._launch.dedup_from_rows = dedup_from_rows
    return backend


@needs_interpreter
class TestTriton(ContractTests):
    backend = "triton"


@needs_interpreter
class TestTritonDedup(ContractTests):
    """Deduplicates however small the call."""

    backend = "triton"

    @classmethod
    def make_backend(cls) -> GatherDequantBackend:
        return make_backend(dedup_from_rows=0)


@needs_interpreter
@pytest.mark.parametrize("dedup_from_rows", [0, None], ids=["dedup", "plain"])
def test_every_clause_on_any_call(dedup_from_rows: int | None) -> None:
    backend = make_backend(dedup_from_rows)

    @settings(derandomize=True, deadline=None, database=None, max_examples=40)
    @given(st.cases())
    def hold(case: Case) -> None:
        assert check_case(backend, case) == []

    hold()


@needs_interpreter
@pytest.mark.parametrize("layout", [WITHOUT_ROPE, SCALES_FIRST, SMALL_TILES], ids=lambda layout: layout.name)
def test_other_records_of_the_same_types(layout: RecordLayout) -> None:
    """The kernels read a record by its layout, not by the numbers of fp8_ds_mla."""
    clauses = ["filled_rows_are_exact", "width_1_unfilled_rows_are_zero", "outputs_stay_in_bounds"]
    results = run_checks(make_backend(dedup_from_rows=0), layout=layout, clauses=clauses)
    assert [result.failures for result in results if result.failures] == []


def every_byte_under(scale_bits: np.ndarray) -> Case:
    """Records whose 512 NoPE bytes are all bytes twice, under scales given as bits, four a record."""
    scales = np.resize(scale_bits.astype("<u4"), (len(scale_bits) // 4, 4))
    records = np.zeros((len(scales), FP8_DS_MLA.row_bytes), np.uint8)
    # Tiles 0 and 1 hold the bytes in order, tiles 2 and 3 the other way round: each byte meets half of the scales.
    records[:, :512] = np.concatenate([np.arange(256), np.arange(255, -1, -1)])
    records[:, 512:528] = np.ascontiguousarray(scales).view(np.uint8)
    cache = torch.from_numpy(records).unsqueeze(0)
    return Case("every byte", cache, torch.arange(len(scales), dtype=torch.int32).unsqueeze(0))


def scales_with_edges(count: int = 4096) -> np.ndarray:
    """fp32 bits: any at all, near ties of bf16, near overflow, and subnormal or giving subnormal products."""
    rng = np.random.default_rng(3)
    any_bits = rng.integers(0, 2**32, count, dtype=np.uint64)
    exponents = rng.integers(1, 255, count, dtype=np.uint64) << np.uint64(23)
    near_ties = exponents + 0x8000 + rng.integers(0, 8, count, dtype=np.uint64) * 0x10000
    near_ties += rng.integers(-1, 2, count).astype(np.uint64)
    tiny = rng.integers(0, 2**26, count, dtype=np.uint64)
    huge = (np.uint64(0x7F7FFFFF) - rng.integers(0, 2**26, count, dtype=np.uint64)) & np.uint64(0xFFFFFFFF)
    return np.concatenate([any_bits, near_ties, tiny, huge]).astype(np.uint32)


@needs_interpreter
def test_every_byte_under_any_scale() -> None:
    case = every_byte_under(scales_with_edges(1024))
    assert check_case(make_backend(), case) == []


@needs_interpreter
def test_e4m3_decode_is_exact_for_every_byte() -> None:
    """Under scale 1 every value but NaN is exact in bf16, so the row shows the decoded byte itself."""
    case = every_byte_under(np.full(4, 0x3F800000))
    buffers = Buffers(case)
    run_call(make_backend(), buffers.call(case))
    got = buffers.outcome(case).rows[:, :256]
    bits = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16).view(torch.int16)
    nan = torch.tensor([byte & 0x7F == 0x7F for byte in range(256)])
    assert torch.equal(got[0][~nan], bits[~nan])
    assert bool(got[0][nan].view(torch.bfloat16).isnan().all())


# --- deduplication ---


@needs_interpreter
def test_dedup_stores_a_shared_slot_once_and_the_same_way_every_time() -> None:
    case = make_case("width_4")
    backend = make_backend(dedup_from_rows=0)
    mappings = []
    for _ in range(2):
        buffers = Buffers(case)
        run_call(backend, buffers.call(case))
        mappings.append(buffers.outcome(case).compact_indices)
    assert torch.equal(*mappings)
    for first in range(0, case.topk_indices.shape[0], 4):
        slots, rows = case.topk_indices[first : first + 4], mappings[0][first : first + 4]
        distinct_slots, distinct_rows = slots[slots >= 0].unique().numel(), rows[rows >= 0].unique().numel()
        assert distinct_slots <= distinct_rows <= 1.25 * distinct_slots


@needs_interpreter
@pytest.mark.parametrize("threshold", [0, None], ids=["dedup", "plain"])
def test_unfilled_rows_are_zero_at_any_width(threshold: int | None) -> None:
    """More than the contract asks: what a masked lane may still touch is finite."""
    case = make_case("width_4_with_an_empty_request")
    buffers = Buffers(case)
    run_call(make_backend(threshold), buffers.call(case))
    outcome = buffers.outcome(case)
    assert not bool(outcome.rows[~outcome.filled.flatten()].any())


@needs_interpreter
def test_a_small_call_of_a_wide_request_prepares_the_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no later call has to compile: the empty request is launched once for each kind of call."""
    backend = make_backend()
    launched = count_launches(backend, monkeypatch)
    for name in ("width_4", "width_4", "width_2"):
        case = make_case(name)
        run_call(backend, Buffers(case).call(case))
    plain, distinct = "gather_dequant_kernel", "gather_distinct_kernel"
    assert [name for name, _ in launched] == [distinct, plain, plain, distinct, plain]


def count_launches(
    backend: GatherDequantBackend, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, dict[str, object]]]:
    """Fills, as calls are made, with the kernel's name and its compile-time constants for each launch."""
    launched: list[tuple[str, dict[str, object]]] = []
    run = backend._launch._run

    def noting(function: object, num_programs: int, *arguments: object, **constants: object) -> None:
        launched.append((function.__name__, constants))
        run(function, num_programs, *arguments, **constants)

    monkeypatch.setattr(backend._launch, "_run", noting)
    return launched


@needs_interpreter
def test_one_launch_a_call_and_the_same_kernel_for_every_token_count(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend()
    launched = count_launches(backend, monkeypatch)
    case = make_case("random_slots")
    for tokens in range(1, case.topk_indices.shape[0] + 1):
        part = replace(case, topk_indices=case.topk_indices[:tokens])
        run_call(backend, Buffers(part).call(part))
        assert len(launched) == tokens
    assert all(one == launched[0] for one in launched)


# --- where it cannot serve ---


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "INTERPRETED", False)


def reasons(target: Target) -> list[str]:
    return load_backend("triton").unavailable_reasons(target)


@pytest.mark.usefixtures("on_a_gpu")
def test_serves_gpus_and_an_unknown_fact_is_no_reason() -> None:
    assert reasons(GPU) == []
    assert reasons(replace(GPU, capability=(8, 0))) == []
    assert reasons(replace(GPU, capability=None, arch=None)) == []
    assert reasons(Target(torch.device("cuda", 0), "rocm", arch="gfx942")) == []


@pytest.mark.usefixtures("on_a_gpu")
def test_all_reasons_at_once() -> None:
    old = replace(GPU, capability=(7, 5), layout=replace(FP8_DS_MLA, name="odd", scale_dtype=torch.float8_e8m0fnu))
    capability, record = reasons(old)
    assert "7.5" in capability
    assert "8.0" in capability
    assert "'odd'" in record


@pytest.mark.usefixtures("on_a_gpu")
def test_a_cpu_without_the_interpreter_is_a_reason() -> None:
    (reason,) = reasons(CPU)
    assert "TRITON_INTERPRET=1" in reason


@needs_interpreter
def test_the_interpreter_is_no_way_to_serve_a_gpu() -> None:
    (reason,) = reasons(GPU)
    assert "TRITON_INTERPRET" in reason
    assert "cuda:0" in reason


def test_a_part_that_is_no_power_of_two_is_a_reason() -> None:
    layout = RecordLayout(
        "odd", 616, nope_dim=448, rope_dim=64, tile_dim=64, nope_offset=0, scale_offset=448, rope_offset=480
    )
    assert any("nope_dim 448" in reason for reason in reasons(replace(CPU, layout=layout)))


def test_without_triton_the_reason_names_the_import_error() -> None:
    code = """
import sys
sys.modules["triton"] = None
from hyv4_kvdequant import Target
from hyv4_kvdequant_triton import TritonBackend
print(TritonBackend.unavailable_reasons(Target.detect("cpu")))
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "Triton cannot be imported (ModuleNotFoundError" in printed


def test_importing_the_backend_does_not_import_triton() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import hyv4_kvdequant_triton; print(set(sys.modules) - before)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "hyv4_kvdequant_triton" in printed
    assert "'triton" not in printed


@needs_interpreter
def test_a_kernel_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        __name__ = "gather_dequant_kernel"

        def __getitem__(self, grid: object) -> object:
            raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(launcher.kernel, "gather_dequant_kernel", Broken())
    case = make_case("topk_1")
    with pytest.raises(BackendError) as caught:
        run_call(make_backend(), Buffers(case).call(case))
    for part in ("gather_dequant_kernel", "interpreter", f"Triton {launcher.triton.__version__}", "PassManager"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_oracle_used_here_agrees_with_pytorch() -> None:
    case = every_byte_under(scales_with_edges(64))
    expected = expected_rows(case.records(case.topk_indices.flatten()), FP8_DS_MLA)
    torch_backend = load_backend("torch")(CPU)
    buffers = Buffers(case)
    run_call(torch_backend, buffers.call(case))
    assert bool(rows_equal(buffers.outcome(case).rows, expected, FP8_DS_MLA).all())
