"""Header lint: the template passes, and each rule has an input that breaks it."""

from pathlib import Path

import pytest
from toy_project import MESSAGE, PATCH, SUBJECT

from samebits.patching.header import TRAILERS, ZERO_FROM, Patch, lint, slug

TEMPLATE = Path(__file__).parents[2] / "patches" / "TEMPLATE.txt"
DIFF = f"""diff --git a/toy/a.py b/toy/a.py
index {"1" * 40}..{"2" * 40} 100644
--- a/toy/a.py
+++ b/toy/a.py
@@ -1 +1 @@
-old
+new
"""


def patch(message: str, name: str | None = None, diff: str = DIFF, head: str = ZERO_FROM) -> Patch:
    subject, _, body = message.partition("\n\n")
    content = (
        f"{head}\nFrom: A <a@b>\nDate: Sat, 1 Jan 2000 00:00:00 +0000\n"
        f"Subject: {subject}\n\n{body}\n{diff}"
    )
    return Patch(name or f"{slug(subject)}.patch", content)


GOOD = MESSAGE.format(subject=SUBJECT)


def test_template_passes():
    assert lint(patch(TEMPLATE.read_text()), "v0.24.0") == []


def test_good_message_passes():
    assert lint(patch(GOOD), "v1.0") == []
    assert patch(GOOD).name == PATCH


def test_parts():
    parsed = patch(GOOD)
    assert [p.split()[0] for p in parsed.paragraphs] == ["Mismatch:", "Change:", "Why"]
    assert list(parsed.trailers) == list(TRAILERS)
    blob = parsed.blobs[0]
    assert (blob.path, blob.before, blob.after) == ("toy/a.py", "1" * 40, "2" * 40)
    assert parsed.changed_lines == 2


def test_folded_subject_and_trailer():
    folded = GOOD.replace("the builder takes", "the builder\n takes")
    assert lint(patch(folded), "v1.0") == []
    text = patch(GOOD).content.replace("partitions from", "partitions\n from")
    assert Patch(PATCH, text).subject == SUBJECT


def test_created_and_deleted_files():
    diff = (
        f"diff --git a/n.py b/n.py\nnew file mode 100644\nindex {'0' * 40}..{'2' * 40}\n"
        f"--- /dev/null\n+++ b/n.py\n@@ -0,0 +1 @@\n+new\n"
    )
    assert patch(GOOD, diff=diff).blobs[0].before is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("attn: take", "misc: take", "is not `AREA: INTENT`"),
        ("attn: take", "take", "is not `AREA: INTENT`"),
        ("contract\n\nMis", "contract.\n\nMis", "full stop"),
        (SUBJECT, "attn: " + "word " * 14 + "end", "characters, at most 72"),
        (SUBJECT, "attn: " + "word " * 10 + "end", "characters before .patch, at most 48"),
        ("Mismatch: ", "", "paragraphs are"),
        ("Change: ", "Mismatch: ", "paragraphs are"),
        (
            "Why a patch: The length is a local constant that no option reaches.\n\n",
            "",
            "paragraphs",
        ),
        ("The length is a local constant that no option reaches.", "So.", "says nothing"),
        ("The length is", "x" * 90, "has a line over"),
        ("Patch-Class: hook", "Patch-Class: idea", "`Patch-Class: idea`"),
        ("Patch-Class: hook\n", "", "`Patch-Class` is missing"),
        ("Patch-Class: hook", "Patch-Class: hook\nPatch-Class: hook", "given 2 times"),
        ("Patch-Class: hook", "Patch-Class: backport", "names the full commit id"),
        ("Origin: samebits", "Origin: samebits\nReviewed-by: X <x@y>", "unknown trailer"),
        ("Origin: samebits", "Origin: samebits\nloose words", "not a trailer"),
        ("Contract: attention.partition", "Contract: Attention!", "`Contract: Attention!`"),
        ("Contract: attention.partition", "Contract: none", "for a gate, fix or backport"),
        ("Switch: SAMEBITS_ARITHMETIC (default aligned)", "Switch: none", "for a gate, fix"),
        ("Switch: SAMEBITS_ARITHMETIC (default aligned)", "Switch: ON", "`Switch: ON`"),
        ("rollout, after worker start", "rollout", "`Runs-In: rollout`"),
        ("Proof: tests/test_toy.py::test_equal", "Proof: tried it", "`Proof: tried it`"),
        ("Cost: not measured", "Cost: negligible", "`Cost: negligible`"),
        ("not-yet (no contract upstream)", "not-yet", "`Upstream-Status: not-yet`"),
        ("not-yet (no contract upstream)", "accepted v2", "`Upstream-Status: accepted v2`"),
        ("Refreshed: v1.0 2026-01-31", "Refreshed: v1.0", "`Refreshed: v1.0`"),
        ("Refreshed: v1.0 2026-01-31", "Refreshed: v0.9 2026-01-31", "the pin is v1.0"),
        ("Full Name <name@example.org>", "Full Name", "`Signed-off-by: Full Name`"),
        ("Decode and", "D\u00e9code and", "outside ASCII"),
        ("places, so that\n", "places, so that \n", "trailing space"),
        ("their bits differ", "---\ntheir bits differ", "git reads as the start"),
    ],
)
def test_rule(old: str, new: str, said: str):
    assert old in GOOD
    wrong = lint(patch(GOOD.replace(old, new, 1)), "v1.0")
    assert any(said in line for line in wrong), wrong


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "attn-other.patch"}, "its subject says"),
        ({"head": "From 1234 Mon Sep 17 00:00:00 2001"}, "first line is not"),
        ({"diff": ""}, "holds no diff"),
        ({"diff": DIFF.replace("1" * 40, "1111111")}, "no full-length blob ids"),
        ({"diff": DIFF + "GIT binary patch\n"}, "binary"),
        ({"diff": DIFF + "+more\n" * 60}, "over 60 needs a reason"),
    ],
)
def test_file_rule(changes: dict, said: str):
    wrong = lint(patch(GOOD, **changes), "v1.0")
    assert any(said in line for line in wrong), wrong


def test_long_patch_with_a_reason():
    reason = GOOD.replace("no option reaches.", "no option\nreaches; the lines are a table.")
    assert lint(patch(reason, diff=DIFF + "+more\n" * 60), "v1.0") == []


@pytest.mark.parametrize("content", ["", "\n", "\n\n", "From x\n\nbody", "diff --git a/a b/b\n"])
def test_no_patch_at_all(content: str):
    assert lint(Patch("x.patch", content), "v1.0")
