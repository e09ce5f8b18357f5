"""Settings: what is read, where from, and every name and value that is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hyv4_kvdequant as h
from hyv4_kvdequant.hosts.plugin import register
from hyv4_kvdequant.settings import GATE, load_settings_of, variable_names


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


# --- what is accepted is what docs/settings.md lists ---

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def listed(variable: str) -> str:
    """The column `accepts` of a variable in docs/settings.md."""
    return next(row.split(" | ")[2] for row in PAGE.read_text().splitlines() if row.startswith(f"| `{variable}` |"))


def listed_switches() -> dict[str, bool]:
    """Every spelling of a boolean in docs/settings.md."""
    on, off = listed(GATE).removesuffix(", in any letter case").split("; or ")
    return {**dict.fromkeys(on.split(", "), True), **dict.fromkeys(off.split(", "), False)}


@pytest.mark.parametrize("variable", [GATE, GATE + "_TRACE_QUERIES", GATE + "_TRACE_ON_MISMATCH"])
def test_every_listed_boolean_is_accepted(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    assert len(listed_switches()) == 8
    field = variable_names()[variable]
    for text, value in listed_switches().items():
        for spelling in (text, text.upper(), text.title()):
            monkeypatch.setenv(variable, spelling)
            assert getattr(h.load_settings(), field) is value
        monkeypatch.delenv(variable)
        if field != "enabled":
            assert getattr(h.load_settings({field: text}), field) is value


@pytest.mark.parametrize(
    "text", ["t", "f", "y", "n", "1.0", "0.0", " 1 ", "1 ", "\ttrue", "01", "enabled", "production"]
)
def test_an_unlisted_boolean_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(GATE, text)
    with pytest.raises(h.ConfigurationError, match=GATE):
        h.load_settings()
    monkeypatch.delenv(GATE)
    with pytest.raises(h.ConfigurationError, match="trace_queries"):
        h.load_settings({"trace_queries": text})


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.text(alphabet="truefalsyno10 _.+-TRUE", max_size=6), st.text(max_size=4)))
def test_no_other_text_is_a_boolean(text: str) -> None:
    known = listed_switches()
    if text.lower() in known:
        assert h.load_settings({"trace_queries": text}).trace_queries is known[text.lower()]
    else:
        with pytest.raises(h.ConfigurationError, match="trace_queries"):
            h.load_settings({"trace_queries": text})


@pytest.mark.parametrize(
    "text", [" 5", "5 ", "+5", "5.0", "1_000", "5e3", "0x10", "-1", "\u0665", "true", "9" * 19, "9" * 5000]
)
def test_an_unlisted_whole_number_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    assert listed(GATE + "_TRACE_MB") == "a whole number of at least 1, in digits"
    monkeypatch.setenv(GATE + "_TRACE_MB", text)
    with pytest.raises(h.ConfigurationError, match=f"{GATE}_TRACE_MB.*\n?.*a whole number of at least 1, in digits"):
        h.load_settings()


def test_least_numbers_are_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, field in variable_names().items():
        if not (found := re.match(r"a whole number of at least (\d+)", listed(variable))):
            continue
        least = int(found[1])
        monkeypatch.setenv(variable, str(least))
        assert getattr(h.load_settings(), field) == least
        monkeypatch.setenv(variable, str(least - 1))
        with pytest.raises(h.ConfigurationError, match=variable):
            h.load_settings()
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("workspace_mb", True),
        ("workspace_mb", 512.0),
        ("workspace_mb", [512]),
        ("workspace_mb", None),
        ("trace", False),
        ("trace_queries", 1.0),
        ("trace_queries", 2),
        ("trace_queries", None),
        ("trace_queries", {}),
        ("backend", 1),
        ("backend", True),
        ("backend", ["torch"]),
        ("shadow", {}),
        ("report_dir", 7),
        ("report_dir", ["reports"]),
        ("report_dir", "a\0b"),
    ],
)
def test_json_of_another_type_is_an_error_that_names_the_key(key: str, value: object) -> None:
    with pytest.raises(h.ConfigurationError, match=f"'{key}' under 'hyv4_kvdequant' in --additional-config") as caught:
        h.load_settings({key: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("trace_queries", True), ("trace_queries", 1), ("trace", 3), ("shadow", None)]
)
def test_json_of_the_listed_types_is_accepted(key: str, value: object) -> None:
    assert getattr(h.load_settings({key: value}), key) == value


@pytest.mark.parametrize("given", [["backend"], "backend", 1, True, 0, "", []])
def test_something_else_where_our_object_belongs_is_an_error(given: Any) -> None:
    with pytest.raises(h.ConfigurationError, match="'hyv4_kvdequant' in --additional-config"):
        h.load_settings(given)
    with pytest.raises(h.ConfigurationError, match="'hyv4_kvdequant' in --additional-config"):
        load_settings_of({"hyv4_kvdequant": given})


def test_a_folder_may_begin_with_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(GATE + "_REPORT_DIR", "~/reports")
    assert h.load_settings().report_dir == tmp_path / "reports"
    monkeypatch.delenv(GATE + "_REPORT_DIR")
    assert h.load_settings({"report_dir": "~"}).report_dir == tmp_path
    with pytest.raises(h.ConfigurationError, match="report_dir"):
        h.load_settings({"report_dir": "~nobody-of-this-name/reports"})


# --- which names are read ---

DEFAULTS = {field: info.default for field, info in h.Settings.model_fields.items()}


@pytest.mark.parametrize("value", ["1", "production"])
@pytest.mark.parametrize(
    "name", ["ENABLED", "enabled", "BACKEND", "backend", "TRACE", "trace", "REPORT_DIR", "report_dir"]
)
def test_a_name_without_the_prefix_is_nobodys(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert h.load_settings().model_dump() == DEFAULTS


LIKE_THE_GATE = [
    GATE + "IZE",
    GATE[:-1],
    GATE.lower(),
    GATE.title(),
    GATE.replace("_HCU", ""),
    GATE.replace("VLLM_", ""),
    GATE.replace("VLLM_HCU_", ""),
    GATE.replace("_FP8", ""),
    GATE.replace("HYV4", "HY4"),
    GATE.replace("HYV4", "HVY4"),
    GATE.replace("HYV4", "HY_V4"),
    GATE.replace("KV", "VK"),
    GATE.replace("KV_", "KV"),
    GATE.replace("HCU", "HUC"),
    GATE[:-1] + "_BACKEND",
    GATE.lower() + "_backend",
    GATE + "_backend",
    GATE.replace("_HCU", "") + "_SHADOW",
]


@pytest.mark.parametrize("beside", [{}, {GATE: "1"}], ids=["gate unset", "gate set"])
@pytest.mark.parametrize("name", LIKE_THE_GATE)
def test_a_name_like_the_gates_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, beside: dict[str, str]) -> None:
    for variable, value in {**beside, name: "1"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(h.ConfigurationError, match=rf"The environment variable {name} is not one of ours\."):
        h.load_settings()


@pytest.mark.parametrize("name", LIKE_THE_GATE)
def test_vllms_entry_point_sees_a_misspelt_gate(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(h.ConfigurationError, match=f"The environment variable {name} "):
        register()


def test_the_same_variable_in_two_letter_cases_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GATE + "_BACKEND", "torch")
    monkeypatch.setenv(GATE.lower() + "_backend", "triton")
    with pytest.raises(h.ConfigurationError, match=f"{GATE.lower()}_backend .*\n?.*Did you mean '{GATE}_BACKEND'"):
        h.load_settings()


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_HCU_USE_FLASH_ATTN",
        "VLLM_HCU_HYV4_FP8_KV_CACHE",
        "VLLM_HCU_HYV4_FP8_KV_QUANT",
        "VLLM_HCU_HYV4_MOE_DEQUANT",
        "VLLM_HCU_FP8_KV_DEQUANT",
        "VLLM_HCU_HYV3_FP8_KV_DEQUANT",
        "VLLM_HCU_HYV4_FP4_KV_DEQUANT",
        "KV_DEQUANT",
        "HYV4_KV_DEQUANT_SERVICE_HOST",
        "HYV4_FP8_KV_DEQUANT_PORT_8000_TCP",
    ],
)
def test_other_peoples_variables_are_theirs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert h.load_settings().model_dump() == DEFAULTS
    register()


# --- vLLM's whole additional config ---


@pytest.mark.parametrize(
    "key",
    [
        "hyv4_kvdequnt",
        "hyv4-kvdequant",
        "HYV4_KVDEQUANT",
        "hyv4kvdequant",
        "hyv4_kv_dequant",
        "hy4_kvdequant",
        "hyv4_dequant",
        "hyv4_fp8_kv_dequant",
        GATE,
        GATE + "_BACKEND",
        GATE.lower(),
    ],
)
@pytest.mark.parametrize("beside", [{}, {"hyv4_kvdequant": {"backend": "torch"}}])
def test_a_key_like_ours_is_an_error(key: str, beside: dict[str, object]) -> None:
    with pytest.raises(h.ConfigurationError, match=f"^'{key}' in --additional-config.*Did you mean 'hyv4_kvdequant'"):
        load_settings_of({"other_plugin": {}, **beside, key: {"backend": "torch"}})


@pytest.mark.parametrize("field", [field for field in h.Settings.model_fields if field != "enabled"])
def test_our_inner_keys_do_not_stand_at_the_top(field: str) -> None:
    for key in (field, field.replace("_", "-"), field.upper()):
        with pytest.raises(h.ConfigurationError, match=f"^'{key}' in --additional-config stands outside"):
            load_settings_of({key: 1})


def test_other_peoples_keys_are_theirs() -> None:
    theirs = [
        "ascend_scheduler_config",
        "torchair_graph_config",
        "hyv3_kvdequant",
        "hyv4_kv_quant",
        "refresh",
        "enabled",
    ]
    whole = {"hyv4_kvdequant": {"backend": "torch", "trace": 2}, **dict.fromkeys(theirs, 1)}
    assert load_settings_of(whole) == h.load_settings({"backend": "torch", "trace": 2})


@pytest.mark.parametrize("whole", [None, {}, {"hyv4_kvdequant": {}}, {"hyv4_kvdequant": None}, object()])
def test_a_configuration_without_ours_gives_the_defaults(whole: object) -> None:
    assert load_settings_of(whole) == h.load_settings()


@pytest.mark.parametrize("whole", [["hyv4_kvdequant"], "hyv4_kvdequant", 3])
def test_a_configuration_that_is_no_object_is_an_error(whole: object) -> None:
    with pytest.raises(h.ConfigurationError, match=r"^--additional-config is"):
        load_settings_of(whole)
