"""Framework branches in a repository of their own: `<upstream>/<model>`, two commits each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samebits.errors import Refused, shown, word
from samebits.patching import git, trees
from samebits.patching.pins import Pin
from samebits.patching.series import Series
from samebits.patching.workspace import Workspace


@dataclass(frozen=True)
class Branch:
    """Ids of what `write` made: branch name, both commits, tree of the second."""

    name: str
    snapshot: str
    changes: str
    tree: str


def repository(workspace: Workspace) -> Path:
    """The bare repository that holds all branches."""
    return workspace.build / "branches.git"


def write(workspace: Workspace, pin: Pin, model: str) -> Branch:
    """Write the branch of one upstream and model.

    The first commit holds the unmodified upstream snapshot, the second the changes, and names the
    first's pin. Commit ids repeat: identity, dates and trees are fixed. Where the sdist lacks its
    licence text, the text hangs on the snapshot commit as a git note, so that its tree stays the
    sdist's.

    Errors: Refused where the branch holds commits that this function did not write.
    """
    source = trees.build(workspace, pin, model)
    target = repository(workspace)
    name = f"{pin.name}/{model}"
    with workspace.lock("branches"), workspace.writing():
        if not target.exists():
            target.mkdir(parents=True)
            git.run(target, "init", "-q", "--bare")
        _refuse_foreign(target, name)
        before = trees.head_tree(source, trees.root_commit(source))
        after = trees.head_tree(source)
        first = git.text(source, "commit-tree", before, "-F", "-", stdin=_snapshot(pin, before))
        second = git.text(
            source, "commit-tree", after, "-p", first, "-F", "-",
            stdin=_changes(workspace, pin, model, first, after),
        )  # fmt: skip
        git.run(
            source, "push", "-q", "--force", str(target.resolve()), f"{second}:refs/heads/{name}"
        )
        if pin.license_file:
            note = workspace.patches / pin.license_file
            git.run(target, "notes", "--ref=license", "add", "-f", "-F", str(note.resolve()), first)
    return Branch(name, first, second, after)


def _snapshot(pin: Pin, tree: str) -> bytes:
    text = trees.snapshot_message(pin) + f"Tree: {tree}\nLicense: {pin.license}\n"
    if pin.license_file:
        text += "License-Text: refs/notes/license\n"
    return text.encode()


def _changes(workspace: Workspace, pin: Pin, model: str, first: str, tree: str) -> bytes:
    patches = Series(workspace, pin.name).patches(model)
    listed = "".join(f"- {patch.subject}\n" for patch in patches) or "- none\n"
    return (
        f"Changes to {pin.distribution} {pin.version} for {model}\n\n{listed}\n"
        f"Pin: {first}\nSha256: {pin.sha256}\nTree: {tree}\n"
    ).encode()


def _refuse_foreign(target: Path, name: str) -> None:
    try:
        messages = git.text(target, "log", "--format=%an%x00%s", f"refs/heads/{name}", "--")
    except git.GitFailed:
        return  # no such branch yet
    ours = [line.split("\0")[0] == git.NAME for line in messages.splitlines()]
    if len(ours) != 2 or not all(ours):
        raise Refused(
            "SB0121",
            seen=f"{shown(target)} has {len(ours)} commits on {name}",
            required="the two commits that this command writes",
            hint=f"git -C {word(target)} branch -m {word(name)} {word(f'kept/{name}')}",
        )
