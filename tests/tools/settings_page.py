"""Writes docs/settings.md from the code, so that the page and the settings cannot differ."""

from __future__ import annotations

import sys
from pathlib import Path

from hyv4_kvdequant.selector import PLATFORM_DEFAULTS
from hyv4_kvdequant.settings import ADDITIONAL_CONFIG_KEY, Settings, variable_name

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def page() -> str:
    """The page's text."""
    lines = [
        "# Settings",
        "",
        "Generated from the code by `python tests/tools/settings_page.py`; a test fails when it is out of date.",
        "",
        "| variable | meaning | default |",
        "| --- | --- | --- |",
    ]
    for field, info in Settings.model_fields.items():
        default = "none" if info.default is None else f"`{info.default}`"
        lines.append(f"| `{variable_name(field)}` | {info.description} | {default} |")
    keys = ", ".join(f"`{field}`" for field in Settings.model_fields if field != "enabled")
    platforms = ", ".join(f"{platform}: `{name}`" for platform, name in PLATFORM_DEFAULTS.items())
    lines += [
        "",
        "Booleans accept 1, true, yes, on and 0, false, no, off. A variable that is set but empty is an error, as is a",
        "variable under the prefix that is not in this table.",
        "",
        f"The keys {keys} may also stand under `{ADDITIONAL_CONFIG_KEY}` in vLLM's `--additional-config`; the",
        "environment wins. The gate is read from the environment alone.",
        "",
        f"The platform's default backend is decided by the platform alone ({platforms}).",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--check" in sys.argv and PAGE.read_text() != page():
        sys.exit(f"{PAGE} is out of date: run python tests/tools/settings_page.py")
    PAGE.write_text(page())
