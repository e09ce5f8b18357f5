"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from hyv4_kvdequant.cli import ab, bench, doctor, list_backends, new_backend, run, verify, version
from hyv4_kvdequant.cli.console import help_end

app = typer.Typer(
    name="hyv4-kvdequant",
    help="Backends that dequantize HY V4's fp8 KV cache to BF16 for sparse attention.",
    epilog=help_end(
        "list",
        "doctor",
        "verify torch",
        status="0 all is well; 1 something was checked and is not right; 2 the command could not be carried out; "
        "3 (ab report) what was compared decides nothing.",
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def program(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=version.show, help="Show the version and exit.")
    ] = False,
) -> None:
    """Backends that dequantize HY V4's fp8 KV cache to BF16 for sparse attention."""


app.command("list", epilog=list_backends.HELP_END)(list_backends.list_command)
app.command("doctor", epilog=doctor.HELP_END)(doctor.doctor)
app.command("verify", epilog=verify.HELP_END)(verify.verify)
app.command("run", epilog=run.HELP_END)(run.run)
app.add_typer(ab.app, name="ab")
app.add_typer(bench.app, name="bench")
app.command("new-backend", epilog=new_backend.HELP_END)(new_backend.new_backend)
app.command("version", epilog=version.HELP_END)(version.version)
