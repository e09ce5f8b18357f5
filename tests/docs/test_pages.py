"""The pages are true to the code and to each other: settings, links, anchors, and code blocks that run."""

from __future__ import annotations

import re
import runpy
import textwrap
import unicodedata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
RUN_ELSEWHERE = {DOCS / "write-a-backend.md"}  # test_tutorial.py follows it word for word

_FENCE = re.compile(r"^([ ]*)```(\w*)[^\n]*\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_NAMED = re.compile(r"docs/([\w/.-]+\.md)(?:#([\w-]+))?")


def prose(page: Path) -> str:
    """The page's text without code."""
    return re.sub(r"`[^`\n]+`", "", _FENCE.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, made as Python-Markdown makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {_slug(re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)) for heading in headings}


def _slug(heading: str) -> str:
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def assert_exists(target: Path, anchor: str, where: str) -> None:
    assert target.exists(), f"{where} names {target.relative_to(ROOT)}, which does not exist"
    if anchor and target.suffix == ".md":
        assert anchor in anchors(target), f"{where} names #{anchor}, which {target.name} does not have"


def test_the_settings_page_is_what_the_code_says() -> None:
    writer = runpy.run_path(str(ROOT / "tests" / "tools" / "settings_page.py"))
    assert writer["PAGE"].read_text() == writer["page"](), "run python tests/tools/settings_page.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_resolves(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        assert_exists((page.parent / path).resolve() if path else page, anchor, f"{page.name}: {link}")


def test_every_page_that_the_package_names_exists() -> None:
    named = 0
    for package in ("hyv4_kvdequant", "backends"):
        for source in sorted((ROOT / package).rglob("*")):
            if source.suffix in (".py", ".tmpl"):
                for path, anchor in _NAMED.findall(source.read_text()):
                    assert_exists(DOCS / path, anchor, str(source.relative_to(ROOT)))
                    named += 1
    assert named


def test_every_page_is_in_the_navigation_and_the_other_way_round() -> None:
    in_navigation = set(re.findall(r"^ +- .*?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert in_navigation == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def python_blocks() -> list[tuple[str, Path, str]]:
    found = []
    for page in PAGES:
        for indent, language, text in _FENCE.findall(page.read_text()):
            if language in ("python", "py"):
                found.append((f"{page.name}:{len(found)}", page, textwrap.dedent(text) if indent else text))
    return found


@pytest.mark.parametrize(
    ("page", "text"), [block[1:] for block in python_blocks()], ids=[b[0] for b in python_blocks()]
)
def test_python_blocks_compile_and_run(page: Path, text: str) -> None:
    code = compile(textwrap.dedent(text), page.name, "exec")
    if page not in RUN_ELSEWHERE:
        exec(code, {"__name__": "block"})
