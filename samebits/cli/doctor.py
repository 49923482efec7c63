"""`samebits doctor`: check this machine before a job."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.output import show_json

app = typer.Typer()


@app.command()
def doctor(
    settings: Annotated[
        list[Path] | None,
        typer.Option(help="JSON or YAML with sampling or engine settings; repeatable."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List what is fine, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every finding as JSON.")] = False,
) -> None:
    """Check this machine before a job.

    It takes seconds: versions, patched trees, chips, compilers, environment variables, room.

    Each finding comes with one command that fixes it, or that shows the line of a settings file to
    change. Settings that no check knows are listed. Warnings alone give exit code 0, a problem
    gives 2. With --settings, the machine is also checked for engines that your own job starts.
    """
    from samebits import doctor as checks

    findings = checks.examine(own_job=bool(settings))
    for path in settings or []:
        findings += checks.check_settings(checks.read_settings(path), path)
        findings += checks.check_names(path)
    code = checks.exit_code(findings)
    if as_json:
        show_json([asdict(f) for f in findings])
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
