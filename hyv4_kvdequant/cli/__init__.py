"""The command line `hyv4-kvdequant`.

Exit status: 0 when all is well; 1 when something was checked and is not right (a broken clause, a mismatch, a
start-up that would fail); 2 when the command could not be carried out (bad arguments, an unusable file or backend); 3
when `ab report` has nothing that proves agreement and nothing that disproves it.
"""

from __future__ import annotations

import sys

from hyv4_kvdequant.contract import KVDequantError


def main() -> None:
    """Runs the command line; errors of this package become a message and exit status 2."""
    from hyv4_kvdequant.cli.app import app

    try:
        app()
    except KVDequantError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
