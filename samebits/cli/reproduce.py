"""`samebits reproduce CASE`: run a recorded case again, and say what came out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.output import show_json

app = typer.Typer()


@app.command()
def reproduce(
    case: Annotated[str, typer.Argument(help="Name of a case, see `samebits case list`.")],
    operator: Annotated[
        str, typer.Option(help="Who ran it: a name or a handle, up to 100 letters.")
    ] = "unnamed",
    output: Annotated[
        Path | None,
        typer.Option(help="File to write; default: a name of its own in cases/CASE/reproductions."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checked statement.")] = False,
) -> None:
    """Compute the recorded run of a case afresh and write a reproduction statement.

    Takes as long as `samebits prove CASE --record`. Recorded evidence is not touched, and no
    finished stage is reused. Exit codes: 0 REPRODUCED, 1 DIFFERENT, 2 refused, 3 NOT_OBSERVED, or
    there is no fresh evidence to reproduce.
    """
    from samebits import recipe as recipes
    from samebits.cli.evidence import reproduction_lines
    from samebits.errors import shown
    from samebits.evidence import reproduction
    from samebits.gates.prove import rerun
    from samebits.patching.workspace import Workspace

    recipe = recipes.load(case)
    name = operator.strip()
    if not name or len(name) > 100 or not name.isprintable():
        raise typer.BadParameter("one line of 1 to 100 letters", param_hint="--operator")
    recorded = reproduction.recorded_run(recipe)
    if output is not None:
        reproduction.refuse_existing(output)
    outcome = rerun(recipe.case)
    made = reproduction.build(recorded, outcome.statement, name)
    path = output or reproduction.default_path(recipe, made)
    with Workspace.find().writing():
        reproduction.write(made, path)
    report = reproduction.Checked(path, made, ()).as_dict()
    if as_json:
        show_json(report)
    else:
        print("\n".join(reproduction_lines(report)))
        for difference in outcome.differences:
            print(f"\n{difference}")
        print(f"statement: {shown(path)}")
    raise typer.Exit(reproduction.Checked(path, made, ()).exit_code)
