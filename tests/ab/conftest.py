"""Fixtures of the A/B tests: the plugin with the wrong backend, really installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hyv4_kvdequant import selector

PLUGIN = Path(__file__).parents[1] / "plugins" / "wrong_backend"


@pytest.fixture(scope="session")
def wrong_plugin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip installed the plugin."""
    target = tmp_path_factory.mktemp("wrong_backend")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(PLUGIN)], check=True)
    return target


@pytest.fixture
def wrong_plugin(wrong_plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plugin on this process's import path."""
    monkeypatch.syspath_prepend(str(wrong_plugin_folder))
    return wrong_plugin_folder


@pytest.fixture
def fresh_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends read the fault when they are made, so every test makes its own."""
    monkeypatch.setattr(selector, "_instances", {})
