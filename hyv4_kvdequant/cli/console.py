"""What the commands share: consoles, JSON output, options, the end of a help text, and the default device.

Names, reasons, layers and paths come from plugins and files. The consoles print every string as it is: no markup, no
emoji codes, no highlighting, and control characters as escapes. Colour is asked for with `rich.text.Text`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hyv4_kvdequant.defaults import IMPORT_TIMEOUT_S

if TYPE_CHECKING:
    import torch

# C0 and C1 controls but tab and newline, line and paragraph separators, what turns the direction of text, surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with what would move a terminal's cursor, or cannot be encoded, shown as escapes."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


class LiteralConsole(Console):
    """A console that prints strings as they are."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string that is printed, cells and titles of tables too, comes through here."""
        return super().render_str(printable(text), **options)


out = LiteralConsole()
err = LiteralConsole(stderr=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on standard output.")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="PyTorch device. Default: cuda where PyTorch sees one, else cpu.")
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, max=86400, help="Seconds that importing one backend may take.")
]
DEFAULT_TIMEOUT = IMPORT_TIMEOUT_S

NOT_RIGHT = 1


def help_end(*examples: str, status: str) -> str:
    """The end of a command's help.

    Args:
        examples: commands, without the program's name.
        status: what its exit statuses mean.
    """
    # A blank line is what keeps a line of its own in either way that help is formatted.
    return "\n\n".join(["Examples:", *(f"hyv4-kvdequant {example}" for example in examples), f"Exit status: {status}"])


def claim_standard_output() -> None:
    """Leaves standard output to `out` and `print_json`; what plugins write to it, in C too, goes to standard error."""
    if not _is_process_output(sys.stdout):
        return
    sys.stdout.flush()
    ours = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)
    out.file = ours
    sys.stdout = sys.stderr


def _is_process_output(stream: Any) -> bool:
    try:
        return bool(stream.fileno() == 1)
    except (OSError, ValueError, AttributeError):
        return False  # captured, or closed


def print_json(value: Any) -> None:
    """Writes `value` as indented JSON to standard output."""
    print(json.dumps(value, indent=2, default=str), file=out.file, flush=True)


def print_block(heading: Text, lines: list[str]) -> None:
    """A heading, and texts below it, indented; a text wraps between words and never inside one."""
    out.print(heading)
    for line in "\n".join(lines).splitlines():
        indent = "    " if line.startswith("- ") else "  "
        wrapped = textwrap.fill(
            line,
            out.width,
            initial_indent="  ",
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        out.print(wrapped, soft_wrap=True)


def default_device(device: str | None) -> torch.device:
    """The device a command works on.

    Raises:
        ConfigurationError: PyTorch has no such device.
    """
    import torch

    from hyv4_kvdequant.contract import ConfigurationError

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"--device {device}: PyTorch cannot use it here ({error}). Try cpu.") from error
    return chosen


def device_name(device: torch.device) -> str:
    """What a benchmark's numbers belong to."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def describe_run(device: torch.device, measured: str) -> dict[str, Any]:
    """What a benchmark's JSON says beside its numbers."""
    from hyv4_kvdequant.versions import installed_versions

    return {
        "device": str(device),
        "device_name": device_name(device),
        "versions": installed_versions(),
        "measured": measured,
    }
