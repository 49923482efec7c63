"""Commits of a tree back to patch files, the same bytes every time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from samebits import files
from samebits.errors import Different, Refused, shown, word
from samebits.patching import git, index, pins, trees
from samebits.patching.header import Patch, lint, slug
from samebits.patching.pins import Pin
from samebits.patching.series import Series, write_list
from samebits.patching.workspace import Workspace

# Nothing in a file may depend on when, where, by which git or on which base commit it was written.
FORMAT = (
    "format-patch",
    "--stdout",
    "--keep-subject",  # the subject is ours, without [PATCH n/m]
    "--no-stat",  # its column widths follow the terminal and the series
    "--no-signature",  # names the git version
    "--zero-commit",  # commit ids change with the base
    "--full-index",  # whole blob ids: they are what `check` compares
    "--no-renames",  # rename detection follows configuration and file counts
    "--no-numbered",
    "--no-attach",
    "--no-thread",
    "--no-cover-letter",
    "--no-encode-email-headers",
    "--no-ext-diff",
    "--no-textconv",
    "--unified=3",
    "--inter-hunk-context=0",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)


def patches_of(pin: Pin, tree: Path) -> list[Patch]:
    """The commits after the snapshot of `tree`, oldest first, as patch files."""
    hint = f"git -C {word(tree)} status"
    try:
        dirty = git.edits(tree)
        root = trees.root_commit(tree)
        merges = git.text(tree, "rev-list", "--merges", "HEAD")
        commits = git.text(tree, "rev-list", "--reverse", f"{root}..HEAD").split()
    except git.GitFailed as error:
        raise Refused(
            "SB0118",
            seen=f"{tree}: {error.message}",
            required="a git tree that begins with the pinned snapshot",
            hint=f"samebits patch apply {pin.name} --edit",
        ) from None
    problem = None
    if dirty:
        problem = f"not committed: {', '.join(dirty[:5])}"
    elif merges:
        problem = f"merge commits: {merges.split()[0][:12]}"
    elif trees.head_tree(tree, root) != pin.tree:
        problem = f"its first commit is tree {trees.head_tree(tree, root)}"
    if problem:
        raise Refused(
            "SB0118",
            seen=f"{tree}: {problem}",
            required=f"a line of commits on the snapshot, tree {pin.tree}",
            hint=hint,
        )
    found: list[Patch] = []
    for commit in commits:
        content = git.run(tree, *FORMAT, "-1", commit).decode()
        draft = Patch("", content)
        patch = Patch(f"{slug(draft.subject)}.patch", content)
        if any(p.name == patch.name for p in found):
            raise Refused(
                "SB0118",
                seen=f"two commits are called `{patch.subject}`",
                required="one subject for each commit",
                hint=f"git -C {word(tree)} log --oneline",
            )
        found.append(patch)
    return found


def refuse_bad_headers(pin: Pin, patches: list[Patch], hint: str) -> None:
    """Refuse when a header breaks a rule; every breach is listed."""
    wrong = [f"{patch.name}: {line}" for patch in patches for line in lint(patch, pin.tag)]
    if wrong:
        raise Refused(
            "SB0109",
            seen="\n            ".join(wrong),
            required="the form of patches/TEMPLATE.txt",
            hint=hint,
        )


@dataclass
class Export:
    """What an export found: file names by kind."""

    same: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        """Whether files and commits say different things."""
        return bool(self.changed or self.added or self.dropped)


def export(
    workspace: Workspace,
    pin: Pin,
    tree: Path,
    *,
    write: bool = False,
    models: list[str] | None = None,
    drop: list[str] | None = None,
) -> Export:
    """Compare the files of `patches/<upstream>/` with the commits of `tree`; `write` makes them so.

    `models` are the series that take up added patches. A patch that `order` lists and the tree
    lacks is refused unless `drop` names it.

    Errors: Refused for a header that breaks a rule, loose changes, a patch that would be lost;
    Different, without `write`, where the files are not what the commits say.
    """
    series = Series(workspace, pin.name)
    for model in models or []:
        series.check_name(model)
    with workspace.lock(pin.name), workspace.writing():
        patches = patches_of(pin, tree)
        refuse_bad_headers(pin, patches, f"git -C {word(tree)} log")
        names = [patch.name for patch in patches]
        result = Export(dropped=[n for n in series.order if n not in names])
        lost = [name for name in result.dropped if name not in (drop or [])]
        if lost:
            raise Refused(
                "SB0117",
                seen=f"{shown(tree)} has no commit for {', '.join(lost)}",
                required="a commit for each patch of order",
                hint=f"samebits patch export {pin.name} --write "
                + " ".join(f"--drop {word(name)}" for name in lost),
            )
        for patch in patches:
            path = series.folder / patch.name
            if not path.is_file():
                result.added.append(patch.name)
            elif path.read_bytes() != patch.content.encode():
                result.changed.append(patch.name)
            else:
                result.same.append(patch.name)
        if write:
            _write(series, patches, result, models or [])
            index.write(workspace)
            if tree == trees.edit_folder(workspace, pin.name):
                git.run(tree, "tag", "-f", trees.EXPORTED)
        elif result.differs or series.order != names:
            raise Different(
                "SB0116",
                seen=f"changed {result.changed}, added {result.added}, dropped {result.dropped}"
                if result.differs
                else "the commits are in another order than `order`",
                required=f"patches/{pin.name} as the commits of {shown(tree)}",
                hint=f"samebits patch export {pin.name} --write",
            )
    return result


def _write(series: Series, patches: list[Patch], result: Export, models: list[str]) -> None:
    names = [patch.name for patch in patches]
    series.folder.mkdir(parents=True, exist_ok=True)
    for patch in patches:
        if patch.name not in result.same:
            files.write_atomic(series.folder / patch.name, patch.content.encode())
    for model in sorted({*series.models, *models}):
        old = series.of(model) if model in series.models else []
        wanted = {*old, *(result.added if model in models else [])}
        new = [name for name in names if name in wanted]
        if new != old or model not in series.models:
            write_list(series.folder / "series" / model, new)
    write_list(series.folder / "order", names)
    for name in result.dropped:  # last: until here both lists and files could be read again
        (series.folder / name).unlink(missing_ok=True)


def record(workspace: Workspace, pin: Pin) -> dict[str, str]:
    """Apply each model's series on the pinned snapshot and write the tree ids; model -> tree id."""
    series = Series(workspace, pin.name)
    series.patches()
    made: dict[str, str] = {}
    with (
        workspace.lock(pin.name),
        workspace.writing(),
        trees.scratch(workspace, pin.name) as parent,
    ):
        work = parent / "tree"
        trees.snapshot(workspace, pin, work)
        root = trees.root_commit(work)
        for model in series.models:
            git.run(work, "checkout", "-q", "--detach", root)
            for patch in series.patches(model):
                trees.apply_patch(workspace, work, pin.name, patch)
            made[model] = trees.head_tree(work)
    with workspace.lock("pins"), workspace.writing():
        for model, tree in made.items():
            pins.record_tree(workspace, pin.name, model, tree)
    return made
