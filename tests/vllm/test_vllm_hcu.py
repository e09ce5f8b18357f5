"""vllm_hcu's two seams, through a stand-in of its names and shapes, each revision in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
GATE = "VLLM_HCU_HYV4_FP8_KV_DEQUANT"

PRELUDE = """
import sys, harness, torch
from types import SimpleNamespace
from safetensors.torch import load_file
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm_hcu.models.hy_v4.hcu_sparse as hcu
golden = load_file(sys.argv[1])
"""

BUILD = """
from vllm.config import set_current_vllm_config
harness.start_process()
config = harness.make_config()
buffer = torch.zeros(64, 512, dtype=torch.int32)
with set_current_vllm_config(config):
    impl = hcu.HYV4FlashMLASparseImpl(
        8, 576, 1 / 24, 1, None, None, KV_DTYPE, topk_indices_buffer=buffer, sinks=golden["attn_sink"],
        dcp_world_size=DCP,
    )
out, lse = impl._fp8_flash_mla_kernel(golden["query"][None], golden["kv_cache"], golden["slots"][None], None)
assert lse is None
recorded = golden["bf16_out"].double()
assert (out[0].double() - recorded).norm() / recorded.norm() < 2e-3
print("right")
"""

FUNCTION = """
import hyv4_kvdequant as h
plain = h.gather_dequantize(golden["kv_cache"], golden["slots"], backend="torch")
kv, indices = hcu.forward(golden["kv_cache"], golden["slots"])
assert torch.equal(kv.view(torch.int16), plain.compact_kv.view(torch.int16))
assert torch.equal(indices, plain.compact_indices)
print("right")
"""

REUSE = """
import hyv4_kvdequant as h
seen = []

class Recording(h.load_backend("torch")):
    name = "recording"
    features = h.Features(request_dedup=True, mapping_reuse=True)

    def gather_dequant(self, call):
        seen.append((call.tokens_per_request, call.reuse_compact_indices))
        super().gather_dequant(call)

h.register_backend(Recording)
state = hcu.LightOpKVReuseState(compact_indices=torch.empty(64, 512, dtype=torch.int32), dedup_key=None)
call = lambda allow, width=4, group=4: hcu.forward(
    golden["kv_cache"], golden["slots"], width,
    reuse_state=state, allow_mapping_reuse=allow, mapping_reuse_group_size=group,
)
kv, indices = call(False)
assert indices.data_ptr() == state.compact_indices.data_ptr(), "the host's buffer holds the mapping"
call(True)
call(True, width=1, group=1)  # an ordinary gather ends the group
call(True)
call(True)
print(seen)
"""


def run(
    code: str, step: Path, revision: str, backend: str = "torch", **variables: str
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(GATE)}
    paths = f"{HERE}{os.pathsep}{HERE / 'standin'}"
    env = {**clean, "PYTHONPATH": paths, "VLLM_HCU_STANDIN": revision, GATE: "1", GATE + "_BACKEND": backend}
    env |= {f"{GATE}_{name}": value for name, value in variables.items()}
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code, str(step)],
        capture_output=True,
        text=True,
        env=env,
        cwd=HERE,
        check=False,
    )


def test_the_kernel_of_a_revision_without_a_gate(golden_step: Path) -> None:
    done = run(BUILD.replace("KV_DTYPE", "'fp8_ds_mla'").replace("DCP", "1"), golden_step, "kernel")
    assert "right" in done.stdout, done.stderr


def test_decode_context_parallelism_stops_the_start_up(golden_step: Path) -> None:
    done = run(BUILD.replace("KV_DTYPE", "'fp8_ds_mla'").replace("DCP", "2"), golden_step, "kernel")
    assert "leave out decode context parallelism" in done.stderr


def test_another_cache_dtype_stops_the_start_up(golden_step: Path) -> None:
    done = run(BUILD.replace("KV_DTYPE", "'auto'").replace("DCP", "1"), golden_step, "kernel")
    assert "pass --kv-cache-dtype fp8_ds_mla" in done.stderr


@pytest.mark.parametrize("revision", ["function", "old_function"])
def test_the_function_of_a_revision_with_a_gate(golden_step: Path, revision: str) -> None:
    done = run(FUNCTION, golden_step, revision)
    assert "right" in done.stdout, done.stderr


def test_a_layer_is_not_built_with_an_unavailable_backend(golden_step: Path) -> None:
    build = "hcu.HYV4FlashMLASparseImpl(topk_indices_buffer=torch.zeros(1, 512, dtype=torch.int32))\nprint('built')"
    assert "built" in run(build, golden_step, "function").stdout
    done = run(build, golden_step, "function", backend="lightop")
    assert "built" not in done.stdout
    assert "LightOp is not installed" in done.stderr


@pytest.mark.parametrize(("name", "value"), [("SHADOW", "triton"), ("TRACE", "3")])
def test_what_the_function_cannot_do_stops_the_start_up(golden_step: Path, name: str, value: str) -> None:
    done = run("print('started')", golden_step, "function", **{name: value})
    assert "started" not in done.stdout
    assert f"{GATE}_{name} cannot be honoured" in done.stderr


def test_what_the_function_cannot_see_stops_the_start_up(golden_step: Path) -> None:
    build = (
        "from vllm.config import set_current_vllm_config\n"
        "with set_current_vllm_config(harness.make_config(ADDITIONAL)):\n"
        "    hcu.HYV4FlashMLASparseImpl(topk_indices_buffer=torch.zeros(1, 512, dtype=torch.int32))\n"
        "print('built')\n"
    )
    for additional, said in (
        ({"hyv4_kvdequant": {"backend": "torch", "shadow": "triton"}}, f"set {GATE}_SHADOW instead"),
        ({"hyv4_kvdequnt": {}}, "Did you mean 'hyv4_kvdequant'?"),
    ):
        done = run(build.replace("ADDITIONAL", repr(additional)), golden_step, "function")
        assert "built" not in done.stdout
        assert said in done.stderr
    # The variable wins over the key, so nothing is lost.
    done = run(build.replace("ADDITIONAL", "{'hyv4_kvdequant': {'backend': 'torch'}}"), golden_step, "function")
    assert "built" in done.stdout, done.stderr


def test_the_hosts_reuse_arguments_map_onto_ours(golden_step: Path) -> None:
    # The backend is registered in the process after start-up, so it is named from inside.
    code = "import os\nos.environ['VLLM_HCU_HYV4_FP8_KV_DEQUANT_BACKEND'] = 'recording'\n" + REUSE
    done = run(code, golden_step, "function")
    assert "[(4, False), (4, True), (1, False), (4, False), (4, True)]" in done.stdout, done.stderr


def test_a_revision_with_neither_seam_stops_the_start_up(golden_step: Path) -> None:
    done = run("print('started')", golden_step, "neither")
    assert "started" not in done.stdout
    assert "it has no class HYV4FlashMLASparseImpl" in done.stderr
