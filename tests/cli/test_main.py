import os
import signal
import subprocess
import sys
import types

import pytest
import typer

from samebits import cli
from samebits.errors import Different, NotObserved, Refused

FIELDS = {"seen": "a", "required": "b", "hint": "samebits explain"}


@pytest.fixture
def verb(monkeypatch):
    """Install a verb `probe` that calls the given function."""

    def install(function):
        app = typer.Typer()
        app.command()(function)
        monkeypatch.setitem(sys.modules, "samebits.cli.probe", types.SimpleNamespace(app=app))
        monkeypatch.setitem(cli.VERBS, "probe", ("probe", "A test."))

    return install


def test_verbs_are_these():
    assert list(cli.VERBS) == [
        "patch",
        "contract",
        "prove",
        "reproduce",
        "verify",
        "rl",
        "case",
        "plan",
        "bench",
        "measure",
        "doctor",
        "explain",
        "env",
    ]


@pytest.mark.parametrize("name", cli.VERBS)
def test_every_verb_has_help(name, capsys):
    assert cli.run([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"samebits {name}" in shown
    assert "install-completion" not in shown


def test_help_names_every_verb_and_imports_none_of_them():
    code = (
        "import sys; from samebits.cli import run; status = run(['--help'])\n"
        "heavy = {'torch', 'numba', 'vllm', 'numpy', 'transformers'} & set(sys.modules)\n"
        "verbs = [m for m in sys.modules if m.startswith('samebits.cli.')]\n"
        "assert not heavy and not verbs, (heavy, verbs); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in cli.VERBS)


def test_no_colour_where_it_is_not_wanted():
    done = subprocess.run(
        [sys.executable, "-m", "samebits", "contract", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1", "FORCE_COLOR": "1"},
    )
    assert done.returncode == 0
    assert "\x1b[3" not in done.stdout


def test_version(capsys):
    from samebits import __version__

    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"samebits {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Refused("SB0705", **FIELDS), 2),
        (Different("SB0705", **FIELDS), 1),
        (NotObserved("SB0705", **FIELDS), 3),
        (KeyboardInterrupt(), 130),
        (EOFError(), 130),
        (ValueError("odd"), 4),
        (OSError("disk"), 4),
        (typer.Exit(3), 3),
        (typer.BadParameter("no"), 2),
    ],
)
def test_exit_codes(verb, capsys, error, code):
    def fail():
        raise error

    verb(fail)
    assert cli.run(["probe"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    if isinstance(error, Refused | Different | NotObserved):
        assert err.startswith("SB0705 ")
        assert "\n\nhint: samebits explain\n" in err
    if code == 4:
        assert str(error) in err
        assert "hint: samebits env" in err


def test_a_command_that_returns_is_done(verb):
    verb(lambda: None)
    assert cli.run(["probe"]) == 0


@pytest.mark.parametrize("args", [["mesure"], ["verify"], ["explain", "--no-such-option"], []])
def test_usage_errors(args, capsys):
    assert cli.run(args) == 2
    assert "Usage: samebits" in "".join(capsys.readouterr())


def test_reader_that_leaves_early():
    code = (
        "import sys, types, typer\nfrom samebits import cli\napp = typer.Typer()\n"
        "app.command()(lambda: [print('x' * 1000) for _ in range(1000)] and None)\n"
        "sys.modules['samebits.cli.probe'] = types.SimpleNamespace(app=app)\n"
        "cli.VERBS['probe'] = ('probe', '')\nsys.exit(cli.run(['probe']))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=-1)
    child.stdout.read(10)
    child.stdout.close()
    assert child.wait(30) == 130
    assert b"Traceback" not in child.stderr.read()


def test_ctrl_c_says_how_to_go_on(tmp_path):
    pipe = tmp_path / "dump.jsonl"
    os.mkfifo(pipe)
    child = subprocess.Popen(
        [sys.executable, "-m", "samebits", "measure", str(pipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with pipe.open("w"):  # opens once the verb reads, which then waits for a line
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130
    assert (out, err) == ("", "interrupted; run the same command again to go on\n")
