"""The commands, put together."""

from __future__ import annotations

import typer

from hyv4_kvdequant.cli import ab, bench, doctor, list_backends, new_backend, run, verify

app = typer.Typer(
    name="hyv4-kvdequant",
    help="Backends that dequantize HY V4's fp8 KV cache to BF16 for sparse attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("list")(list_backends.list_command)
app.command("doctor")(doctor.doctor)
app.command("verify")(verify.verify)
app.command("run")(run.run)
app.add_typer(ab.app, name="ab")
app.add_typer(bench.app, name="bench")
app.command("new-backend")(new_backend.new_backend)
