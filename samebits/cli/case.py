"""`samebits case`: the model cases, what their evidence says, and the steps to a new one."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from samebits.cli.output import show_json, show_table

app = typer.Typer(no_args_is_help=True, help="The model cases and their status.")


@app.command("list")
def list_cases(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the status of every case, recomputed from its evidence.

    Verdicts do not move the exit code; `samebits verify CASE` is for that.
    """
    from samebits.cases import all_statuses

    found = all_statuses()
    if as_json:
        show_json([status.as_dict() for status in found])
        return
    columns = ("case", "platform", "verdict", "mismatches of tokens, per leg", "date", "stale")
    rows = [
        (
            status.case,
            status.platform,
            status.judged(),
            "\n".join(status.legs()) or "-",
            status.date or "-",
            _first(status.stale),
        )
        for status in found
    ]
    show_table(columns, rows)


def _first(reasons: list[str]) -> str:
    more = f"\nand {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return reasons[0] + more if reasons else "-"


@app.command()
def show(
    case: Annotated[str, typer.Argument(help="Name of a case.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show series, layouts and status of one case."""
    from samebits import recipe as recipes
    from samebits.cases import status
    from samebits.casework import ladder

    recipe = recipes.load(case)
    found = status(recipe.case)
    climbed = ladder.read(recipe)
    changed = ladder.stale(climbed, recipe) if climbed else []
    record = {
        "case": recipe.case,
        "recipe": recipe.digest,
        "platform": recipe.platform,
        "architecture": recipe.architecture,
        "series": dict(recipe.series),
        "trainer_tp": list(recipe.trainer_tp),
        "rollout_tp": list(recipe.rollout_tp),
        "legs": sorted(recipe.legs),
        "status": found.as_dict(),
        "ladder": None if climbed is None else {"summary": climbed.summary(), "stale": changed},
    }
    if as_json:
        show_json(record)
        return
    lines = {
        "case": [recipe.case],
        "platform": [recipe.platform],
        "architecture": [recipe.architecture],
        "recipe": [recipe.digest],
        "series": [f"{upstream}: {name}" for upstream, name in recipe.series.items()],
        "trainer TP": [", ".join(map(str, recipe.trainer_tp))],
        "rollout TP": [", ".join(map(str, recipe.rollout_tp))],
        "legs": [", ".join(sorted(recipe.legs))],
        "verdict": [f"{found.judged()}, {found.date}" if found.date else found.verdict],
        "mismatches": found.legs(),
        "stale": found.stale,
        "not shown": found.not_shown,
        "ladder": [climbed.summary()] if climbed else [],
        "ladder stale": changed,
        "reproduced": [f"by {found.reproductions} operators"] if found.reproductions else [],
    }
    show_table(
        ("", ""),
        [(name, "\n".join(texts)) for name, texts in lines.items() if texts],
        header=False,
    )


@app.command()
def new(
    case: Annotated[str, typer.Argument(help="Name of the new case.", metavar="MODEL")],
    config: Annotated[
        Path | None, typer.Option(help="Published config.json: its dimensions are taken.")
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option(help="Instead: llama, qwen2, qwen3 or qwen3_5_text, at template size."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the case; default: a few.")
    ] = None,
    series: Annotated[
        str | None, typer.Option(help="Patch series; default: that of a case like this.")
    ] = None,
    text_only: Annotated[
        bool,
        typer.Option(
            "--text-only",
            help="With --config: its text model alone; the case says what is left out.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make the folder of a new case from the template.

    Nothing is overwritten. A model with regions that no operator covers is refused (SB0916), and
    nothing is written.
    """
    from samebits import recipe as recipes
    from samebits.casework import create, steps
    from samebits.errors import shown, word

    if (config is None) == (architecture is None):
        raise typer.BadParameter("give one of --config and --architecture")
    if text_only and config is None:
        raise typer.BadParameter("--text-only takes a model out of --config FILE")
    folder = create.create(
        case,
        config=config,
        architecture=architecture,
        layers=layers,
        series=series,
        text_only=text_only,
    )
    names = sorted(path.name for path in folder.iterdir())
    if as_json:
        show_json({"case": case, "folder": str(folder), "files": names})
        return
    print(f"{shown(folder)}: {', '.join(names)}")
    if text_only:
        left_out = recipes.load(case).taken_out
        print(f"left out of {config}: {', '.join(left_out) if left_out else 'nothing'}")
    following = steps.progress(case).next
    if following is not None:
        print(f"\nnext: {following.command}  # {following.step}: {following.passes}")
    print(f"steps: samebits case status {word(case)}")


@app.command("status")
def show_status(
    case: Annotated[
        str | None, typer.Argument(help="Name of a case; all cases by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where a case stands, and the next command.

    State is read from recipe, contract and evidence; the ledger adds decisions of people. Where
    they stopped steps, the last line names these, why, and what waits for them. Exit code
    of one case: 0 every step done or out of scope, 1 evidence shows a difference, 2 a file is
    refused, 3 something is open. Without a case the exit code is 0.
    """
    from samebits.casework import steps

    if case is None:
        _all_progress(as_json)
        return
    found = steps.progress(case)
    if as_json:
        show_json(found.as_dict())
        raise typer.Exit(found.exit_code)
    rows = [(state.step, state.state, state.title, state.why) for state in found.states]
    show_table(("step", "state", "", "why"), rows)
    for note in found.notes:
        print(f"note, {note['date']}: {note['text']}")
    print(f"\n{found.summary()}")
    following = found.next
    if following is not None:
        print(f"next: {following.command}  # {following.step}: {following.passes}")
    if stopped := found.stopped():
        print(stopped)
    raise typer.Exit(found.exit_code)


def _all_progress(as_json: bool) -> None:
    from samebits import recipe as recipes
    from samebits.casework import steps
    from samebits.errors import SamebitsError

    rows: list[dict] = []
    for name in recipes.known_cases():
        try:
            rows.append(steps.progress(name).as_dict())
        except SamebitsError as error:  # one broken case hides no other
            rows.append({"case": name, "error": error.error_id, "seen": error.seen})
    if as_json:
        show_json(rows)
        return
    cells = []
    for row in rows:
        if "error" in row:
            cells.append((row["case"], row["error"], row["seen"], ""))
            continue
        following = row["next"] or {"step": "-", "command": "-"}
        settled = f"{row['settled']} of {row['of']}"
        if row["out_of_scope"]:
            settled += f", {row['out_of_scope']} out of scope"
        cells.append((row["case"], settled, following["step"], following["command"]))
    show_table(("case", "settled", "next step", "command"), cells)


class Decision(enum.StrEnum):
    """What a person can decide about a step; `clear` takes it back."""

    blocked = "blocked"
    out_of_scope = "out-of-scope"
    clear = "clear"


@app.command()
def decide(
    case: Annotated[str, typer.Argument(help="Name of a case.")],
    step: Annotated[str, typer.Argument(help="Name of a step, see `samebits case status`.")],
    decision: Annotated[Decision, typer.Argument(help="What is decided.")],
    reason: Annotated[
        str | None, typer.Option(help="Why, in a sentence; needed unless it is taken back.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ledger.")] = False,
) -> None:
    """Write a decision about a step into the ledger of a case.

    A step cannot be decided to be done. What the case claims, or every case has to show, cannot be
    put out of scope (SB0918).
    """
    from samebits import recipe as recipes
    from samebits.casework import ledger, steps

    recipe = recipes.load(case)
    if decision is Decision.out_of_scope:
        steps.refuse_claimed(recipe, step)
    data = ledger.decide(recipe, step, decision.value, reason)
    if as_json:
        show_json(data)
        return
    print(f"{recipe.case}, {step}: {decision.value}")
