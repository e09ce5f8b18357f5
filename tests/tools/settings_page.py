"""Writes docs/settings.md from the code, so that the page and the settings cannot differ."""

from __future__ import annotations

import sys
from pathlib import Path

from hyv4_kvdequant.selector import PLATFORM_DEFAULTS
from hyv4_kvdequant.settings import ADDITIONAL_CONFIG_KEY, GATE, Settings, accepted, variable_name

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def page() -> str:
    """The page's text."""
    lines = [
        "# Settings",
        "",
        "Generated from the code by `python tests/tools/settings_page.py`; a test fails when it is out of date.",
        "",
        "| variable | meaning | accepts | default |",
        "| --- | --- | --- | --- |",
    ]
    for field, info in Settings.model_fields.items():
        lines.append(
            f"| `{variable_name(field)}` | {info.description} | {accepted(field)} | {_default(info.default)} |"
        )
    keys = ", ".join(f"`{field}`" for field in Settings.model_fields if field != "enabled")
    platforms = ", ".join(f"{platform}: `{name}`" for platform, name in PLATFORM_DEFAULTS.items())
    lines += [
        "",
        "Names are exact, letter for letter and in capitals. Errors, each with the variable's name:",
        "",
        "- a value that is not in the column *accepts*: nothing is trimmed or rounded, and set but empty is no value;",
        "- a variable under the prefix that is not in this table, or one of these names in other letter case;",
        f"- a name that can only be meant for the gate, such as `{GATE[:-1]}` or `{GATE.replace('_HCU', '')}`, whether",
        "  the gate is set or not: a misspelt gate would look like one that is off.",
        "",
        "## In `--additional-config`",
        "",
        f"The keys {keys} may also stand under `{ADDITIONAL_CONFIG_KEY}` in vLLM's `--additional-config`; the",
        "environment wins. The gate is read from the environment alone. Values are those of the table, as JSON",
        "strings, or as JSON's own `true`, `false` and whole numbers where the table has them; `null` is a name or",
        "folder that is not set. Errors, each with the key's name:",
        "",
        f"- a key under `{ADDITIONAL_CONFIG_KEY}` that is not in this list, or something else than an object there;",
        f"- beside `{ADDITIONAL_CONFIG_KEY}`, a key that is nearly its name (`hyv4-kvdequant`, `hyv4_kvdequnt`),",
        "  or one of the keys above, which nobody would read there.",
        "",
        "```json",
        f'{{"{ADDITIONAL_CONFIG_KEY}": {{"workspace_mb": 512, "report_dir": "~/reports"}}}}',
        "```",
        "",
        f"The platform's default backend is decided by the platform alone ({platforms}).",
        "",
    ]
    return "\n".join(lines)


def _default(value: object) -> str:
    """A default as an operator would write it."""
    if value is None:
        return "none"
    return f"`{str(value).lower()}`"


if __name__ == "__main__":
    if "--check" in sys.argv and PAGE.read_text() != page():
        sys.exit(f"{PAGE} is out of date: run python tests/tools/settings_page.py")
    PAGE.write_text(page())
