"""Shared fixtures."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from plugin_folder import PluginFolder

# The vLLM suite needs an environment of its own: `make test-vllm`.
collect_ignore = [] if importlib.util.find_spec("vllm") else ["vllm"]

# Two pytest workers on two cores: more threads than that only get in each other's way.
torch.set_num_threads(1)

GOLDEN_STEP = Path(__file__).parent / "data" / "hyv4_step.safetensors"
GATE = "VLLM_HCU_HYV4_FP8_KV_DEQUANT"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the developer's own shell reaches a test."""
    for variable in [name for name in os.environ if name.startswith(GATE) or name == "VLLM_PLUGINS"]:
        monkeypatch.delenv(variable)


@pytest.fixture
def golden_step() -> Path:
    return GOLDEN_STEP


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginFolder:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return PluginFolder(folder)
