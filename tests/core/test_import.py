"""What importing the package costs, in a fresh interpreter."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer.main

import hyv4_kvdequant
import hyv4_kvdequant.contract
from hyv4_kvdequant.cli.app import app


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


HEAVY = (
    "torch",
    "numpy",
    "triton",
    "vllm",
    "lightop",
    "stevedore",
    "pydantic",
    "typer",
    "rich",
    "hyv4_kvdequant_torch",
)
COMMANDS = (
    *("list", "doctor", "verify", "run", "ab", "ab report", "ab replay"),
    *("bench", "bench prefill", "new-backend", "version"),
)
# Runs the command line, and says at its end which modules it imported.
CLI = (
    "import atexit, sys; atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr)); "
    "sys.argv = ['hyv4-kvdequant', *sys.argv[1:]]; from hyv4_kvdequant.cli import main; main()"
)


def cli(*arguments: str, **env: str) -> tuple[str, set[str]]:
    """What the command line printed, and the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", CLI, *arguments], capture_output=True, text=True, check=True, env={**os.environ, **env}
    )
    return done.stdout, set(done.stderr.split())


@pytest.mark.parametrize("module", ["hyv4_kvdequant", "hyv4_kvdequant.contract", "hyv4_kvdequant.contract.errors"])
def test_import_loads_nothing_heavy(module: str) -> None:
    modules = _run(f"import sys; before = set(sys.modules); import {module}; print(*(set(sys.modules) - before))")
    assert not {name.partition(".")[0] for name in modules.split()} & set(HEAVY)


def test_a_name_is_imported_when_it_is_used() -> None:
    code = (
        "import sys, hyv4_kvdequant as h; h.ConfigurationError; assert 'torch' not in sys.modules; "
        "h.Target; assert 'torch' in sys.modules; assert 'Target' in vars(h)"
    )
    _run(code)


def test_a_name_that_does_not_exist() -> None:
    for module in (hyv4_kvdequant, hyv4_kvdequant.contract):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'Targett'"):
            module.Targett  # noqa: B018


@pytest.mark.parametrize("module", [hyv4_kvdequant, hyv4_kvdequant.contract], ids=lambda module: module.__name__)
def test_dir_and_star_have_every_public_name(module: ModuleType) -> None:
    assert dir(module) == sorted(module.__all__)
    found: dict[str, object] = {}
    exec(f"from {module.__name__} import *", found)
    assert set(module.__all__) <= set(found)


@pytest.mark.parametrize("module", [hyv4_kvdequant, hyv4_kvdequant.contract], ids=lambda module: module.__name__)
def test_type_checkers_see_every_public_name(module: ModuleType) -> None:
    """They read the source: what stands under TYPE_CHECKING or is assigned."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(module.__all__) - {"__version__"} <= imported


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_no_torch_and_ends_with_examples_and_exit_statuses(command: str) -> None:
    printed, modules = cli(*command.split(), "--help", COLUMNS="80")
    # A recent Typer imports pydantic by itself.
    assert not {"torch", "numpy", "pydantic_settings", "hyv4_kvdequant_torch"} & modules
    examples, _, statuses = printed.partition("Examples:")[2].partition("Exit status:")
    assert 2 <= examples.count(f"hyv4-kvdequant {command}".rstrip()) <= 3
    assert " 0" in statuses
    assert max(map(len, printed.splitlines())) <= 80


def test_every_command_is_held_to_that() -> None:
    def paths(command: object, path: str = "") -> Iterator[str]:
        for name, child in getattr(command, "commands", {}).items():
            yield f"{path} {name}".strip()
            yield from paths(child, f"{path} {name}")

    assert sorted(paths(typer.main.get_command(app))) == sorted(COMMANDS)


def test_version_imports_no_torch() -> None:
    printed, modules = cli("--version")
    assert printed == f"hyv4-kvdequant {hyv4_kvdequant.__version__}\n"
    assert "torch" not in modules


@pytest.mark.parametrize(
    "typed", ["verify t", "run step.safetensors --backend t", "bench prefill --backend t", "ab replay x --a t"]
)
def test_completion_knows_backend_names_and_imports_none(typed: str) -> None:
    words = f"hyv4-kvdequant {typed}"
    printed, modules = cli(
        _HYV4_KVDEQUANT_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1)
    )
    assert printed.split() == ["torch", "triton"]
    assert not {"torch", "hyv4_kvdequant_torch", "hyv4_kvdequant_triton"} & modules


def test_completion_knows_the_commands() -> None:
    printed, modules = cli(_HYV4_KVDEQUANT_COMPLETE="complete_bash", COMP_WORDS="hyv4-kvdequant ve", COMP_CWORD="1")
    assert printed.split() == ["verify", "version"]
    assert "torch" not in modules


def test_import_touches_no_device() -> None:
    assert _run("import hyv4_kvdequant, torch; print(torch.cuda.is_initialized())").strip() == "False"


def test_every_public_name_exists() -> None:
    code = "import hyv4_kvdequant as h; print(all(getattr(h, name) is not None for name in h.__all__))"
    assert _run(code).strip() == "True"
