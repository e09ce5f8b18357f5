"""Start-up in a fresh process, through vLLM's own plugin loader: what is left alone, and what stops it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
GATE = "VLLM_HCU_HYV4_FP8_KV_DEQUANT"

CONFIGURE_LOGGING = (
    "import vllm.logger as vllm_logger\n"
    "if hasattr(vllm_logger, 'configure_logging'):\n"
    "    from vllm.config.logging import LoggingConfig\n"
    "    vllm_logger.configure_logging(LoggingConfig())\n"
)
LOAD = "import harness, torch\nfrom vllm.plugins import load_general_plugins\nload_general_plugins()\n"
CLASS = "from vllm.models.hy_v4.nvidia.flashmla_sparse import HYV4FlashMLASparseImpl as impl_class\n"
BUILD = (
    "harness.start_process()\n"
    "impl = harness.build_impl(harness.make_config(%s), topk=512, sinks=None, kv_cache_dtype=%r)\n"
)


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(GATE) and name != "VLLM_PLUGINS"}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=HERE,
        env={**clean, "PYTHONPATH": str(HERE), **env},
        check=False,
    )


def test_gate_off_leaves_the_class_untouched_and_imports_nothing() -> None:
    code = (
        LOAD
        + CLASS
        + (
            "import sys\n"
            "assert not hasattr(impl_class._fp8_flash_mla_kernel, '__wrapped__')\n"
            "assert impl_class.forward_mqa is impl_class.__mro__[1].forward_mqa\n"
            "assert 'hyv4_kvdequant.hosts.start_up' not in sys.modules\n"
            "print('untouched')\n"
        )
    )
    for env in ({}, {GATE: "0"}):
        code_for = code if not env else code.replace("assert 'hyv4_kvdequant.hosts.start_up' not in sys.modules\n", "")
        done = run(code_for, **env)
        assert "untouched" in done.stdout, done.stderr


def test_gate_on_hooks_before_and_after_the_import_and_twice_changes_nothing() -> None:
    before = LOAD + CLASS
    after = (
        "import harness, torch\n" + CLASS + "from vllm.plugins import load_general_plugins\nload_general_plugins()\n"
    )
    check = (
        "from hyv4_kvdequant.hosts.plugin import register\nregister(); register(); register()\n"
        "kernel = impl_class.__dict__['_fp8_flash_mla_kernel']\n"
        "assert hasattr(kernel, '__wrapped__') and not hasattr(kernel.__wrapped__, '__wrapped__')\n"
        "print('hooked once')\n"
    )
    for code in (before, after):
        done = run(code + check, **{GATE: "1"})
        assert "hooked once" in done.stdout, done.stderr


def test_the_log_names_the_backend_once() -> None:
    code = (
        LOAD
        + CONFIGURE_LOGGING
        + "harness.start_process()\nconfig = harness.make_config()\n"
        + 2 * "harness.build_impl(config, topk=512, sinks=None)\n"
    )
    done = run(code, **{GATE: "1", GATE + "_BACKEND": "torch", "VLLM_LOGGING_LEVEL": "INFO"})
    assert done.returncode == 0, done.stderr
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "dequantization is on" in line]
    assert len(lines) == 1, done.stdout + done.stderr
    assert "backend torch (hyv4-kvdequant" in lines[0]
    assert f"the environment variable {GATE}_BACKEND" in lines[0]


def test_a_plugin_list_without_us_is_what_doctor_is_for() -> None:
    done = run(
        LOAD + CLASS + "print(hasattr(impl_class._fp8_flash_mla_kernel, '__wrapped__'))",
        **{GATE: "1", "VLLM_PLUGINS": "x"},
    )
    assert done.stdout.strip().endswith("False")
    doctor = subprocess.run(
        [sys.executable, "-m", "hyv4_kvdequant", "doctor", "--device", "cpu"],
        capture_output=True,
        text=True,
        env={**os.environ, GATE: "1", GATE + "_BACKEND": "torch", "VLLM_PLUGINS": "x"},
        check=False,
    )
    assert doctor.returncode == 1
    assert "VLLM_PLUGINS" in doctor.stderr


RENAMED_CLASS = (
    "import harness, torch\n"
    "import vllm.models.hy_v4.nvidia.flashmla_sparse as module\n"
    "{change}\n"
    "from vllm.plugins import load_general_plugins\nload_general_plugins()\n"
)

STOPS = {
    "unknown_backend": (LOAD, {GATE: "1", GATE + "_BACKEND": "tritn"}, "Did you mean 'triton'?"),
    "unknown_shadow": (LOAD, {GATE: "1", GATE + "_SHADOW": "nobody"}, "named 'nobody'"),
    "unknown_variable": (LOAD, {GATE: "1", GATE + "_BACKND": "torch"}, f"Did you mean '{GATE}_BACKEND'?"),
    "unknown_variable_gate_off": (LOAD, {GATE + "_BACKND": "torch"}, f"Did you mean '{GATE}_BACKEND'?"),
    "misspelt_gate": (LOAD, {GATE[:-1]: "1"}, f"Did you mean '{GATE}'?"),
    "gate_in_small_letters": (LOAD, {GATE.lower(): "1"}, f"Did you mean '{GATE}'?"),
    "unreadable_gate": (LOAD, {GATE: "ture"}, "'ture', which cannot be read"),
    "unavailable_backend": (
        LOAD + BUILD % ("None", "fp8_ds_mla"),
        {GATE: "1", GATE + "_BACKEND": "lightop"},
        "No other backend was tried",
    ),
    "bf16_cache": (
        LOAD + BUILD % ("None", "auto"),
        {GATE: "1", GATE + "_BACKEND": "torch"},
        "pass --kv-cache-dtype fp8_ds_mla",
    ),
    "unknown_additional_key": (
        LOAD + BUILD % ("{'hyv4_kvdequant': {'workspace_md': 5}}", "fp8_ds_mla"),
        {GATE: "1", GATE + "_BACKEND": "torch"},
        "Did you mean 'workspace_mb'?",
    ),
    "misspelt_key_of_ours": (
        LOAD + BUILD % ("{'hyv4_kvdequnt': {'workspace_mb': 5}}", "fp8_ds_mla"),
        {GATE: "1", GATE + "_BACKEND": "torch"},
        "Did you mean 'hyv4_kvdequant'?",
    ),
    "inner_key_at_the_top": (
        LOAD + BUILD % ("{'workspace_mb': 5}", "fp8_ds_mla"),
        {GATE: "1", GATE + "_BACKEND": "torch"},
        "'workspace_mb' in --additional-config stands outside of 'hyv4_kvdequant'",
    ),
    "list_in_place_of_our_object": (
        LOAD + BUILD % ("{'hyv4_kvdequant': ['backend']}", "fp8_ds_mla"),
        {GATE: "1", GATE + "_BACKEND": "torch"},
        "'hyv4_kvdequant' in --additional-config is ['backend']",
    ),
    "workspace_too_large_for_no_wave": (
        "import hyv4_kvdequant.hosts.intercept as intercept\nintercept.sparse_wave = lambda device: 132\n"
        + LOAD
        + "harness.start_process()\n"
        "harness.build_impl(harness.make_config(max_tokens=4096), topk=2048, sinks=None)\n",
        {GATE: "1", GATE + "_BACKEND": "torch", GATE + "_WORKSPACE_MB": "200"},
        "set it to 299 or more",
    ),
    "class_gone": (
        RENAMED_CLASS.format(change="del module.HYV4FlashMLASparseImpl"),
        {GATE: "1"},
        "it has no class HYV4FlashMLASparseImpl",
    ),
    "method_gone": (
        RENAMED_CLASS.format(
            change="import vllm.v1.attention.backends.mla.flashmla_sparse as base\n"
            "del module.HYV4FlashMLASparseImpl._fp8_flash_mla_kernel, base.FlashMLASparseImpl._fp8_flash_mla_kernel"
        ),
        {GATE: "1"},
        "has no method _fp8_flash_mla_kernel",
    ),
    "other_signature": (
        RENAMED_CLASS.format(
            change="module.HYV4FlashMLASparseImpl._fp8_flash_mla_kernel = lambda self, q, cache, indices: None"
        ),
        {GATE: "1"},
        "takes (self, q, cache, indices), expected",
    ),
}


@pytest.mark.parametrize("kind", STOPS)
def test_start_up_stops_with_the_message(kind: str) -> None:
    code, env, expected = STOPS[kind]
    done = run(code + "print('started')", **env)
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert expected in done.stderr


def test_a_failed_hook_fails_again_when_the_host_tries_again() -> None:
    code = (
        LOAD + "import hyv4_kvdequant.hosts.vllm_mainline as ours\nours.IMPL_CLASS = 'Renamed'\n"
        "for attempt in range(2):\n"
        "    try:\n"
        "        import vllm.models.hy_v4.nvidia.flashmla_sparse\n"
        "    except Exception as error:\n"
        "        print('stopped', type(error).__name__)\n"
    )
    assert run(code, **{GATE: "1"}).stdout.count("stopped HostError") == 2


def test_a_sparse_layer_that_attends_without_us_is_an_error() -> None:
    code = LOAD + (
        "from types import SimpleNamespace\n"
        "from hyv4_kvdequant.hosts import vllm_mainline\n"
        "layer = SimpleNamespace(is_sparse=True, mla_attn=SimpleNamespace(impl=object()))\n"
        "vllm_mainline._check_layer(lambda: None, layer, (), {})\n"
    )
    done = run(code, **{GATE: "1"})
    assert "attends through builtins.object" in done.stderr


@pytest.mark.parametrize("dtype", ["fp8"])
def test_the_alias_of_the_cache_dtype_is_left_to_vllm(dtype: str) -> None:
    done = run(LOAD + BUILD % ("None", dtype), **{GATE: "1", GATE + "_BACKEND": "torch"})
    assert "pass --kv-cache-dtype" not in done.stderr
