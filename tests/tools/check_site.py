"""Looks through the built site for anything that a browser would load from another host: there must be nothing."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path

SITE = Path(__file__).parents[2] / "site"
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("object", "data")}
# The theme loads these from a foreign host once an element has the class.
FETCHING_CLASSES = {"mermaid"}
# ... and the numbers that stand beside a link to the repository, where one is set.
REPOSITORY = ("data-md-component", "source")


class _Assets(HTMLParser):
    """Collects what a page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if (tag, name) in LOADED and value and value.startswith(("http:", "https:", "//")):
                self.foreign.append(value)
            if (name == "class" and value and FETCHING_CLASSES & set(value.split())) or (name, value) == REPOSITORY:
                self.foreign.append(f"<{tag} {name}={value!r}>")


def foreign_assets(page: Path) -> list[str]:
    """What `page` makes a browser load from another host."""
    parser = _Assets()
    parser.feed(page.read_text())
    return parser.foreign


def main() -> None:
    pages = sorted(SITE.rglob("*.html"))
    if not pages:
        sys.exit(f"{SITE} holds no page; build the site first")
    foreign = [f"{page.relative_to(SITE)}: {asset}" for page in pages for asset in foreign_assets(page)]
    styles = [f"{style.relative_to(SITE)}: {style.name}" for style in SITE.rglob("*.css") if _imports(style)]
    if foreign or styles:
        sys.exit("\n".join([*foreign, *styles]))
    print(f"{len(pages)} pages, nothing loaded from another host")


def _imports(style: Path) -> bool:
    text = style.read_text()
    return any(f"url({quote}{start}" in text for quote in ("", '"', "'") for start in ("http:", "https:", "//"))


if __name__ == "__main__":
    main()
