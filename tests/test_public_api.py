"""No public name or signature changes unless the snapshot and the changelog say so."""

from __future__ import annotations

from pathlib import Path

import api_snapshot
import pytest

import hyv4_kvdequant
import hyv4_kvdequant.testing

REMEDY = "If it is meant: name it in CHANGELOG.md and run `python tests/api_snapshot.py`."


def test_what_is_public_is_what_was_written_down() -> None:
    changed = api_snapshot.differences(api_snapshot.load_snapshot(), api_snapshot.public_api())
    assert not changed, "\n".join([*changed.values(), REMEDY])


def test_the_changelog_names_what_changed() -> None:
    since = {name: entry["since"] for name, entry in api_snapshot.load_snapshot().items()}
    assert api_snapshot.unannounced(since) == []


def test_a_change_is_noticed() -> None:
    current = api_snapshot.public_api()
    snapshot = {name: {"is": text, "since": "0.1.0"} for name, text in current.items()}
    assert api_snapshot.differences(snapshot, current) == {}
    name = "hyv4_kvdequant.testing.run_checks"
    changed = {**current, name: "()", "hyv4_kvdequant.new": "()"}
    del changed["hyv4_kvdequant.Target"]
    assert sorted(api_snapshot.differences(snapshot, changed)) == [
        "hyv4_kvdequant.Target",
        "hyv4_kvdequant.new",
        "hyv4_kvdequant.testing.run_checks",
    ]


def test_a_change_that_the_changelog_does_not_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changes\n\n## 0.2.0\n\n- `run_checks` takes a layout.\n\n## 0.1.0\n\n- `verify`\n")
    monkeypatch.setattr(api_snapshot, "CHANGELOG", changelog)
    names = {"hyv4_kvdequant.testing.run_checks": "0.2.0", "hyv4-kvdequant verify": "0.2.0"}
    (complaint,) = api_snapshot.unannounced(names)
    assert complaint == "CHANGELOG.md, section 0.2.0, does not name `hyv4-kvdequant verify`"


def test_every_kind_of_public_name_is_guarded() -> None:
    current = api_snapshot.public_api()
    for name in (
        "hyv4_kvdequant.GatherDequantBackend.gather_dequant",
        "hyv4_kvdequant.testing.ContractTests",
        "hyv4_kvdequant.testing.strategies.cases",
        "hyv4_kvdequant.backends",
        "VLLM_HCU_HYV4_FP8_KV_DEQUANT",
        "VLLM_HCU_HYV4_FP8_KV_DEQUANT_SHADOW",
        "hyv4-kvdequant verify",
    ):
        assert name in current


def test_the_reference_page_names_everything_public() -> None:
    page = (api_snapshot.ROOT / "docs" / "reference.md").read_text()
    names = {*hyv4_kvdequant.__all__, *hyv4_kvdequant.testing.__all__}
    prefix = "hyv4_kvdequant.testing.strategies."
    names |= {name.removeprefix(prefix) for name in api_snapshot.public_api() if name.startswith(prefix)}
    assert sorted(name for name in names if f"`{name}`" not in page) == []
