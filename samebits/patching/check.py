"""Is a series what it says it is, and would it still apply to another release?

Reasons are a closed list: `REASONS` for patches, `series-invalid` and `index-differs` for the files
around them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from samebits.errors import Different, NotObserved, Refused, word
from samebits.patching import export, fetch, git, index, trees
from samebits.patching.header import Patch, lint
from samebits.patching.pins import Pin
from samebits.patching.series import Series
from samebits.patching.workspace import Workspace

REASONS = (
    "pin-moved",  # the release is not the pinned one
    "preimage-changed",  # a file differs from the one the patch was made for, though it may apply
    "context-changed",  # git refuses the patch
    "already-upstream",  # the release holds the change
    "export-differs",  # the commit does not give the file's bytes, or its recorded blobs, back
    "tree-differs",  # a model's tree is not the recorded one
    "header-invalid",
    "proof-stale",  # the test that the patch names is not there
)
APPLIES = "applies"  # shown by drift for a patch with nothing to report
_BAD_INPUT = {"series-invalid": "SB0110", "header-invalid": "SB0109"}
_DIFFERENT = {
    "preimage-changed": "SB0111",
    "context-changed": "SB0112",
    "export-differs": "SB0112",
    "tree-differs": "SB0113",
    "index-differs": "SB0116",
}
_STALE = {"proof-stale": "SB0122"}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `patch` is a file name, a model name for trees, or empty."""

    upstream: str
    patch: str
    reason: str
    detail: str

    def as_row(self) -> dict[str, str]:
        """For `--json`."""
        return asdict(self)


def _header_findings(
    workspace: Workspace, pin: Pin, patch: Patch, tag: str | None
) -> list[Finding]:
    found = [Finding(pin.name, patch.name, "header-invalid", line) for line in lint(patch, tag)]
    for path, test in re.findall(r"(tests/\S+\.py)::(\w+)", patch.trailers.get("Proof", "")):
        file = workspace.root / path
        if not file.is_file() or not re.search(
            rf"^\s*(def|class) {test}\b", file.read_text(), re.M
        ):
            found.append(Finding(pin.name, patch.name, "proof-stale", f"no {path}::{test}"))
    return found


@contextlib.contextmanager
def _scratch(workspace: Workspace, pin: Pin) -> Iterator[Path]:
    with (
        workspace.lock(pin.name),
        workspace.writing(),
        trees.scratch(workspace, pin.name) as parent,
    ):
        yield parent / "tree"


def check(workspace: Workspace, pin: Pin) -> list[Finding]:
    """All that is wrong with the series of one upstream; an empty list when nothing is.

    In order: lists against files, headers, the generated index; then, where the lists fit, the
    series is applied on the pinned snapshot: blob ids before and after each patch, re-export, and
    one tree id for each model.
    """
    series = Series(workspace, pin.name)
    found = [Finding(pin.name, "", "series-invalid", line) for line in series.problems()]
    for patch in series.files.values():
        found += _header_findings(workspace, pin, patch, pin.tag)
    if not index.current(workspace):
        detail = "patches/README.md is not what `python scripts/patch_index.py --write` writes"
        found.append(Finding(pin.name, "", "index-differs", detail))
    if any(finding.reason == "series-invalid" for finding in found):
        return found
    with _scratch(workspace, pin) as work:
        trees.snapshot(workspace, pin, work)
        found += _apply_findings(pin, series, work)
    return found


def _apply_findings(pin: Pin, series: Series, work: Path) -> list[Finding]:
    root = trees.root_commit(work)
    made: dict[tuple[str, ...], str] = {}
    for patch in series.patches():
        if failure := trees.try_patch(work, patch):
            return [Finding(pin.name, patch.name, *failure)]  # the rest stands on this one
    found = [
        Finding(pin.name, again.name, "export-differs", "re-export gives other bytes")
        for again in export.patches_of(pin, work)
        if again.name not in series.files or again.content != series.patch(again.name).content
    ]
    made[tuple(series.order)] = trees.head_tree(work)
    for model in series.models:
        names = tuple(series.of(model))
        if names not in made:
            git.run(work, "checkout", "-q", "--detach", root)
            for patch in series.patches(model):
                if failure := trees.try_patch(work, patch):
                    found.append(
                        Finding(pin.name, patch.name, failure[0], f"{model}: {failure[1]}")
                    )
                    break
            made[names] = trees.head_tree(work)
        recorded = (pin.trees or {}).get(model)
        if made[names] != recorded:
            detail = f"tree {made[names]}, recorded {recorded}"
            found.append(Finding(pin.name, model, "tree-differs", detail))
    return found


def _remedy(workspace: Workspace, finding: Finding) -> str:
    """The command that repairs a finding, or shows what has to be repaired."""
    upstream = finding.upstream
    if finding.reason == "index-differs":
        return f"python {word(workspace.root / 'scripts' / 'patch_index.py')} --write"
    if finding.reason == "tree-differs":
        return f"samebits patch export {upstream} --record"
    if finding.reason in ("header-invalid", "proof-stale"):
        return f"samebits patch apply {upstream} --edit"
    return f"git -C {word(workspace.root)} diff {word(f'patches/{upstream}')}"


def raise_for(workspace: Workspace, findings: list[Finding]) -> None:
    """Bad input before difference before staleness; nothing when nothing was found."""
    for kinds, error in ((_BAD_INPUT, Refused), (_DIFFERENT, Different), (_STALE, NotObserved)):
        hits = [finding for finding in findings if finding.reason in kinds]
        if hits:
            raise error(
                kinds[hits[0].reason],
                seen=f"{len(hits)} finding(s), first: {hits[0].patch} {hits[0].detail}",
                required="none",
                hint=_remedy(workspace, hits[0]),
            )


# --- against another release ----------------------------------------------------------------


def drift(workspace: Workspace, pin: Pin, against: str, model: str | None = None) -> list[Finding]:
    """Which patches still apply to `against` (an sdist, a folder or a version), and why not.

    One finding for each patch that does not start from the very blobs it was made for; patches
    after it are tried on what could be applied. `pin-moved` heads the list where the release is
    another one; alone it means that every patch applies as it is. Of a folder only the files that
    the patches touch, and its `PKG-INFO`, are read, so that nothing else there moves the pin.
    """
    series = Series(workspace, pin.name)
    patches = series.patches(model)
    found: list[Finding] = []
    with _scratch(workspace, pin) as work:
        if moved := _take(workspace, pin, patches, against, work):
            found.append(Finding(pin.name, "", "pin-moved", moved))
        for patch in patches:
            if reason := _drift_of(work, patch):
                found.append(Finding(pin.name, patch.name, *reason))
            found += _header_findings(workspace, pin, patch, None)
    return found


def _drift_of(work: Path, patch: Patch) -> tuple[str, str] | None:
    failure = trees.try_patch(work, patch)
    if failure is None or failure[0] == "export-differs":
        return failure
    if failure[0] == "preimage-changed":
        if _applies(work, patch, "--reverse"):
            return "already-upstream", "the release holds the change"
        refusal = trees.am(work, patch)
        if refusal is None:
            return "preimage-changed", f"applies, but {failure[1]}"
        failure = ("context-changed", refusal)
    missing = [b.path for b in patch.blobs if b.before and not git.blob(work, "HEAD", b.path)]
    detail = f"{missing[0]} is gone" if missing else failure[1]
    return "context-changed", detail


def _applies(work: Path, patch: Patch, *options: str) -> bool:
    try:
        git.run(work, "apply", "--check", *options, "-", stdin=patch.diff.encode())
    except git.GitFailed:
        return False
    return True


def _take(
    workspace: Workspace, pin: Pin, patches: list[Patch], against: str, work: Path
) -> str | None:
    """Make `work` a repository of one commit that holds the other release; how the pin moved."""
    path = Path(against)
    if path.is_dir():
        if (path / ".git").exists():
            _check_touched(pin, path, patches, lambda name: git.blob(path, "HEAD", name))
            work.mkdir()
            git.take(path, work, f"{pin.distribution}, from a checkout")
        else:
            _check_touched(pin, path, patches, lambda name: os.path.lexists(path / name))
            return _copy_touched(pin, path, patches, work)
    else:
        if path.is_file():
            _unpack(path, work)
        elif re.fullmatch(r"\d+(\.\w+)+", against):
            _unpack(_other_release(workspace, pin, against), work)
        else:
            raise Refused(
                "SB0104",
                seen=f"{against} is no file, folder or version",
                required="an sdist, a source folder or a version of " + pin.distribution,
                hint="samebits patch drift --help",
            )
        git.init(work)
        git.commit_all(work, f"{pin.distribution} {path.name}")
    tree = trees.head_tree(work)
    return None if tree == pin.tree else f"tree {tree}, pinned {pin.tree}"


def _check_touched(
    pin: Pin, folder: Path, patches: list[Patch], holds: Callable[[str], object]
) -> None:
    """Refuse, before anything is copied, a folder with no file that the patches change."""
    changed = [path for path, before in trees.first_blobs(patches).items() if before]
    if changed and not any(map(holds, changed)):
        raise Refused(
            "SB0125",
            seen=f"{folder} has none of the {len(changed)} files that the patches change",
            required=f"a source folder of {pin.distribution}, with {changed[0]} or another of them",
            hint=f"ls {word(folder)}",
        )


def _copy_touched(pin: Pin, folder: Path, patches: list[Patch], work: Path) -> str | None:
    """Commit the files that the patches touch; says which of them, or what version, is another."""
    work.mkdir()
    git.init(work)
    wanted = trees.first_blobs(patches)
    for name in wanted:
        if os.path.lexists(folder / name):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / name, work / name, follow_symlinks=False)
    git.commit_all(work, f"{pin.distribution} {folder.name}")
    info = folder / "PKG-INFO"
    text = info.read_text(errors="replace") if info.is_file() else ""
    version = re.search(r"^Version: (\S+)", text, re.MULTILINE)
    if version and version[1] != pin.version:
        return f"version {version[1]}, pinned {pin.version}"
    moved = [name for name, blob in wanted.items() if git.blob(work, "HEAD", name) != blob]
    return f"{moved[0]} is another file than that of {pin.version}" if moved else None


def _unpack(sdist: Path, work: Path) -> None:
    try:
        trees.unpack(sdist, work)
    except (tarfile.TarError, EOFError) as error:
        raise Refused(
            "SB0105", seen=f"{sdist}: {error}", required="an sdist", hint=f"tar tzf {word(sdist)}"
        ) from None


def _other_release(workspace: Workspace, pin: Pin, version: str) -> Path:
    """The sdist of another version, checked against the hash that the index names."""
    command = f"samebits patch drift {pin.name} --against {word(version)}"
    with workspace.lock(f"sdist-{pin.name}"):
        offered = fetch.find(pin.distribution, version)
        target = workspace.build / "sdist" / offered.filename
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(target.name + ".part")
            fetch.download(workspace, offered, part, None, command)
            part.replace(target)
        digest = fetch.sha256(target)
        if offered.sha256 and digest != offered.sha256:
            with contextlib.suppress(OSError):
                target.unlink()
            raise Refused(
                "SB0105",
                seen=f"{target.name}: sha256 {digest}",
                required=f"sha256 {offered.sha256} (as the index says)",
                hint=command,
            )
        return target


def raise_for_drift(workspace: Workspace, findings: list[Finding]) -> None:
    """Different where any patch needs work; a header or proof problem as in `raise_for`."""
    moved = [f for f in findings if f.patch and f.reason not in ("header-invalid", "proof-stale")]
    if moved:
        raise Different(
            "SB0120",
            seen=f"{len(moved)} patch(es), first: {moved[0].patch}: {moved[0].reason}",
            required="every patch on the very file it was made for",
            hint=f"samebits patch apply {moved[0].upstream} --edit",
        )
    raise_for(workspace, findings)
