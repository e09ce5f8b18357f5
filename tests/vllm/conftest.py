"""Fixtures of the vLLM suite; it runs in an environment of its own with a real vLLM (`make test-vllm`)."""

from __future__ import annotations

from pathlib import Path

import harness  # first: it sets what vLLM reads on import
import pytest
import torch
from safetensors.torch import load_file


@pytest.fixture
def golden(golden_step: Path) -> dict[str, torch.Tensor]:
    return load_file(golden_step)


@pytest.fixture
def vllm_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process with the gate on and the `torch` backend, hooked through vLLM's own plugin loader."""
    import vllm.plugins

    monkeypatch.setenv("VLLM_HCU_HYV4_FP8_KV_DEQUANT", "1")
    monkeypatch.setenv("VLLM_HCU_HYV4_FP8_KV_DEQUANT_BACKEND", "torch")
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    vllm.plugins.load_general_plugins()
    harness.define_flashmla_op()
    harness.start_process()
