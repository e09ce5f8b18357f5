"""`docs/write-a-backend.md`, followed word for word in an environment that has only our wheel."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fresh_environment import ROOT, FreshEnvironment, fresh  # noqa: F401 - a fixture

TUTORIAL = ROOT / "docs" / "write-a-backend.md"
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its title, and its text."""

    language: str
    title: str
    text: str


def blocks() -> list[Block]:
    """The blocks at the page's margin; indented ones are asides."""
    return [Block(*(part or "" for part in found)) for found in _BLOCK.findall(TUTORIAL.read_text())]


class Reader:
    """Types what the page says into one shell, and compares what it shows."""

    def __init__(self, env: FreshEnvironment) -> None:
        self.env = env
        self.state = env.folder / "shell-state"
        self.state.write_text(f"cd {env.work}\n")
        self.shown = ""
        self.transcript: list[str] = []

    def type(self, block: Block) -> None:
        expected = int(block.title.removeprefix("exit status ")) if block.title else 0
        script = f". {self.state}\n{block.text}\nstatus=$?\n(echo cd $PWD; export -p) > {self.state}\nexit $status\n"
        environ = {**self.env.environ(), "COLUMNS": "160"}
        done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=False)
        self.shown = done.stdout + done.stderr
        self.transcript += [f"$ {line}" for line in block.text.splitlines()] + [self.shown]
        assert done.returncode == expected, "\n".join(self.transcript)

    def write(self, block: Block) -> None:
        path, _, method = block.title.partition(": ")
        file = self.folder() / path
        text = file.read_text()
        file.write_text(f"{text[: text.index(f'    def {method}(')]}{block.text}" if method else block.text)

    def folder(self) -> Path:
        return Path(re.search(r"^cd (.*)$", self.state.read_text(), re.MULTILINE).group(1))  # type: ignore[union-attr]

    def compare(self, block: Block) -> None:
        shown = _words(self.shown)
        for line in block.text.splitlines():
            assert _words(line) in shown, f"the page shows {line!r}; the run showed\n{self.shown}"


def _words(text: str) -> str:
    return " ".join(text.split())


def test_the_tutorial_word_for_word(fresh: FreshEnvironment) -> None:  # noqa: F811
    reader = Reader(fresh)
    done = []
    for block in blocks():
        done.append(block.language)
        if block.language == "bash":
            reader.type(block)
        elif block.language == "python":
            reader.write(block)
        elif block.language == "text":
            reader.compare(block)
        else:
            assert block.language == "toml"
            assert _words(block.text) in _words((reader.folder() / "pyproject.toml").read_text())
    assert done.count("bash") >= 7
    assert done.count("python") == 2
    print("\n".join(reader.transcript))


def test_the_asides_are_code_that_runs(tmp_path: Path) -> None:
    """Indented blocks name a backend of the reader's; here they run with `torch` in its place."""
    asides = re.findall(r"^    ```python\n(.*?)^    ```$", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    assert len(asides) == 2
    for aside in asides:
        text = re.sub("^    ", "", aside, flags=re.MULTILINE)
        text = text.replace("hyv4_kvdequant_demo import DemoBackend", "hyv4_kvdequant_torch import TorchBackend")
        exec(compile(text.replace("DemoBackend(", "TorchBackend("), "aside", "exec"), {"__name__": "aside"})
