"""Every kernel compiles ahead of time for five GPUs that are not here, and the assembly is what it should be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

TOOL = Path(__file__).parents[1] / "tools" / "compile_triton.py"
NVIDIA = ("sm_80", "sm_90", "sm_100")
AMD = ("gfx942", "gfx950")
TARGETS = (*NVIDIA, *AMD)
ROWS_OF_A_WARP = 2


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """By target and by what asks for the kernel. Compiled in a process whose Triton does not interpret."""
    folder = tmp_path_factory.mktemp("assembly")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(TOOL), "--save", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {tuple(path.stem.split(", ", 1)): path.read_text() for path in folder.iterdir()}


def test_every_kernel_compiles_for_every_target(assembly: dict[tuple[str, str], str]) -> None:
    assert {target for target, _ in assembly} == set(TARGETS)
    assert len(assembly) == len(TARGETS) * (5 + 3)  # the backend's five kinds of call, the core's three kernels
    assert all(assembly.values())


@pytest.mark.parametrize("asked", ["width 1, packed", "width 1, gaps between blocks", "width 1, mapping reused"])
def test_sm_90_moves_nope_16_bytes_at_a_time(assembly: dict[tuple[str, str], str], asked: str) -> None:
    """One warp holds two records: 2 x 512 bytes are two 16-byte loads a lane, 2 x 1024 bytes are four stores."""
    ptx = assembly["sm_90", asked]
    wide = r"\.global[\w.:]*\.(v4\.b32|v2\.b64)"
    assert len(re.findall("ld" + wide, ptx)) >= ROWS_OF_A_WARP * 512 // (32 * 16)
    assert len(re.findall("st" + wide, ptx)) >= ROWS_OF_A_WARP * 1024 // (32 * 16)
    assert not re.findall(r"(ld|st)\.global[\w.:]*\.(b8|u8|b16|u16)\b", ptx)


def test_each_decode_where_it_belongs(assembly: dict[tuple[str, str], str]) -> None:
    for target in NVIDIA:
        assert ("e4m3x2" in assembly[target, "width 1, packed"]) == (target != "sm_80")


@pytest.mark.parametrize("target", NVIDIA)
def test_no_flush_and_no_fusion_on_nvidia(assembly: dict[tuple[str, str], str], target: str) -> None:
    for (other, asked), ptx in assembly.items():
        if other == target and asked.startswith("width"):
            assert "mul.rn.f32" in ptx
            assert ".ftz" not in ptx
            assert not re.search(r"\bfma\.", ptx)


@pytest.mark.parametrize("target", AMD)
def test_no_flush_on_amd(assembly: dict[tuple[str, str], str], target: str) -> None:
    for (other, asked), amdgcn in assembly.items():
        if other == target and asked.startswith("width"):
            assert re.search(r"\.amdhsa_float_denorm_mode_32 3\b", amdgcn)
            assert "global_load_dwordx4" in amdgcn
