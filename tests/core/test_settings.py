"""Settings: what is read, where from, and every value that cannot be."""

from __future__ import annotations

import pytest

import hyv4_kvdequant as h
from hyv4_kvdequant.settings import GATE


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("True", True), ("0", False), ("false", False), ("on", True)]
)
def test_booleans_are_vllms(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv(GATE, text)
    assert h.load_settings().enabled is value


@pytest.mark.parametrize("text", ["ture", "maybe", "2", "", " "])
def test_a_boolean_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(GATE, text)
    with pytest.raises(h.ConfigurationError) as caught:
        h.load_settings()
    assert GATE in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "1GB", ""])
def test_a_workspace_that_cannot_be_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(GATE + "_WORKSPACE_MB", text)
    with pytest.raises(h.ConfigurationError, match=f"{GATE}_WORKSPACE_MB"):
        h.load_settings()


@pytest.mark.parametrize(
    ("given", "nearest"), [("_BACKND", "_BACKEND"), ("_SHADOWS", "_SHADOW"), ("_WORKSPACE", "_WORKSPACE_MB")]
)
def test_a_misspelt_variable_is_an_error_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, given: str, nearest: str
) -> None:
    monkeypatch.setenv(GATE + given, "torch")
    with pytest.raises(h.ConfigurationError, match=f"Did you mean '{GATE}{nearest}'"):
        h.load_settings()


def test_sources_are_known_and_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GATE + "_BACKEND", "torch")
    settings = h.load_settings({"backend": "triton", "workspace_mb": 512})
    assert (settings.backend, settings.workspace_mb, settings.shadow) == ("torch", 512, None)
    assert settings.source("backend") == f"the environment variable {GATE}_BACKEND"
    assert "--additional-config" in settings.source("workspace_mb")
    assert settings.source("shadow") == "the default"


def test_additional_config_is_held_to_the_same_rules() -> None:
    with pytest.raises(h.ConfigurationError, match="Did you mean 'workspace_mb'"):
        h.load_settings({"workspace_md": 1})
    with pytest.raises(h.ConfigurationError, match="--additional-config"):
        h.load_settings({"workspace_mb": "lots"})
    with pytest.raises(h.ConfigurationError, match=f"set the environment variable {GATE}=1"):
        h.load_settings({"enabled": True})


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        h.load_settings().backend = "torch"
