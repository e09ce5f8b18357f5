"""`new-backend`: a project that passes as it is, and nothing that exists is ever overwritten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from fresh_environment import FreshEnvironment, fresh  # noqa: F401 - a fixture
from typer.testing import CliRunner

from hyv4_kvdequant import ConfigurationError
from hyv4_kvdequant.cli.new_backend import new_backend
from hyv4_kvdequant.defaults import NAME_RULE
from hyv4_kvdequant.scaffold import create_backend_project


def command(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(new_backend)
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return done.exit_code, done.stdout


def test_it_says_what_it_wrote_and_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, printed = command("my-chip")
    project = tmp_path / "hyv4-kvdequant-my-chip"
    assert status == 0
    for path in project.rglob("*"):
        assert path.is_dir() or str(path.relative_to(tmp_path)) in printed
    assert "hyv4-kvdequant verify my-chip" in printed
    assert (project / "src" / "hyv4_kvdequant_my_chip" / "py.typed").exists()
    assert 'my-chip = "hyv4_kvdequant_my_chip:MyChipBackend"' in (project / "pyproject.toml").read_text()


@pytest.mark.parametrize("what", ["folder", "empty folder", "file", "dangling link"])
def test_what_exists_is_refused_and_left_alone(what: str, tmp_path: Path) -> None:
    place = tmp_path / "here"
    if what == "file":
        place.write_text("mine")
    elif what == "dangling link":
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.mkdir()
        if what == "folder":
            (place / "pyproject.toml").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigurationError, match=r"exists; nothing was written\. What to do: name a folder"):
        create_backend_project("mychip", place)
    assert sorted(tmp_path.rglob("*")) == before
    assert what != "folder" or (place / "pyproject.toml").read_text() == "mine"


@pytest.mark.parametrize("name", ["", "My-Chip", "1chip", "-chip", "my chip", "chip/..", "../chip", "chip.x", "çip"])
def test_a_name_that_breaks_the_rule(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        create_backend_project(name, tmp_path / "new")
    assert repr(name) in str(caught.value)
    assert NAME_RULE in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'torch' is taken by hyv4-kvdequant"):
        create_backend_project("torch", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be made"):
        create_backend_project("mychip", tmp_path / "file" / "new")


@pytest.mark.parametrize("folder", [None, "new", "a/b/new"])
@pytest.mark.parametrize("length", [243, 300])
def test_a_name_too_long_for_the_file_system_leaves_nothing_behind(
    length: int, folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigurationError, match=r"File name too long[\s\S]*Nothing was left behind"):
        create_backend_project("x" * length, None if folder is None else Path(folder))
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


@pytest.mark.parametrize("name", ["x", "my_chip-2", "a--b_"])
def test_any_valid_name_makes_valid_python(name: str, tmp_path: Path) -> None:
    project = tmp_path / "new"
    for path in create_backend_project(name, project):
        assert "$" not in path.name
        if path.suffix == ".py":
            compile(path.read_text(), str(path), "exec")
    for check in (["check", "--select", "E,F,W,I,UP,B,RUF"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *check, "."], cwd=project, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


def test_the_project_passes_its_own_tests_as_generated(fresh: FreshEnvironment) -> None:  # noqa: F811
    project = fresh.work / "hyv4-kvdequant-my-chip"
    create_backend_project("my-chip", project)
    fresh.succeed("pip", "install", "-e", ".", cwd=project)
    try:
        tested = fresh.run("pytest", "-q", "-rA", "-p", "no:cacheprovider", cwd=project)
        verified = fresh.run("hyv4-kvdequant", "verify", "my-chip", "--device", "cpu")
    finally:
        fresh.succeed("pip", "uninstall", "--yes", "hyv4-kvdequant-my-chip")
    assert tested.returncode == 0, tested.stdout
    assert "PASSED tests/test_contract.py::TestOnCpu::test_filled_rows_are_exact" in tested.stdout
    assert verified.returncode == 0, verified.stdout
