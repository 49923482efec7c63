"""Pages that are not whole are named."""

import pytest

from samebits.casework import writeup


def test_the_template_is_not_a_write_up(toy):
    found = writeup.problems(toy.recipe)
    assert any("recipe.md: 7 placeholders" in text for text in found)
    assert any("broke.md: 7 placeholders" in text for text in found)


def test_whole_pages_have_no_problem(toy):
    toy.write_up()
    assert writeup.problems(toy.recipe) == []


@pytest.mark.parametrize(
    ("page", "old", "new", "seen"),
    [
        ("recipe.md", "samebits prove toy", "samebits prove other", "Run it"),
        ("recipe.md", "- Much.", "", "not shown"),
        ("recipe.md", "| needs | a core |", "", "needs"),
        ("broke.md", "- **Cause**: order.", "", "Cause"),
        ("broke.md", "test_gemm.py", "test_absent.py", "no file"),
        ("broke.md", "## gemm: rows", "gemm: rows", "no section"),
        ("broke.md", "a hook", "<patch or hook>", "placeholder"),
        ("recipe.md", "a core", "MEMORY, MINUTES", "2 placeholders left, first MEMORY"),
        ("recipe.md", "- Much", "```\nLASTLINES\n```\n\n- Much", "first LASTLINES"),
        ("recipe.md", "Much.", "TODO", "first TODO"),
        ("broke.md", "order.", "WHY.", "first WHY"),
    ],
)
def test_what_is_missing_is_said(toy, page, old, new, seen):
    toy.write_up()
    path = toy.folder / page
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert seen in " ".join(writeup.problems(toy.recipe))


def test_words_of_the_field_are_no_placeholders(toy):
    toy.write_up()
    page = toy.folder / "recipe.md"
    words = (
        "CUDA, README, NCCL, AVX2, EQUAL, NOT_OBSERVED, SB0609 and `TMPDIR`; X86_64, TP, RL, GPU."
    )
    command = "OMP_NUM_THREADS=2 samebits prove toy --record"
    text = page.read_text().replace("Much.", words).replace("samebits prove toy", command)
    page.write_text(text)
    assert writeup.problems(toy.recipe) == []


def test_a_case_without_news_links_to_the_one_that_had_them(toy):
    toy.write_up()
    page = toy.folder / "broke.md"
    page.write_text("# toy\n\n## Nothing new\n\nSee somewhere.\n")
    assert "no link" in " ".join(writeup.problems(toy.recipe))
    page.write_text("# toy\n\n## Nothing new\n\nSee [qwen3-tiny](../qwen3-tiny/broke.md).\n")
    assert writeup.problems(toy.recipe) == []
