"""Run git without the user's configuration, identity, hooks, attributes or locale."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path

from samebits.errors import Refused, word

NAME, EMAIL, DATE = "samebits", "samebits@localhost", "2000-01-01T00:00:00+0000"
# Bytes in the archive are bytes in the tree: no line-end, keyword or filter conversion, and diffs
# that do not depend on attributes an upstream ships.
ATTRIBUTES = "* -text -ident !filter !diff !merge !working-tree-encoding\n"
# By-products of running a tree; everything else that is not tracked counts as an edit.
BY_PRODUCTS = (
    "__pycache__/ *.pyc *.nbi *.nbc .pytest_cache/ .ruff_cache/ .mypy_cache/".split()  # noqa: SIM905
)

_SETTINGS = (
    "core.autocrlf=false",
    "core.fileMode=true",
    "core.symlinks=true",
    "core.hooksPath=/dev/null",
    "core.attributesFile=/dev/null",
    "core.excludesFile=/dev/null",
    "core.fsmonitor=false",
    "core.quotePath=false",
    "commit.gpgSign=false",
    "gc.auto=0",
    "diff.algorithm=myers",
    "diff.noprefix=false",
    "diff.mnemonicPrefix=false",
    "am.threeWay=false",
    "advice.detachedHead=false",
    "init.defaultBranch=main",
)


class GitFailed(Refused):
    """A git command ended with a non-zero status; `message` is what it said."""

    @property
    def message(self) -> str:
        """What git said."""
        return self.seen


def environment() -> dict[str, str]:
    """Environment of every git call: no user configuration, fixed identity and dates."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env.update(
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_SYSTEM=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
        GIT_ATTR_NOSYSTEM="1",
        GIT_TERMINAL_PROMPT="0",
        GIT_OPTIONAL_LOCKS="0",
        GIT_AUTHOR_NAME=NAME,
        GIT_AUTHOR_EMAIL=EMAIL,
        GIT_AUTHOR_DATE=DATE,
        GIT_COMMITTER_NAME=NAME,
        GIT_COMMITTER_EMAIL=EMAIL,
        GIT_COMMITTER_DATE=DATE,
        LC_ALL="C",
        TZ="UTC",
    )
    return env


def run(folder: Path, *args: str, stdin: bytes | None = None) -> bytes:
    """Output of `git -C folder args`; raises `GitFailed`."""
    settings = [word for s in _SETTINGS for word in ("-c", s)]
    try:
        done = subprocess.run(
            ["git", *settings, "-C", str(folder), *args],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            env=environment(),
        )
    except FileNotFoundError:
        raise Refused(
            "SB0103",
            seen="git is not installed",
            required="git 2.34 or newer",
            hint="apt-get install git",
        ) from None
    if done.returncode:
        text = (done.stderr + done.stdout).decode(errors="replace").strip()
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            if os.strerror(code) in text or (
                code == errno.EFBIG and done.returncode == -signal.SIGXFSZ
            ):
                raise OSError(code, os.strerror(code), str(folder))
        raise GitFailed(
            "SB0103",
            seen=text,
            required=f"`git {args[0]}` to succeed",
            hint=f"git -C {word(folder)} status",
        )
    return done.stdout


def text(folder: Path, *args: str, stdin: bytes | None = None) -> str:
    """Output of a git command, decoded and stripped."""
    return run(folder, *args, stdin=stdin).decode().strip()


def init(folder: Path) -> None:
    """An empty repository in `folder` that stores bytes as they are."""
    run(folder, "init", "-q")
    info = folder / ".git" / "info"
    info.mkdir(exist_ok=True)
    (info / "attributes").write_text(ATTRIBUTES)
    (info / "exclude").write_text("".join(f"{line}\n" for line in BY_PRODUCTS))


def commit_all(folder: Path, message: str) -> str:
    """Commit every file, ignored ones too; returns the tree id."""
    run(folder, "add", "--all", "--force", ".")
    run(folder, "commit", "-q", "--allow-empty", "--no-verify", "-m", message)
    return text(folder, "rev-parse", "HEAD^{tree}")


def take(checkout: Path, folder: Path, message: str) -> str:
    """Make `folder` a repository whose one commit has the tree of the checkout's HEAD; its commit.

    Objects are copied, not archived: `export-ignore` in an upstream's attributes drops nothing.
    """
    init(folder)
    source = f"file://{checkout.resolve()}"
    run(folder, "fetch", "-q", "--depth=1", "--no-tags", source, "HEAD")
    commit = text(folder, "rev-parse", "FETCH_HEAD")
    run(folder, "read-tree", "-u", "--reset", "FETCH_HEAD")
    run(folder, "commit", "-q", "--allow-empty", "--no-verify", "-m", message)
    return commit


def blob(folder: Path, commit: str, path: str) -> str | None:
    """Blob id of `path` in `commit`, or None where it has no such file."""
    listed = text(folder, "ls-tree", commit, "--", path)
    return listed.split()[2] if listed else None


def edits(folder: Path) -> list[str]:
    """Paths whose content differs from HEAD, or that HEAD lacks; by-products of running aside."""
    changed = text(folder, "diff", "--name-only", "--no-ext-diff", "HEAD")
    # An ignored file can shadow a module, so the upstream's own ignore rules are not asked.
    extra = text(folder, "ls-files", "--others", *(f"--exclude={line}" for line in BY_PRODUCTS))
    return sorted({*changed.splitlines(), *extra.splitlines()})
