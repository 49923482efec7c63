"""`samebits env`: what decides bits on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from samebits.cli.output import show_json

app = typer.Typer()


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print what decides bits on this machine.

    `intent` decides them; `happenstance` only happens to be so.
    """
    from samebits import env as environment

    record = environment.record()
    if as_json:
        show_json(record)
        return
    for part, values in record.items():
        typer.echo(part)
        width = max(map(len, values))
        for name, value in values.items():
            typer.echo(f"  {name:<{width}}  {value}")
