"""Nearest-name suggestions for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """` Did you mean 'x'?` for the known name nearest to `given`, or an empty string when none is near."""
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""
