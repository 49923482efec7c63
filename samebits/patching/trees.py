"""Patched trees: `build/<upstream>/<tree-id>/`, each a git repository of its own.

The first commit is the unmodified upstream snapshot, then follows one commit per patch. Identity
and committer dates are fixed, so that the same input gives the same commits. A tree is built in a
temporary folder and renamed when it is whole; an existing tree is verified, never written over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from samebits import files
from samebits.errors import Different, Refused, shown, word
from samebits.patching import compiled, fetch, git, pins, sparse
from samebits.patching.header import Patch, lint
from samebits.patching.pins import Pin
from samebits.patching.series import Series
from samebits.patching.workspace import Workspace

EXPORTED = "samebits-exported"  # tag in an edit tree: the commits that patch files hold
AM = ("am", "--quiet", "--keep-non-patch", "--committer-date-is-author-date", "--whitespace=nowarn")


# --- building -------------------------------------------------------------------------------


def unpack(sdist: Path, folder: Path) -> None:
    """Unpack the single top folder of an sdist into `folder`, which must not exist."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpack-") as scratch:
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        tops = list(Path(scratch).iterdir())
        if len(tops) != 1 or not tops[0].is_dir():
            raise Refused(
                "SB0105",
                seen=f"{sdist.name} holds {len(tops)} top entries",
                required="one top folder",
                hint=f"tar tzf {word(sdist)}",
            )
        tops[0].rename(folder)


def snapshot_message(pin: Pin) -> str:
    """Commit message of the unmodified upstream."""
    return (
        f"{pin.distribution} {pin.version}, unmodified\n\n"
        f"Sdist: {pin.sdist}\nSha256: {pin.sha256}\n"
        f"Repository: {pin.repository}\nTag: {pin.tag}\nCommit: {pin.commit or 'not known'}\n"
    )


def snapshot(workspace: Workspace, pin: Pin, folder: Path, given: Path | None = None) -> None:
    """Make `folder` a repository whose only commit is the pinned sdist; refuses another tree id."""
    sdist = fetch.sdist(workspace, pin, given)
    unpack(sdist, folder)
    git.init(folder)
    tree = git.commit_all(folder, snapshot_message(pin))
    if tree != pin.tree:
        raise Refused(
            "SB0101",
            seen=f"{pin.sdist} unpacks to tree {tree}",
            required=f"tree {pin.tree}",
            hint=f"git -C {word(workspace.root)} diff patches/pins.yaml",
        )


def snapshot_checkout(
    workspace: Workspace, pin: Pin, patches: list[Patch], checkout: Path, folder: Path
) -> str:
    """As `snapshot`, from a git checkout; returns its commit.

    Accepted when HEAD is the pinned commit (where one is known) and every blob that the series
    starts from is the pinned one. The commit's tree is taken, so that loose edits of the checkout
    cannot enter.
    """
    folder.mkdir()
    try:
        commit = git.take(checkout, folder, f"{pin.distribution}, from a checkout, unmodified")
    except git.GitFailed as error:
        raise Refused(
            "SB0119",
            seen=f"{checkout}: {error.message.splitlines()[0]}",
            required="a git checkout",
            hint=f"git clone --branch {word(pin.tag)} {word(pin.repository)}",
        ) from None
    wrong = [
        f"{path} is {found or 'absent'}, not {wanted or 'absent'}"
        for path, wanted in first_blobs(patches).items()
        if (found := git.blob(folder, "HEAD", path)) != wanted
    ]
    if pin.commit and commit != pin.commit:  # blobs alone say nothing where a series is empty
        wrong.insert(0, f"HEAD is not {pin.commit}")
    if wrong:
        raise Refused(
            "SB0119",
            seen=f"commit {commit[:12]}: " + "; ".join(wrong),
            required=f"the sources of {pin.tag}",
            hint=f"git -C {word(checkout)} checkout {word(pin.tag)}",
        )
    return commit


def first_blobs(patches: Iterable[Patch]) -> dict[str, str | None]:
    """Path -> blob id before the first patch that touches it."""
    found: dict[str, str | None] = {}
    for patch in patches:
        for blob in patch.blobs:
            found.setdefault(blob.path, blob.before)
    return found


def blob_problem(folder: Path, patch: Patch, *, after: bool) -> str | None:
    """The first file of `patch` whose blob at HEAD is not the one that the patch names."""
    for blob in patch.blobs:
        expected = blob.after if after else blob.before
        found = git.blob(folder, "HEAD", blob.path)
        if found != expected:
            return f"{blob.path} is {found or 'absent'}, the patch names {expected or 'absent'}"
    return None


def am(folder: Path, patch: Patch) -> str | None:
    """Commit one patch on HEAD; where it does not apply, leave HEAD alone and return why."""
    try:
        git.run(folder, *AM, stdin=patch.content.encode())
    except git.GitFailed as error:
        with contextlib.suppress(git.GitFailed):
            git.run(folder, "am", "--abort")
        return error.message.splitlines()[0]
    return None


def try_patch(folder: Path, patch: Patch) -> tuple[str, str] | None:
    """Commit one patch on HEAD; None, or why not as (drift reason, detail)."""
    if problem := blob_problem(folder, patch, after=False):
        return "preimage-changed", problem
    if problem := am(folder, patch):
        return "context-changed", problem
    if problem := blob_problem(folder, patch, after=True):
        return "export-differs", problem
    return None


def check_header(pin: Pin, patch: Patch) -> None:
    """Refuse a patch whose header does not say what a header has to (SB0109)."""
    if wrong := lint(patch, pin.tag):
        raise Refused(
            "SB0109",
            seen=f"{patch.name}: {'; '.join(wrong)}",
            required="every line of patches/TEMPLATE.txt",
            hint=f"samebits patch apply {pin.name} --edit",
        )


def apply_patch(workspace: Workspace, folder: Path, upstream: str, patch: Patch) -> None:
    """Commit one patch on HEAD; refuses where the blobs before or after are not those it names."""
    if failure := try_patch(folder, patch):
        reason, detail = failure
        moved = reason == "preimage-changed"
        raise Refused(
            "SB0111" if moved else "SB0112",
            seen=f"{patch.name}: {detail}",
            required="the blob at this place of the series"
            if moved
            else "a patch as `samebits patch export` wrote it",
            hint=f"git -C {word(workspace.root)} diff {word(f'patches/{upstream}')}",
        )


def head_tree(folder: Path, commit: str = "HEAD") -> str:
    """Tree id of a commit."""
    return git.text(folder, "rev-parse", f"{commit}^{{tree}}")


def root_commit(folder: Path) -> str:
    """The first commit of a tree: the unmodified upstream."""
    return git.text(folder, "rev-list", "--max-parents=0", "HEAD").splitlines()[-1]


@contextlib.contextmanager
def scratch(workspace: Workspace, upstream: str) -> Iterator[Path]:
    """A folder on the same disk as the trees, removed at the end. Callers hold the upstream's lock,
    so whatever an earlier run left behind is of a run that was killed."""
    parent = workspace.build / upstream
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(".building-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".building-") as folder:
        yield Path(folder)


def build(
    workspace: Workspace,
    pin: Pin,
    model: str,
    *,
    given: Path | None = None,
    checkout: Path | None = None,
    clean: bool = False,
) -> Path:
    """Build (or verify) the tree of `model`; returns `build/<upstream>/<tree-id>`.

    Errors: Refused where series, headers, patches or input are wrong, or an existing tree was
    edited; Different where the result is not the recorded tree id.
    """
    series = Series(workspace, pin.name)
    patches = series.patches(model)
    for patch in patches:
        check_header(pin, patch)
    recorded = (pin.trees or {}).get(model)
    with workspace.lock(pin.name), workspace.writing():
        if given is not None:  # before a tree is reused: the file may be another one
            fetch.check_given(given, pin)
        if recorded and checkout is None and not clean:
            target = tree_folder(workspace, pin.name, recorded)
            if target.exists() and _current(workspace, pin.name, recorded, model, patches):
                verify(pin.name, model, target)
                return target
        with scratch(workspace, pin.name) as folder:
            work = folder / "tree"
            source: dict = {"source": "sdist", "sha256": pin.sha256}
            if checkout is not None:
                commit = snapshot_checkout(workspace, pin, patches, checkout, work)
                source = {"source": "checkout", "commit": commit}
            else:
                snapshot(workspace, pin, work, given)
            before = head_tree(work)
            for patch in patches:
                apply_patch(workspace, work, pin.name, patch)
            tree = head_tree(work)
            if recorded and checkout is None and tree != recorded:
                raise Different(
                    "SB0113",
                    seen=f"{pin.name} for {model} gives tree {tree}",
                    required=f"tree {recorded} (patches/pins.yaml)",
                    hint=f"samebits patch export {pin.name} --record",
                )
            target = tree_folder(workspace, pin.name, tree)
            if target.exists():
                if clean:
                    _move_aside_if_edited(target)
                else:
                    verify(pin.name, model, target)
            if not target.exists():
                work.rename(target)
            _write_record(
                workspace,
                pin.name,
                tree,
                {
                    **source,
                    "upstream": pin.name,
                    "version": pin.version,
                    "tree_before": before,
                    "tree": tree,
                    "patches": [p.name for p in patches],
                },
                model,
            )
            return target


def _current(
    workspace: Workspace, upstream: str, tree: str, model: str, patches: list[Patch]
) -> bool:
    """Whether the record of a built tree names this model and the patch files as they are now."""
    record = read_record(workspace, upstream, tree)
    return record is not None and record["models"].get(model) == series_digest(patches)


def series_digest(patches: list[Patch]) -> str:
    """sha256 over names and contents of a series."""
    state = hashlib.sha256()
    for patch in patches:
        for piece in (patch.name, patch.content):
            state.update(f"{len(piece)}:{piece}".encode())
    return state.hexdigest()


# --- existing trees -------------------------------------------------------------------------


def tree_folder(workspace: Workspace, upstream: str, tree: str) -> Path:
    """Where the tree with this id is built."""
    return workspace.build / upstream / tree


def _record_path(workspace: Workspace, upstream: str, tree: str) -> Path:
    return workspace.build / upstream / f"{tree}.json"


def read_record(workspace: Workspace, upstream: str, tree: str) -> dict | None:
    """What a tree was built from, or None where no whole record says so."""
    try:
        record = json.loads(_record_path(workspace, upstream, tree).read_text())
    except (FileNotFoundError, ValueError):  # of a tree never built here, or cut short
        return None
    whole = isinstance(record, dict) and isinstance(record.get("models"), dict)
    return record if whole and "source" in record else None


def _write_record(workspace: Workspace, upstream: str, tree: str, record: dict, model: str) -> None:
    series = Series(workspace, upstream)
    old = read_record(workspace, upstream, tree) or {}
    models = {**old.get("models", {}), model: series_digest(series.patches(model))}
    path = _record_path(workspace, upstream, tree)
    text = json.dumps({**record, "models": models}, indent=2, sort_keys=True) + "\n"
    files.write_atomic(path, text.encode())


def verify(upstream: str, model: str, folder: Path) -> None:
    """Refuse a tree that is not, file by file, the one that its folder is named after.

    Compiled extensions of the upstream's release may lie in it (`samebits.patching.compiled`).
    """
    hint = f"samebits patch apply {upstream} --model {model} --clean"
    required = f"tree {folder.name}"
    extensions = compiled.verified(folder.parents[2] / "patches", upstream, folder)
    if not (folder / ".git").exists() and sparse.listing_path(folder).exists():
        if problem := sparse.problem(folder, git.BY_PRODUCTS, also=extensions):
            raise Refused(
                "SB0114",
                seen=f"{shown(folder)}: {problem}",
                required=required,
                # in the folder of the bundle that the tree came from
                hint=f"python3 install.py --into {word(folder.parents[3])}",
            )
        return
    try:
        tree = head_tree(folder)
        edits = sorted(set(git.edits(folder)) - extensions)
    except git.GitFailed as error:
        raise Refused(
            "SB0114",
            seen=f"{shown(folder)}: {error.message}",
            required=required,
            hint=hint,
        ) from None
    if tree != folder.name:
        raise Refused(
            "SB0114",
            seen=f"{shown(folder)} is at tree {tree}",
            required=required,
            hint=hint,
        )
    if edits:
        names = ", ".join(edits[:5]) + (f" and {len(edits) - 5} more" if len(edits) > 5 else "")
        raise Refused(
            "SB0114", seen=f"{shown(folder)}: {names} edited", required=required, hint=hint
        )


def _move_aside_if_edited(folder: Path) -> None:
    try:
        verify(folder.parent.name, "-", folder)
    except Refused:
        aside = shown(files.move_aside(folder, "edited"))
        print(f"moved the edited tree to {aside}", file=sys.stderr)
    else:
        shutil.rmtree(folder)


def tree_path(upstream: str, model: str, workspace: Workspace | None = None) -> Path:
    """The verified tree of `model` for `upstream`; Refused with the command that builds it.

    The recorded tree is preferred; a tree built from a git checkout serves where that one is not
    there and the series is the same. `tree_record` says which it is.
    """
    workspace = workspace or Workspace.find()
    pin = pins.get(workspace, upstream)
    patches = Series(workspace, upstream).patches(model)
    hint = f"samebits patch apply {upstream} --model {model}"
    recorded = (pin.trees or {}).get(model)
    if recorded is None:
        raise Refused(
            "SB0115",
            seen=f"patches/pins.yaml records no tree of {upstream} for {model}",
            required="a recorded tree id",
            hint=f"samebits patch export {upstream} --record",
        )
    digest = series_digest(patches)
    built = [path.stem for path in (workspace.build / upstream).glob("*.json")]
    for tree in sorted(built, key=lambda tree: (tree != recorded, tree)):
        record = read_record(workspace, upstream, tree)
        if record is None or record["models"].get(model) != digest:
            continue
        if tree == recorded or record["source"] == "checkout":
            folder = tree_folder(workspace, upstream, tree)
            if folder.is_dir():
                verify(upstream, model, folder)
                return folder
    raise Refused(
        "SB0115",
        seen=f"no build/{upstream}/{recorded} of the present series",
        required=f"the patched tree of {upstream} for {model}",
        hint=hint,
    )


def tree_record(upstream: str, model: str, workspace: Workspace | None = None) -> dict:
    """What the tree of `tree_path` was built from: source, hashes, tree ids, patches."""
    workspace = workspace or Workspace.find()
    record = read_record(workspace, upstream, tree_path(upstream, model, workspace).name)
    assert record is not None  # tree_path found it through its record
    return record


def python_paths(model: str, workspace: Workspace | None = None) -> list[Path]:
    """Folders for PYTHONPATH: the tree of every patched upstream for `model`."""
    workspace = workspace or Workspace.find()
    return [tree_path(pin.name, model, workspace) for pin in pins.patched(workspace)]


# --- trees to write in ----------------------------------------------------------------------


def edit_folder(workspace: Workspace, upstream: str) -> Path:
    """Where a tree to edit is built."""
    return workspace.build / "edit" / upstream


def build_edit(
    workspace: Workspace, pin: Pin, *, given: Path | None = None, clean: bool = False
) -> Path:
    """A writable tree at `build/edit/<upstream>` with every patch of `order` as a commit.

    An existing one is returned as it is: it may hold work. `clean` moves it aside first.
    """
    folder = edit_folder(workspace, pin.name)
    patches = Series(workspace, pin.name).patches()
    with workspace.lock(pin.name), workspace.writing():
        if given is not None:
            fetch.check_given(given, pin)
        if folder.exists():
            if not clean:
                return folder
            files.move_aside(folder, "edited")
        with scratch(workspace, pin.name) as parent:
            work = parent / "tree"
            snapshot(workspace, pin, work, given)
            for patch in patches:
                apply_patch(workspace, work, pin.name, patch)
            git.run(work, "tag", "-f", EXPORTED)
            folder.parent.mkdir(parents=True, exist_ok=True)
            work.rename(folder)
    return folder
