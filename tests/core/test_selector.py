"""The selector returns what was asked for, or raises; never something else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plugin_folder import PluginFolder, backend_source

import hyv4_kvdequant as h
from hyv4_kvdequant.selector import PLATFORM_DEFAULTS, choose_name, get_backend
from hyv4_kvdequant.settings import GATE

CPU = h.Target.detect("cpu")


def test_the_default_follows_the_platform_alone() -> None:
    settings = h.load_settings()
    for platform, name in PLATFORM_DEFAULTS.items():
        chosen, why = choose_name(settings, h.Target(torch.device("cpu"), platform))
        assert chosen == name
        assert platform in why
    assert PLATFORM_DEFAULTS == {"hcu": "lightop", "cuda": "triton", "rocm": "triton", "cpu": "torch"}


def test_a_platform_without_default_asks_for_a_name() -> None:
    with pytest.raises(h.ConfigurationError, match=f"{GATE}_BACKEND"):
        choose_name(h.load_settings(), h.Target(torch.device("cpu"), "xpu"))


def test_the_variable_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GATE + "_BACKEND", "torch")
    assert h.select_backend(CPU).name == "torch"


def test_an_instance_is_made_once_for_a_name_and_target() -> None:
    assert h.select_backend(CPU) is h.select_backend(CPU)
    assert h.select_backend(replace(CPU, topk=64)) is not h.select_backend(CPU)


def test_unavailable_shows_all_reasons_and_tries_nobody_else(
    plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = ("There is no device.", "LightOp lacks the op.")
    plugins.install("gone-kernels", "gone_plugin", backend_source("gone", reasons=reasons), "gone")
    monkeypatch.setenv(GATE + "_BACKEND", "gone")
    with pytest.raises(h.BackendUnavailableError) as caught:
        h.select_backend(CPU)
    assert caught.value.reasons == list(reasons)
    message = str(caught.value)
    assert all(reason in message for reason in reasons)
    assert f"the environment variable {GATE}_BACKEND" in message
    assert "torch (hyv4-kvdequant" in message
    assert "No other backend was tried" in message


def test_a_failure_is_not_remembered(plugins: PluginFolder) -> None:
    with pytest.raises(h.UnknownBackendError):
        get_backend("soon", CPU)
    plugins.install("soon-kernels", "soon_plugin", backend_source("soon"), "soon")
    assert get_backend("soon", CPU).name == "soon"


def test_a_foreign_layout_is_a_reason() -> None:
    layout = replace(h.FP8_DS_MLA, name="fnuz", nope_dtype=torch.float8_e4m3fnuz)
    with pytest.raises(h.BackendUnavailableError, match="'fnuz'"):
        get_backend("torch", h.Target.detect("cpu", layout))
