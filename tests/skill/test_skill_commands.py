"""Every command that a guide quotes exists, with its options; cheap ones are run as they stand.

`CASE`, `MODEL`, `N` and other words in capitals stand for a value of the reader's. `# last line:`
below a command is what it prints last, `...` for what varies.
"""

from __future__ import annotations

import functools
import re
import shlex
import shutil
from dataclasses import dataclass

import pytest
import skills
import typer
from quoted import ROOT, inline, problem

from samebits import cli
from samebits.errors import EXIT_DIFFERENT, EXIT_EQUAL, EXIT_NOT_OBSERVED

# What placeholders stand for; a case with evidence and a contract.
VALUES = {
    "CASE": "smollm2-135m",
    "MODEL": "smollm2-135m",
    "N": "0",
    "UPSTREAM": "vllm",
    "VERSION": "0.25.0",
    "ID": "SB0309",
    "NAME": "x",
    "FOLDER": "x",
    "FILE": "config.json",
}
# Verbs that read files only, each with the exit codes of a sound checkout. Evidence may be stale
# and a contract behind its sources while somebody works; that is no fault of a guide.
CHEAP = {
    "samebits case list": (EXIT_EQUAL,),
    "samebits case show": (EXIT_EQUAL,),
    "samebits case status": (EXIT_EQUAL, EXIT_DIFFERENT, EXIT_NOT_OBSERVED),
    "samebits contract show": (EXIT_EQUAL,),
    "samebits contract diff": (EXIT_EQUAL, EXIT_DIFFERENT),
    "samebits explain": (EXIT_EQUAL,),
    "samebits plan": (EXIT_EQUAL,),
    "samebits verify": (EXIT_EQUAL, EXIT_NOT_OBSERVED),
}
# Run by `test_proving_and_locating`, which has a case of its own.
PROVING = ("samebits prove CASE --quick", "samebits prove CASE --quick --locate N")
CONFIG = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
"intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 8,
"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
"rms_norm_eps": 1e-05, "rope_theta": 100000, "tie_word_embeddings": true, "hidden_act": "silu",
"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
"""


@dataclass(frozen=True)
class Quoted:
    """One command of an `sh` block, and the last line that the page promises."""

    page: str
    command: str
    last: str | None

    @property
    def filled(self) -> str:
        """The command with a value for every placeholder."""
        return re.sub(r"\b[A-Z]+\b(?!=)", lambda m: VALUES.get(m[0], m[0]), self.command)


def commands_of(page: str, text: str) -> list[Quoted]:
    """Commands of the `sh` blocks of a page, in order."""
    found: list[Quoted] = []
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            promised = re.match(r"# last line: (.*)", line)
            if promised:
                found[-1] = Quoted(page, found[-1].command, promised[1])
            elif line.strip() and not line.startswith("#"):
                found.append(Quoted(page, line.strip(), None))
    return found


@functools.cache
def quoted() -> list[Quoted]:
    pages = sorted(skills.SKILLS.rglob("*.md"))
    return [
        command
        for page in pages
        for command in commands_of(str(page.relative_to(skills.SKILLS)), page.read_text())
    ]


def promised(last: str, output: str) -> bool:
    """Whether the last line of an output is the promised one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    pattern = ".*".join(re.escape(part) for part in last.split("..."))
    return bool(lines) and re.fullmatch(pattern, lines[-1]) is not None


def parsed(command: str) -> None:
    """Parse a `samebits` command as typer would before it calls it; raises what typer raises."""
    words = shlex.split(command)[1:]
    group = cli._group()
    context = typer.Context(group, info_name="samebits")
    _, found, rest = group.resolve_command(context, words)
    while hasattr(found, "commands"):
        context = typer.Context(found, info_name=words[0], parent=context)
        _, found, rest = found.resolve_command(context, rest)
    found.make_context(found.name, list(rest), parent=context)


def cheap(command: str) -> tuple[int, ...] | None:
    return next((codes for verb, codes in CHEAP.items() if f"{command} ".startswith(verb)), None)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the files that commands name."""
    (tmp_path / "config.json").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)


def test_guides_quote_commands_and_promise_lines():
    assert len(quoted()) > 30
    assert sum(command.last is not None for command in quoted()) > 5


@pytest.mark.parametrize("command", quoted(), ids=lambda c: f"{c.page}: {c.command}")
def test_a_quoted_command_exists(command, here):
    assert problem(command.filled) is None
    if command.filled.startswith("samebits "):
        parsed(command.filled)


@pytest.mark.parametrize("page", sorted(skills.SKILLS.rglob("*.md")), ids=lambda p: p.name)
def test_commands_in_sentences_exist(page):
    spans = [span for span in inline(page.read_text()) if span.startswith(("samebits ", "make "))]
    wrong = {
        span: why
        for span in spans
        if not re.search(r"\.\.\.|\|", span)
        if (why := problem(Quoted("", span, None).filled, prose=True)) is not None
    }
    assert not wrong


@pytest.mark.parametrize(
    "command",
    [c for c in dict.fromkeys(quoted()) if cheap(c.command)],
    ids=lambda c: f"{c.page}: {c.command}",
)
def test_a_cheap_command_runs_as_it_stands(command, here, capsys):
    codes = cheap(command.command)
    assert codes is not None
    code = cli.run(shlex.split(command.filled)[1:])
    shown = capsys.readouterr()
    assert code in codes, shown.out + shown.err
    if command.last and code == EXIT_EQUAL:
        last = Quoted("", command.last, None).filled
        assert promised(last, shown.out), shown.out


def test_links_into_a_tool_are_made(tmp_path, monkeypatch):
    (command,) = {c.command for c in quoted() if "skills.py link" in c.command}
    monkeypatch.setattr("sys.argv", [*shlex.split(command)[1:-1], str(tmp_path / "skills")])
    assert skills.main() == 0
    assert len(list((tmp_path / "skills").iterdir())) == 5


@pytest.mark.engine
@pytest.mark.slow
def test_proving_and_locating(tmp_path, capsys):
    """The two commands of a hunt, on a copy of a small case with a contract of present sources."""
    from samebits import recipe as recipes
    from samebits.contract import build
    from samebits.patching.workspace import Workspace

    name = "commands-of-the-guides"
    folder = tmp_path / name
    folder.mkdir()
    text = recipes.find("qwen3-tiny").read_text()
    (folder / "recipe.yaml").write_text(text.replace("case: qwen3-tiny", f"case: {name}"))
    build.write(build.build(recipes.load(folder)), folder / "contract.json")
    try:
        for command in PROVING:
            (last,) = {c.last for c in quoted() if c.command == command and c.last}
            words = shlex.split(
                Quoted("", command, None).filled.replace(VALUES["CASE"], str(folder))
            )
            code = cli.run(words[1:])
            shown = capsys.readouterr()
            assert code == EXIT_EQUAL, shown.out + shown.err
            last = last.replace("CASE", "..." if "--locate" in command else name)
            assert promised(Quoted("", last, None).filled, shown.out), shown.out
    finally:
        for made in ("runs", "models"):
            shutil.rmtree(Workspace.find().build / made / name, ignore_errors=True)


@pytest.mark.parametrize(
    ("last", "output", "right"),
    [
        ("CASE: ...", "a\nCASE: EQUAL\n\n", True),
        ("x ... y", "x 1 of 2 y\n", True),
        ("x ... y", "x 1 of 2 z\n", False),
        ("EQUAL", "EQUAL\nnote\n", False),
        ("EQUAL", "", False),
    ],
)
def test_what_counts_as_the_promised_line(last, output, right):
    assert promised(last, output) is right


def test_commands_are_read_with_their_last_lines():
    text = (
        "```sh\nmake setup\n# last line: done ...\nsamebits env \\\n  --json\n```\n```\nno\n```\n"
    )
    assert commands_of("p", text) == [
        Quoted("p", "make setup", "done ..."),
        Quoted("p", "samebits env    --json", None),
    ]


@pytest.mark.parametrize(
    "command", ["samebits verify", "samebits verify x --nothing", "samebits shake x"]
)
def test_a_command_that_does_not_parse_is_seen(command):
    with pytest.raises(Exception, match=r"Missing|No such|nothing|shake"):
        parsed(command)


def test_pages_are_part_of_the_repository():
    assert ROOT / "skill" == skills.SKILLS
