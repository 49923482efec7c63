"""A patch file: its message, its trailers, the blobs it names; and the lint of its header."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# Closed: a new area is a decision, not a spelling.
AREAS = "act attn comm config embed gemm logprob moe norm rope sched ssm weights".split()  # noqa: SIM905
SUBJECT_MAX, STEM_MAX, LINE_MAX, TRAILER_MAX, CHANGED_MAX = 72, 48, 80, 160, 60
PARAGRAPHS = ("Mismatch:", "Change:", "Why a patch:")
ZERO_FROM = f"From {'0' * 40} Mon Sep 17 00:00:00 2001"
_NO_SWITCH = ("gate", "fix", "backport")
_DATE = r"\d{4}-\d{2}-\d{2}"

# name -> (pattern of the value, what to write)
TRAILERS = {
    "Patch-Class": (r"hook|gate|fix|backport", "hook, gate, fix or backport"),
    "Origin": (r"\S.*", "an author, or an upstream commit URL with its full id"),
    "Contract": (r"none|[a-z0-9_.-]+(, [a-z0-9_.-]+)*", "contract clause ids"),
    "Switch": (
        r"none|SAMEBITS_[A-Z_]+ \(default [^)]+\)",
        "`SAMEBITS_NAME (default VALUE)`; `none` for a gate, fix or backport only",
    ),
    "Runs-In": (
        r"(rollout|trainer|both), (before|after) worker start",
        "`rollout|trainer|both, before|after worker start`",
    ),
    "Proof": (r"tests/\S+\.py::\w+.*", "`tests/FILE.py::TEST`"),
    "Cost": (r"not measured|.*\d.*", "a measured figure with its hardware, or `not measured`"),
    "Upstream-Status": (
        rf"submitted \S+ {_DATE}|accepted \S+ \S+|not-yet \(.+\)|denied \S+ \(.+\)|never \(.+\)",
        "`submitted URL DATE`, `accepted RELEASE COMMIT`, `not-yet (REASON)`, "
        "`denied URL (REASON)` or `never (REASON)`",
    ),
    "Remove-When": (r"\S.*", "a condition that a stranger can check"),
    "Refreshed": (rf"\S+ {_DATE}", "`TAG DATE` of the last real review"),
    "Signed-off-by": (r"[^<>]+ <[^<>@\s]+@[^<>\s]+>", "`Name <address>`"),
}


@dataclass(frozen=True)
class Blob:
    """One file of a patch: its path, and its blob ids before and after (None = absent)."""

    path: str
    before: str | None
    after: str | None


def slug(subject: str) -> str:
    """File name stem of a subject: lower case words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")


@dataclass(frozen=True)
class Patch:
    """One `.patch` file. `name` is its file name."""

    name: str
    content: str

    @classmethod
    def read(cls, path: Path) -> Patch:
        """The patch of a file."""
        return cls(path.name, path.read_bytes().decode("utf-8", errors="replace"))

    @cached_property
    def _parts(self) -> tuple[list[str], str, str]:
        head, _, rest = self.content.partition("\n\n")
        body, mark, diff = rest.partition("\ndiff --git ")
        return head.split("\n"), body, mark.lstrip("\n") + diff

    @cached_property
    def subject(self) -> str:
        """Subject line, unfolded; empty where there is none."""
        lines = self._parts[0]
        for i, line in enumerate(lines):
            if line.startswith("Subject: "):
                folded = [line[9:]]
                for more in lines[i + 1 :]:
                    if not more.startswith(" "):
                        break
                    folded.append(more.strip())
                return " ".join(folded)
        return ""

    @property
    def stem(self) -> str:
        """File name without `.patch`."""
        return self.name.removesuffix(".patch")

    @cached_property
    def paragraphs(self) -> list[str]:
        """Paragraphs of the body without the trailers."""
        return [p for p in re.split(r"\n\s*\n", self._parts[1].strip()) if p.strip()][:-1]

    @cached_property
    def trailer_lines(self) -> list[str]:
        """Lines of the last paragraph, continuation lines joined to their first."""
        blocks = [p for p in re.split(r"\n\s*\n", self._parts[1].strip()) if p.strip()]
        lines: list[str] = []
        for line in blocks[-1].splitlines() if blocks else []:
            if line.startswith((" ", "\t")) and lines:
                lines[-1] += " " + line.strip()
            else:
                lines.append(line)
        return lines

    @cached_property
    def trailers(self) -> dict[str, str]:
        """Trailers by name; of one that repeats, the last."""
        pairs = (line.partition(": ") for line in self.trailer_lines)
        return {key: value for key, mark, value in pairs if mark}

    @property
    def diff(self) -> str:
        """The diffs of all files."""
        return self._parts[2]

    @cached_property
    def blobs(self) -> list[Blob]:
        """Blob ids before and after, for each changed file."""
        found = []
        for block in re.split(r"^diff --git ", self.diff, flags=re.M)[1:]:
            index = re.search(r"^index ([0-9a-f]{40})\.\.([0-9a-f]{40})", block, re.M)
            path = re.match(r"a/(.+?) b/", block)
            if not index or not path:
                continue
            before, after = (None if set(i) == {"0"} else i for i in index.groups())
            found.append(Blob(path.group(1), before, after))
        return found

    @property
    def paths(self) -> list[str]:
        """Changed files."""
        return [blob.path for blob in self.blobs]

    @cached_property
    def changed_lines(self) -> int:
        """Lines added and removed."""
        return sum(
            line[:1] in "+-" and not line.startswith(("+++ ", "--- "))
            for line in self.diff.splitlines()
            if line
        )


def lint(patch: Patch, tag: str | None = None) -> list[str]:
    """What is wrong with the header of `patch`; an empty list when nothing is.

    `tag` is the pin's tag, which `Refreshed` has to name.
    """
    wrong: list[str] = []
    head, body, diff = patch._parts
    if not patch.content.isascii():
        wrong.append("holds characters outside ASCII")
    if "\r" in patch.content.split("\ndiff --git ")[0]:
        wrong.append("header has carriage returns")
    if head[0] != ZERO_FROM:
        wrong.append(f"first line is not `{ZERO_FROM}` (write it with `samebits patch export`)")
    if not diff:
        return [*wrong, "holds no diff"]
    wrong += _lint_subject(patch)
    wrong += _lint_paragraphs(patch)
    wrong += _lint_trailers(patch, tag)
    for line in body.splitlines():
        if line != line.rstrip():
            wrong.append(f"trailing space: `{line.strip()[:40]}`")
        if re.match(r"---|diff |Index: |From |>From ", line):
            wrong.append(f"a line that git reads as the start of a diff or mail: `{line[:40]}`")
    blocks = len(re.findall(r"^diff --git ", diff, re.M))
    if "GIT binary patch" in diff or "Binary files " in diff:
        wrong.append("changes a binary file")
    elif len(patch.blobs) != blocks:
        wrong.append("a file has no full-length blob ids, or only its mode or name changes")
    return wrong


def _lint_subject(patch: Patch) -> list[str]:
    wrong = []
    area, mark, intent = patch.subject.partition(": ")
    if not mark or area not in AREAS or not intent:
        wrong.append(
            f"subject `{patch.subject}` is not `AREA: INTENT` with AREA in {', '.join(AREAS)}"
        )
    if len(patch.subject) > SUBJECT_MAX:
        wrong.append(f"subject has {len(patch.subject)} characters, at most {SUBJECT_MAX}")
    if patch.subject.endswith("."):
        wrong.append("subject ends with a full stop")
    if slug(patch.subject) != patch.stem:
        wrong.append(f"file is named {patch.name}, its subject says {slug(patch.subject)}.patch")
    if len(patch.stem) > STEM_MAX:
        wrong.append(
            f"file name has {len(patch.stem)} characters before .patch, at most {STEM_MAX}"
        )
    return wrong


def _lint_paragraphs(patch: Patch) -> list[str]:
    wrong = []
    starts = [next((s for s in PARAGRAPHS if p.startswith(s)), "?") for p in patch.paragraphs]
    if tuple(starts) != PARAGRAPHS:
        wrong.append(f"paragraphs are {starts}, required {list(PARAGRAPHS)}")
    for start, paragraph in zip(starts, patch.paragraphs, strict=True):
        if len(paragraph) < len(start) + 20:
            wrong.append(f"paragraph `{start}` says nothing")
        if any(len(line) > LINE_MAX for line in paragraph.splitlines()):
            wrong.append(f"paragraph `{start}` has a line over {LINE_MAX} characters")
    if patch.changed_lines > CHANGED_MAX and not (
        starts[-1:] == ["Why a patch:"] and "lines" in patch.paragraphs[-1]
    ):
        wrong.append(
            f"changes {patch.changed_lines} lines; over {CHANGED_MAX} needs a reason, naming its "
            "lines, in `Why a patch:`"
        )
    return wrong


def _lint_trailers(patch: Patch, tag: str | None) -> list[str]:
    wrong = []
    names = []
    for line in patch.trailer_lines:
        name, mark, value = line.partition(": ")
        if not mark or not re.fullmatch(r"[A-Z][A-Za-z-]*", name):
            wrong.append(f"not a trailer: `{line[:60]}`")
            continue
        names.append(name)
        if name not in TRAILERS:
            wrong.append(f"unknown trailer `{name}`")
        elif not re.fullmatch(TRAILERS[name][0], value):
            wrong.append(f"`{name}: {value}`: write {TRAILERS[name][1]}")
        if len(line) > TRAILER_MAX:
            wrong.append(f"trailer `{name}` has {len(line)} characters, at most {TRAILER_MAX}")
    wrong += [f"trailer `{name}` is missing" for name in TRAILERS if name not in names]
    wrong += [
        f"trailer `{name}` is given {names.count(name)} times"
        for name in TRAILERS
        if names.count(name) > 1 and name != "Signed-off-by"
    ]
    kind = patch.trailers.get("Patch-Class")
    for name in ("Switch", "Contract"):
        if patch.trailers.get(name) == "none" and kind not in _NO_SWITCH:
            wrong.append(f"`{name}: none` is for a gate, fix or backport only")
    if kind == "backport" and not re.search(r"\b[0-9a-f]{40}\b", patch.trailers.get("Origin", "")):
        wrong.append("a backport's `Origin` names the full commit id")
    refreshed = patch.trailers.get("Refreshed", "").split(" ")[0]
    if tag and refreshed and refreshed != tag:
        wrong.append(f"`Refreshed` names {refreshed}, the pin is {tag}")
    return wrong
