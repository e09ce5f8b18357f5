"""A host is known by whole signatures; what vLLM 0.34.0 adds is honoured, what cannot be right is refused."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from test_start_up import CLASS, GATE, LOAD, RENAMED_CLASS, run

from hyv4_kvdequant.contract import HostError, InvalidCallError

pytestmark = pytest.mark.vllm

ADDED = (
    "import functools\n"
    "original = module.HYV4FlashMLASparseImpl.{name}\n"
    "def {name}(self, *args, **kwargs): return original(self, *args, **kwargs)\n"
    "import inspect\n"
    "signature = inspect.signature(original)\n"
    "more = inspect.Parameter('brand_new', inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)\n"
    "{name}.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])\n"
    "module.HYV4FlashMLASparseImpl.{name} = {name}"
)
METHODS = ("_fp8_flash_mla_kernel", "_bf16_flash_mla_kernel", "forward_mqa", "_forward_fp8_kv_mixed_batch")


@pytest.mark.parametrize("name", METHODS)
def test_one_argument_more_with_a_default_is_another_revision(name: str) -> None:
    done = run(RENAMED_CLASS.format(change=ADDED.format(name=name)) + "print('started')", **{GATE: "1"})
    assert "started" not in done.stdout
    assert f"HYV4FlashMLASparseImpl.{name} takes (" in done.stderr
    assert "brand_new=None" in done.stderr


def test_a_metadata_builder_that_takes_more_is_another_revision() -> None:
    change = (
        "import vllm.v1.attention.backends.mla.flashmla_sparse as base\n"
        "def build(self, common_prefix_len, common_attn_metadata, fast_build=False, brand_new=None): ...\n"
        "base.FlashMLASparseMetadataBuilder.build = build"
    )
    done = run(RENAMED_CLASS.format(change=change) + "print('started')", **{GATE: "1"})
    assert "started" not in done.stdout
    assert "FlashMLASparseMetadataBuilder.build takes (" in done.stderr


def test_the_log_and_the_source_name_the_same_revision() -> None:
    from vllm import __version__

    code = LOAD.replace("load_general_plugins()\n", "", 1) + (
        "import logging\nlogging.basicConfig(level=logging.INFO)\n"
        "from vllm.plugins import load_general_plugins\nload_general_plugins()\n"
        "logging.getLogger('hyv4_kvdequant').propagate = True\n"
    )
    done = run(
        code
        + CLASS
        + "from hyv4_kvdequant.hosts.vllm_revisions import recognise_installed\nprint(recognise_installed())",
        **{GATE: "1"},
    )
    expected = {"0.29.0": "vLLM 0.29.0", "0.33.0": "vLLM 0.31.0 to 0.33.0", "0.34.0": "vLLM 0.34.0"}[__version__]
    assert done.stdout.strip().splitlines()[-1] == expected, done.stderr
    assert f"HYV4FlashMLASparseImpl is the revision of {expected} (installed: vLLM {__version__})" in done.stderr


# --- topk_length ---


@pytest.fixture
def impl(vllm_process: None, golden: dict[str, Any]) -> Any:
    return harness.build_impl(harness.make_config(), topk=512, sinks=golden["attn_sink"])


def kernel_call(impl: Any, golden: dict[str, Any], shape: tuple[int, int], slots: torch.Tensor, **more: Any) -> Any:
    query = golden["query"].view(*shape, 8, 576)
    return impl._fp8_flash_mla_kernel(query, golden["kv_cache"], slots.view(*shape, -1), None, **more)


@pytest.mark.parametrize(
    ("shape", "lengths"), [((1, 16), [100]), ((4, 4), [512, 0, 1, 77]), ((16, 1), list(range(16)))]
)
def test_entries_from_topk_length_on_are_not_read(
    impl: Any, golden: dict[str, Any], shape: tuple[int, int], lengths: list[int]
) -> None:
    cut = golden["slots"].clone().view(*shape, -1)
    for row, length in enumerate(lengths):
        cut[row, :, length:] = -1
    expected = kernel_call(impl, golden, shape, cut)
    topk_length = torch.tensor(lengths, dtype=torch.int32)
    by_name = kernel_call(impl, golden, shape, golden["slots"], topk_length=topk_length)
    by_position = impl._fp8_flash_mla_kernel(
        golden["query"].view(*shape, 8, 576), golden["kv_cache"], golden["slots"].view(*shape, -1), None, topk_length
    )
    for out, lse in (by_name, by_position):
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


def test_topk_length_of_another_shape_is_refused(impl: Any, golden: dict[str, Any]) -> None:
    with pytest.raises(InvalidCallError, match=r"topk_length is of shape \(3,\); expected \(4,\)"):
        kernel_call(impl, golden, (4, 4), golden["slots"], topk_length=torch.ones(3, dtype=torch.int32))


# --- what is refused when layers are built ---


def build(golden: dict[str, Any], sinks: torch.Tensor | None, **parallel: int | bool) -> Any:
    config = harness.make_config()
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    return harness.build_impl(config, topk=512, sinks=sinks)


@pytest.mark.usefixtures("vllm_process")
def test_sinks_under_decode_context_parallelism_are_refused(golden: dict[str, Any]) -> None:
    with pytest.raises(HostError, match="sinks stay local"):
        build(golden, golden["attn_sink"], decode_context_parallel_size=2)
    assert build(golden, golden["attn_sink"], decode_context_parallel_size=1) is not None
    # Layers without sinks are vLLM's business.
    assert build(golden, None, decode_context_parallel_size=2) is not None


@pytest.mark.usefixtures("vllm_process")
@pytest.mark.parametrize("option", [{"enable_dbo": True}, {"ubatch_size": 2}])
def test_micro_batches_are_refused_however_they_are_switched_on(golden: dict[str, Any], option: dict[str, Any]) -> None:
    with pytest.raises(HostError, match="micro-batches"):
        build(golden, None, **option)


@pytest.mark.usefixtures("vllm_process")
def test_vllm_is_told_that_query_lengths_must_be_exact() -> None:
    from vllm.models.hy_v4.nvidia.flashmla_sparse import HYV4FlashMLASparseBackend
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

    assert not HYV4FlashMLASparseBackend.supports_device_cpu_query_lens_mismatch()
    assert FlashMLASparseBackend.supports_device_cpu_query_lens_mismatch()


def test_doctor_names_the_revision_without_importing_vllm() -> None:
    from vllm import __version__

    code = (
        "import sys\nsys.argv = ['hyv4-kvdequant', 'doctor', '--device', 'cpu', '--json']\n"
        "import atexit\natexit.register(lambda: print('vllm' in sys.modules, file=sys.stderr))\n"
        "from hyv4_kvdequant.cli import main\nmain()"
    )
    done = run(code)
    assert f"vLLM {__version__} is installed; its attention class is the revision of vLLM 0." in done.stdout
    assert done.stderr.strip().endswith("False")
