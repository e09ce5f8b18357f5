"""How the commands come by backends: looked at in a child process before this one imports them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from hyv4_kvdequant.cli.console import claim_standard_output

if TYPE_CHECKING:
    from hyv4_kvdequant.probe import Prober


def complete_backend(incomplete: str) -> list[str]:
    """Registered names, for the shell; imports no backend and no PyTorch."""
    from hyv4_kvdequant.registry import backend_names

    return [name for name in backend_names() if name.startswith(incomplete)]


BackendsOption = Annotated[
    list[str] | None,
    typer.Option("--backend", help="Backend by name; repeat for several.", autocompletion=complete_backend),
]


@contextmanager
def looking_at(names: Sequence[str] | None, timeout_s: float) -> Iterator[Prober]:
    """A prober for these backends (None: any), and standard output kept clean of what they print from here on."""
    from hyv4_kvdequant.probe import Prober

    claim_standard_output()
    with Prober(names, timeout_s, "allow it more time with --timeout") as prober:
        yield prober
