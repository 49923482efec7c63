"""`samebits doctor`: check this machine before a job."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(rich_markup_mode=None)


@app.command()
def doctor(
    settings: Annotated[
        list[Path] | None,
        typer.Option(help="JSON or YAML with sampling or engine settings; repeatable."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List what is fine, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every finding as JSON.")] = False,
) -> None:
    """Check this machine in seconds, before a job: versions, chips, compilers, variables, room.

    Each finding comes with one command that fixes it. Exit codes: 0 no problem (there may be
    warnings), 2 a problem or bad input, 4 internal error.
    """
    from samebits import doctor as checks

    findings = checks.examine()
    for path in settings or []:
        findings += checks.check_settings(checks.read_settings(path))
    code = checks.exit_code(findings)
    if as_json:
        typer.echo(json.dumps([asdict(f) for f in findings], indent=2))
        raise typer.Exit(code)
    counts = {
        severity: sum(f.severity == severity for f in findings)
        for severity in ("problem", "warning", "note", "ok")
    }
    for severity in counts:
        for f in findings:
            if f.severity != severity or (severity == "ok" and not every):
                continue
            typer.echo(f"{severity:<8} {f.check}: {f.seen}")
            if f.required:
                typer.echo(f"{'':<8} required: {f.required}")
            if f.fix:
                typer.echo(f"{'':<8} fix: {f.fix}")
    typer.echo(", ".join(f"{number} {severity}" for severity, number in counts.items()))
    raise typer.Exit(code)
