"""Backends that misbehave, really installed: each is told by name, in every command, and harms nobody.

`docs/write-a-backend.md` has what is asserted here as a table.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from fresh_environment import ROOT, FreshEnvironment, fresh  # noqa: F401 - a fixture

GATE = "VLLM_HCU_HYV4_FP8_KV_DEQUANT"
GOLDEN_STEP = str(ROOT / "tests" / "data" / "hyv4_step.safetensors")
PAGE = ROOT / "docs" / "write-a-backend.md"


@dataclass(frozen=True)
class Hostile:
    """What a message about the backend has to say, and the distribution that it has to name."""

    says: str
    distribution: str = "hostile 0.3"


HOSTILE = {
    "broken": Hostile("a_vendor_library_that_is_not_installed", "broken-import 0.1"),
    "crashes": Hostile("importing it ended its process by signal 9"),
    "exiting": Hostile("no licence found", "exiting-import 0.1"),
    "hanging": Hostile("importing it did not finish within", "hanging-import 0.1"),
    "init-none": Hostile("constructing it gave None"),
    "init-raises": Hostile("__init__ raised OSError: the device is busy"),
    "init-string": Hostile("__init__ raised TypeError: __init__() should return None"),
    "interrupts": Hostile("it raised KeyboardInterrupt"),
    "leaves": Hostile("importing it ended its process with exit status 0"),
    "raises-base": Hostile("Stop: no such device [/]"),
    "reasons-none": Hostile("unavailable_reasons returned None; expected a list of sentences"),
    "reasons-raise": Hostile("unavailable_reasons raised ZeroDivisionError: no cores"),
    "reasons-string": Hostile("unavailable_reasons returned 'only on Tuesdays'; expected a list of sentences"),
}
COMMANDS = {
    "doctor": ("hyv4-kvdequant", "doctor", "--json", "--timeout", "5", "--device", "cpu"),
    "verify": ("hyv4-kvdequant", "verify", "{name}", "--json", "--timeout", "5", "--device", "cpu"),
    "run": ("hyv4-kvdequant", "run", GOLDEN_STEP, "--backend", "{name}", "--json", "--timeout", "5", "--device", "cpu"),
    "ab replay": (
        *("hyv4-kvdequant", "ab", "replay", GOLDEN_STEP, "--a", "torch", "--b", "{name}"),
        *("--runs", "0", "--json", "--timeout", "5", "--device", "cpu"),
    ),
    "start-up": (
        "python",
        "-c",
        # What vLLM does: the plugin's entry point, and a layer that asks for the backend. Only the limit is shorter.
        "import hyv4_kvdequant.defaults as defaults\n"
        "defaults.START_UP_TIMEOUT_S = 5.0\n"
        "from hyv4_kvdequant.hosts.plugin import register\n"
        "register()\n"
        "from hyv4_kvdequant import Target, select_backend\n"
        "select_backend(Target.detect('cpu'))\n"
        "print('started')",
    ),
}


@pytest.fixture(scope="module")
def env(fresh: FreshEnvironment) -> Iterator[FreshEnvironment]:  # noqa: F811
    with fresh.installed("hostile", "broken_import", "exiting_import", "hanging_import"):
        yield fresh


def ask(env: FreshEnvironment, command: str, name: str) -> subprocess.CompletedProcess[str]:
    arguments = [argument.replace("{name}", name) for argument in COMMANDS[command]]
    chosen = {GATE: "1", f"{GATE}_BACKEND": name} if command in ("doctor", "start-up") else {}
    return env.run(*arguments, **chosen)


@pytest.fixture(scope="module")
def answers(env: FreshEnvironment) -> dict[tuple[str, str], subprocess.CompletedProcess[str]]:
    """Every command with every hostile backend; two at a time, since some do nothing but wait."""
    pairs = [(command, name) for command in COMMANDS for name in HOSTILE]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(pairs, pool.map(lambda pair: ask(env, *pair), pairs), strict=True))


@pytest.fixture(scope="module")
def listed(env: FreshEnvironment) -> dict[str, dict[str, Any]]:
    shown = json.loads(env.succeed("hyv4-kvdequant", "list", "--json", "--device", "cpu", "--timeout", "5"))
    return {row["name"]: row for row in shown["backends"]}


@pytest.mark.parametrize("name", HOSTILE)
def test_list_tells_it_by_name_and_distribution(name: str, listed: dict[str, dict[str, Any]]) -> None:
    problem = listed[name]["problem"]
    assert not listed[name]["available"]
    for part in (HOSTILE[name].says, f"{name} ({HOSTILE[name].distribution})", "What to do: "):
        assert part in problem


def test_list_shows_the_others_unharmed(listed: dict[str, dict[str, Any]]) -> None:
    assert {name for name, row in listed.items() if row["available"]} == {"torch", "noisy"}
    assert {name for name, row in listed.items() if row["problem"]} == set(HOSTILE)


def test_list_prints_foreign_text_as_it_is(env: FreshEnvironment) -> None:
    printed = env.succeed("hyv4-kvdequant", "list", "--device", "cpu", "--timeout", "5")
    assert "raised Stop: no such device [/]" in printed


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_ends_with_an_error_that_names_it(
    command: str, name: str, answers: dict[tuple[str, str], subprocess.CompletedProcess[str]]
) -> None:
    done = answers[command, name]
    assert done.returncode == {"doctor": 1, "start-up": 1}.get(command, 2), done.stderr
    said = done.stderr
    if command == "doctor":
        (said,) = json.loads(done.stdout)["problems"]
    else:
        assert done.stdout == ""
        assert ("BackendLoadError: " in said) == (command == "start-up")
    for part in (HOSTILE[name].says, f"{name} ({HOSTILE[name].distribution})", "asked for by ", "What to do: "):
        assert part in said


def test_one_that_prints_keeps_out_of_every_json(env: FreshEnvironment) -> None:
    for command in ("doctor", "verify", "run", "ab replay"):
        done = ask(env, command, "noisy")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)
        assert "noisy: made, from C" in done.stderr
    assert ask(env, "start-up", "noisy").stdout.endswith("started\n")


def test_a_start_up_loads_the_chosen_one_alone(env: FreshEnvironment) -> None:
    done = ask(env, "start-up", "torch")
    assert done.stdout == "started\n"
    assert done.stderr == ""


def test_the_page_has_the_table() -> None:
    """A row for each backend, by what its message says, and what it does to each command."""
    section = PAGE.read_text().split("## What a misbehaving backend does", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in re.findall(r"^\|.*\|$", section, re.M)]
    outcomes = ["broken", "exit status 1", "exit status 2", "`BackendLoadError`"]
    told = [row[-1].strip("` ") for row in rows if row[1:-1] == outcomes]
    for name, hostile in HOSTILE.items():
        assert sum(said in hostile.says for said in told) == 1, name
    assert len(told) == len(HOSTILE)
