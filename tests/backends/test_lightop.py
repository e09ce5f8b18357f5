"""The `lightop` backend beside a stand-in for LightOp, which is really installed and met in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hyv4_kvdequant_lightop as lightop_backend
from hyv4_kvdequant import FP8_DS_MLA, BackendUnavailableError, Target

TESTS = Path(__file__).parents[1]
GATE = "VLLM_HCU_HYV4_FP8_KV_DEQUANT"
OP = "decode_gather_and_up_convert_with_indices"
HCU = Target(torch.device("cpu"), "hcu")
WORKING_FACES = ("six_arguments", "newer", "public_category", "dedup")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the stand-in."""
    folder = tmp_path_factory.mktemp("lightop")
    options = "--quiet --no-deps --no-build-isolation --no-index --no-compile --disable-pip-version-check"
    source = TESTS / "plugins" / "lightop_standin"
    command = [sys.executable, "-m", "pip", "install", *options.split(), "--target", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def run(*arguments: str, face: str | None, site: Path) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own; without a face there is no LightOp."""
    environment = {**os.environ, "COLUMNS": "4000"}
    if face is not None:
        environment.update(PYTHONPATH=str(site), LIGHTOP_STANDIN_FACE=face)
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


Answers = dict[str, dict[str, Any]]


def ask(*questions: str, site: Path) -> dict[str, Answers]:
    """The answers of lightop_face.py: by face, then by question."""
    script = str(Path(__file__).with_name("lightop_face.py"))
    done = run(script, *questions, face="", site=site)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Answers] = json.loads(done.stdout)
    errors = [found["error"] for found in answers.values() if "error" in found]
    assert not errors, "\n".join(map(str, errors))
    return answers


@pytest.fixture(scope="module")
def faces(site: Path) -> dict[str, Answers]:
    """What each face answers; all are asked at once."""
    return ask(
        *(f"{face}:resolution,contract,verify,reuse,attention" for face in WORKING_FACES),
        "public_and_raw:resolution,error_of_the_op",
        "raises:error_of_the_op",
        *(f"{face}:resolution" for face in OTHER_REASONS),
        site=site,
    )


@pytest.fixture(params=WORKING_FACES)
def working(request: pytest.FixtureRequest, faces: dict[str, Answers]) -> tuple[str, Answers]:
    return request.param, faces[request.param]


class TestWorkingFaces:
    def test_the_contract_holds(self, working: tuple[str, Answers]) -> None:
        _, answers = working
        assert answers["contract"]["failures"] == []
        assert answers["contract"]["inputs"] > 40

    def test_only_gaps_of_odd_size_are_refused_and_the_argument_is_named(self, working: tuple[str, Answers]) -> None:
        _, answers = working
        refused = answers["contract"]["refused"]
        assert list(refused) == ["gaps_that_are_not_whole_records"]
        assert "kv_cache is of stride(0) 10596" in refused["gaps_that_are_not_whole_records"]

    def test_verify_passes_and_lists_what_is_refused(self, working: tuple[str, Answers]) -> None:
        _, answers = working
        assert answers["verify"] == {"exit_code": 0, "broken": [], "refused": ["gaps_that_are_not_whole_records"]}

    def test_features_follow_the_signature(self, working: tuple[str, Answers]) -> None:
        face, answers = working
        expected = {"request_dedup": True, "mapping_reuse": face != "six_arguments", "graph_safe": True}
        assert answers["resolution"]["features"] == expected

    def test_a_mapping_serves_a_second_layer(self, working: tuple[str, Answers]) -> None:
        face, answers = working
        assert answers["reuse"]["wrong"] == []
        assert (answers["reuse"]["calls_that_reused"] > 0) == (face != "six_arguments")

    def test_no_nan_gets_out_of_attention(self, working: tuple[str, Answers]) -> None:
        face, answers = working
        found = answers["attention"]
        assert found["out_is_finite"]
        assert found["equal"]
        if face == "dedup":
            # The test is worth something only if slots were shared and all other rows were poisoned.
            assert found["rows_pointed_to"] < found["filled"]
            assert found["rows_with_nan"] == 12 * 64 - found["rows_pointed_to"]

    def test_no_more_of_lightop_is_imported_than_the_op_needs(self, working: tuple[str, Answers]) -> None:
        face, answers = working
        public = ["lightop", "lightop._ops", "lightop.attention"]
        expected = public if face == "public_category" else [*public, "lightop.op"]
        assert answers["resolution"]["modules"] == expected
        assert answers["resolution"]["resolved_once"]


def test_a_public_category_goes_before_the_raw_namespace(faces: dict[str, Answers]) -> None:
    answers = faces["public_and_raw"]
    assert answers["resolution"]["found_in"] == "lightop.attention"
    assert answers["error_of_the_op"]["type"] is None


def test_a_type_error_of_the_op_reaches_the_caller(faces: dict[str, Answers]) -> None:
    assert faces["raises"]["error_of_the_op"] == {"type": "TypeError", "message": "an error of the op itself"}


# What the reason says is wrong, then what it says to do.
REASONS = {
    None: ("LightOp is not installed", "Install Hygon's LightOp"),
    "os_error": (
        "does not load: importing 'lightop' raised OSError: libgalaxyhip.so.5: cannot open",
        "Make the libraries it was built against visible",
    ),
    "without_op": (f"has no {OP}: no public module lists it", "Upgrade LightOp to a release that has it"),
    "unknown_signature": ("missing a required argument: 'block_table'", "Install a LightOp release that takes these"),
}
OTHER_REASONS = {
    "import_error": ("raised ImportError: undefined symbol", "Make the libraries it was built against visible"),
    "missing_dependency": ("No module named 'a_module_that_nobody_has'", "Make the libraries"),
    "category_error": ("importing 'lightop.attention' raised OSError", "Make the libraries"),
    "moved_argument": ("dedup_table is parameter 6", "Install a LightOp release that takes these"),
}


@pytest.mark.parametrize("face", REASONS)
def test_doctor_shows_the_reason_and_the_remedy(face: str | None, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GATE, "1")
    monkeypatch.setenv(f"{GATE}_BACKEND", "lightop")
    done = run("-m", "hyv4_kvdequant", "doctor", "--device", "cpu", face=face, site=site)
    assert done.returncode == 1
    for sentence in (*REASONS[face], "cpu is not one (platform 'cpu')", "No other backend was tried"):
        assert sentence in done.stderr
    for other in set(REASONS) - {face}:
        assert REASONS[other][0] not in done.stderr
    assert face is None or "LightOp 0.0.0+standin" in done.stderr


@pytest.mark.parametrize("face", OTHER_REASONS)
def test_other_ways_to_be_unusable(face: str, faces: dict[str, Answers]) -> None:
    found = faces[face]["resolution"]
    (reason,) = found["reasons"]
    assert all(sentence in reason for sentence in OTHER_REASONS[face])
    assert "LightOp 0.0.0+standin" in reason
    assert found["resolved_once"]


@pytest.mark.parametrize("face", [None, "os_error"])
def test_importing_the_backend_imports_nothing_of_lightop(face: str | None, site: Path) -> None:
    code = "import sys, hyv4_kvdequant_lightop; print([m for m in sys.modules if m.split('.')[0] == 'lightop'])"
    assert run("-c", code, face=face, site=site).stdout.strip() == "[]"


def test_without_lightop_an_instance_cannot_be_made() -> None:
    with pytest.raises(BackendUnavailableError, match="LightOp is not installed"):
        lightop_backend.LightOpBackend(HCU)


def test_another_record_is_a_reason() -> None:
    layout = replace(FP8_DS_MLA, name="other", row_bytes=672)
    reasons = lightop_backend.LightOpBackend.unavailable_reasons(replace(HCU, layout=layout))
    assert any("'other' of 672" in reason for reason in reasons)


class TestValidLengths:
    CPU = torch.device("cpu")

    @pytest.fixture(autouse=True)
    def _no_constants(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lightop_backend, "_lengths", {})

    def test_a_constant_is_made_once_and_sliced(self) -> None:
        first, second = (lightop_backend._valid_lengths(self.CPU, tokens, 128) for tokens in (3, 5))
        assert first.data_ptr() == second.data_ptr()
        assert second.tolist() == [128] * 5
        assert second.dtype == torch.int32

    def test_widths_have_constants_of_their_own(self) -> None:
        lightop_backend._valid_lengths(self.CPU, 3, 128)
        assert lightop_backend._valid_lengths(self.CPU, 3, 64).tolist() == [64] * 3

    def test_more_tokens_than_the_constant_has(self) -> None:
        tokens = lightop_backend.LENGTHS_AHEAD + 1
        assert lightop_backend._valid_lengths(self.CPU, tokens, 64).tolist() == [64] * tokens

    def test_nothing_made_while_capturing_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lightop_backend, "_is_capturing", lambda device: True)
        assert lightop_backend._valid_lengths(self.CPU, 3, 64).tolist() == [64] * 3
        assert lightop_backend._lengths == {}


@pytest.mark.gpu
@pytest.mark.parametrize("face", ["newer", "dedup"])
def test_graphs_and_streams(face: str, site: Path) -> None:
    found = ask(f"{face}:graphs", site=site)[face]["graphs"]
    assert found["wrong"] == []
    assert found["pairs"] > 40
    assert found["streams"] == []
