"""Every error this package raises on purpose has a line in `docs/troubleshooting.md`, and no line is about none."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from hyv4_kvdequant.contract import errors
from hyv4_kvdequant.hosts.vllm_mainline import IMPL_CLASS
from hyv4_kvdequant.settings import ADDITIONAL_CONFIG_KEY, GATE, variable_name

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type)}
# What a message is made of at run time, where it is the same each time.
KNOWN = {"GATE": GATE, "IMPL_CLASS": IMPL_CLASS, "ADDITIONAL_CONFIG_KEY": ADDITIONAL_CONFIG_KEY}
# Messages that a function puts together, by the function.
PUT_TOGETHER = {
    "_explain": [
        f"{source} has the value 'X', which cannot be read. Expected: X."
        for source in ("The environment variable X", f"{ADDITIONAL_CONFIG_KEY!r} in --additional-config")
    ],
    # The words of an error that was raised in another process, where this test finds it.
    "_as_told": [],
    "_unknown": [f"{GATE} is on, but X is not a revision this release of hyv4-kvdequant knows: X."],
    "_fail": [
        f"{argument} is X; expected X. X"
        for argument in ("kv_cache", "topk_indices", "compact_kv", "compact_indices", "tokens_per_request")
    ],
}


def entries() -> list[re.Pattern[str]]:
    """The first column of every table, as patterns; a cell may hold several."""
    found = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            for begins in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                found.append(re.compile(".+".join(map(re.escape, begins.split("...")))))
    return found


def messages() -> list[str]:
    """What is raised anywhere, with X for what differs."""
    found = [message for several in PUT_TOGETHER.values() for message in several]
    for package in ("hyv4_kvdequant", "backends"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
                    found += _message(node, path)
    return [message for message in found if message != "X is X; expected X. X"]  # of `_fail` itself


def _message(error: ast.Call, path: Path) -> list[str]:
    text = error.args[0]
    if isinstance(text, ast.Call) and isinstance(text.func, ast.Name) and text.func.id in PUT_TOGETHER:
        return []
    if isinstance(text, ast.BinOp):  # a message followed by a suggestion
        text = text.left
    assert isinstance(text, (ast.Constant, ast.JoinedStr)), f"{path}:{error.lineno}: a message this test cannot read"
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return ["".join(_part(part) for part in parts)]


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    value = part.value
    if isinstance(value, ast.Name) and value.id in KNOWN:
        return repr(KNOWN[value.id]) if part.conversion == ord("r") else KNOWN[value.id]
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "variable_name":
        (field,) = value.args
        return variable_name(field.value) if isinstance(field, ast.Constant) else "X"
    return "X"


def test_messages_are_found() -> None:
    assert len(messages()) > 60


@pytest.mark.parametrize("message", messages())
def test_every_message_has_a_line(message: str) -> None:
    assert any(entry.match(message) for entry in entries()), message


def test_no_line_is_about_a_message_that_is_gone() -> None:
    """Reasons, log lines and the like are not raised; there the longest fixed part has to stand in the source."""
    paths = [path for package in ("hyv4_kvdequant", "backends") for path in (ROOT / package).rglob("*.py")]
    source = "".join(path.read_text() for path in paths)
    raised = messages()
    for entry in entries():
        longest = max(re.sub(r"\\(.)", r"\1", entry.pattern).split(".+"), key=len).strip()
        assert any(entry.match(message) for message in raised) or longest in source, entry.pattern
