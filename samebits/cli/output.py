"""What the verbs print: one form of JSON, one form of tables."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import typer


def show_json(value: Any) -> None:
    """Print a value as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2))


def show_rows(rows: list[dict], as_json: bool, line: Callable[[dict], str]) -> None:
    """Print rows as JSON, or each as one line."""
    if as_json:
        show_json(rows)
        return
    for row in rows:
        typer.echo(line(row))


def show_table(
    columns: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    right: Iterable[str] = (),
    header: bool = True,
) -> None:
    """Print a table; the columns named in `right` are aligned on that side."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=header)
    for name in columns:
        table.add_column(name, justify="right" if name in set(right) else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=160, markup=False, highlight=False).print(table)


@contextlib.contextmanager
def show_progress(what: str, things: str) -> Iterator[Callable[[str, int, int], None]]:
    """A function of (name, how many are done, of how many) that shows it on stderr.

    A terminal has a bar; where lines are kept, each name is one when it begins.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda name, done, total: typer.echo(
            f"{what}: {name} ({done + 1} of {total} {things})", err=True
        )
        return
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda name, done, total: progress.update(
            task, description=f"{what}: {name}", completed=done, total=total
        )
