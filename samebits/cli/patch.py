"""`samebits patch`: build, check, export and compare the patch series on the pinned upstreams."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from samebits.cli.output import show_rows
from samebits.errors import Refused, SamebitsError, shown, word
from samebits.patching import branches as branching
from samebits.patching import check as checking
from samebits.patching import compiled, pins, trees
from samebits.patching import export as exporting
from samebits.patching.series import Series
from samebits.patching.workspace import Workspace


class _Rooted(TyperGroup):
    """Hints of a run with `--root` name that root, too: without it they would work on another."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SamebitsError as error:
            if ctx.obj is not None and error.error_id != "SB0124":  # that root is the wrong one
                option = f"samebits patch --root {word(ctx.obj)} "
                error.hint = error.hint.replace("samebits patch ", option)
            raise


app = typer.Typer(
    cls=_Rooted, no_args_is_help=True, help="Patch series on the pinned upstreams, and their trees."
)

Upstreams = Annotated[
    list[str] | None, typer.Argument(help="Upstream names of patches/pins.yaml; all by default.")
]
Models = Annotated[
    list[str] | None, typer.Option("--model", help="Model case; repeatable. All by default.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def _root(
    context: typer.Context,
    root: Annotated[
        Path | None,
        typer.Option(help="Checkout of the project, where it is not found by itself."),
    ] = None,
) -> None:
    context.obj = root


def _workspace(context: typer.Context) -> Workspace:
    root: Path | None = context.obj
    return Workspace(root.resolve()) if root else Workspace.find()


def _selected(workspace: Workspace, names: list[str] | None) -> list[pins.Pin]:
    if not names:
        return pins.patched(workspace)
    chosen = [pins.get(workspace, name) for name in names]
    for pin in chosen:
        if pin.trees is None:
            raise Refused(
                "SB0102",
                seen=f"{pin.name} is a dependency without a series",
                required=", ".join(p.name for p in pins.patched(workspace)),
                hint="samebits patch apply",
            )
    return chosen


@app.command()
def apply(
    context: typer.Context,
    upstreams: Upstreams = None,
    model: Models = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Local sdist (one upstream only).")
    ] = None,
    checkout: Annotated[
        Path | None,
        typer.Option(
            help="Git checkout at the pinned tag, instead of the sdist (one upstream only)."
        ),
    ] = None,
    edit: Annotated[
        bool, typer.Option("--edit", help="Make build/edit/UPSTREAM with every patch as a commit.")
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Build anew; an edited tree is moved aside first.")
    ] = False,
    extensions: Annotated[
        bool,
        typer.Option(
            "--compiled", help="Place the compiled extensions of the release's wheel in them."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Build the patched trees and print their paths.

    Paths are as the current folder sees them, with --json absolute.

    Pinned sources are fetched through pip's own configuration where they are missing.
    """
    workspace = _workspace(context)
    chosen = _selected(workspace, upstreams)
    if (source or checkout) and len(chosen) != 1:
        raise Refused(
            "SB0102",
            seen=f"{len(chosen)} upstreams for one local source",
            required="one upstream",
            hint=f"samebits patch apply {chosen[0].name} --from FILE",
        )
    rows = []
    for pin in chosen:
        if edit:
            folder = trees.build_edit(workspace, pin, given=source, clean=clean)
            rows.append({"upstream": pin.name, "model": None, "path": str(folder)})
            continue
        for name in model or Series(workspace, pin.name).models:
            folder = trees.build(workspace, pin, name, given=source, checkout=checkout, clean=clean)
            if extensions:
                compiled.place(workspace, pin.name, folder)
            rows.append({"upstream": pin.name, "model": name, "path": str(folder)})
    show_rows(
        rows,
        as_json,
        lambda row: f"{row['upstream']} {row['model'] or '-'} {shown(Path(row['path']))}",
    )


@app.command()
def export(
    context: typer.Context,
    upstream: Annotated[str, typer.Argument(help="Upstream name.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="Tree to read; build/edit/UPSTREAM by default.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the patch files and `order`.")
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help="With --write: series that take up added patches; repeatable."
        ),
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(help="With --write: patch to remove; repeatable.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write each model's tree id into patches/pins.yaml.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn the commits of a tree into patch files.

    Without --write it only says what differs.
    """
    workspace = _workspace(context)
    (pin,) = _selected(workspace, [upstream])
    rows: list[dict] = []
    if write or source or not record:
        tree = (source or trees.edit_folder(workspace, upstream)).resolve()
        done = exporting.export(workspace, pin, tree, write=write, models=model, drop=drop)
        for kind in ("same", "changed", "added", "dropped"):
            rows += [{"patch": name, "state": kind} for name in getattr(done, kind)]
    if record:
        made = exporting.record(workspace, pin)
        rows += [{"model": name, "tree": tree} for name, tree in made.items()]
    show_rows(rows, as_json, lambda row: " ".join(row.values()))


@app.command()
def check(
    context: typer.Context,
    upstreams: Upstreams = None,
    as_json: Json = False,
) -> None:
    """Check lists, headers, blob ids, re-export and tree ids.

    One line says what was checked where nothing is found; with --json findings alone.
    """
    workspace = _workspace(context)
    chosen = _selected(workspace, upstreams)
    found = [f for pin in chosen for f in checking.check(workspace, pin)]
    _print_findings(found, as_json)
    checking.raise_for(workspace, found)
    if not as_json:
        several = [Series(workspace, pin.name) for pin in chosen]
        counts = [f"{s.upstream} (patches {len(s.order)}, trees {len(s.models)})" for s in several]
        print(f"as recorded: {', '.join(counts)}")


@app.command()
def drift(
    context: typer.Context,
    upstream: Annotated[str, typer.Argument(help="Upstream name.")],
    against: Annotated[
        str, typer.Option(help="The other release: an sdist file, a source folder or a version.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Only the series of this model; the whole order by default."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which patches still apply to another release."""
    workspace = _workspace(context)
    (pin,) = _selected(workspace, [upstream])
    found = checking.drift(workspace, pin, against, model)
    touched = {finding.patch for finding in found}
    series = Series(workspace, upstream)
    names = series.of(model) if model else series.order
    clean = [checking.Finding(upstream, n, checking.APPLIES, "") for n in names if n not in touched]
    _print_findings(found + clean, as_json)
    checking.raise_for_drift(workspace, found)


@app.command()
def branches(context: typer.Context, model: Models = None, as_json: Json = False) -> None:
    """Write build/branches.git: a snapshot and its changes, per model."""
    workspace = _workspace(context)
    rows = []
    for pin in pins.patched(workspace):
        for name in model or Series(workspace, pin.name).models:
            rows.append(asdict(branching.write(workspace, pin, name)))
    show_rows(rows, as_json, lambda row: f"{row['name']} {row['snapshot']} {row['changes']}")


def _print_findings(found: list[checking.Finding], as_json: bool) -> None:
    rows = [f.as_row() for f in found]
    show_rows(rows, as_json, lambda row: "  ".join(filter(None, row.values())))
