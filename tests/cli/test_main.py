import errno
import os
import shlex
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
        "bundle",
        "contract",
        "prove",
        "trace",
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
    shown = "".join(capsys.readouterr())
    assert "Usage: samebits" in shown
    assert shown.startswith("SB1009 ") == bool(args)  # without a word there is nothing wrong


# --- streams ---

COMMANDS = {
    "env": ("env", "--json"),
    "case": ("case", "list", "--json"),
    "table": ("case", "list"),
    "explain": ("explain",),
    "help": ("--help",),
    "measure": ("measure", "{dump}"),
}


def shell(line, tmp_path, name):
    """A command through a shell that redirects; (exit code, stdout, stderr)."""
    dump = tmp_path / "dump.jsonl"
    dump.write_text('{"rollout_logprobs": [-1.5], "trainer_logprobs": [-1.25]}\n')
    words = [word.format(dump=dump) for word in COMMANDS[name]]
    command = line.replace("COMMAND", shlex.join([sys.executable, "-m", "samebits", *words]))
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_output_is_an_error_with_an_id(tmp_path, name):
    code, _, err = shell("COMMAND >/dev/full", tmp_path, name)
    assert (code, err[:7]) == (2, "SB1008 ")
    assert "Traceback" not in err and err.count("SB1008") == 1


@pytest.mark.parametrize("name", ["env", "measure"])
def test_a_closed_output_is_an_error_with_an_id(tmp_path, name):
    code, _, err = shell("COMMAND >&-", tmp_path, name)
    assert (code, err[:7]) == (2, "SB1008 ")
    assert "Traceback" not in err


@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full", "<&-"])
def test_other_streams_do_not_move_the_exit_code(tmp_path, stream):
    code, out, _ = shell(f"COMMAND {stream}", tmp_path, "measure")
    assert code == 1 and "DIFFERENT" in out
    code, out, _ = shell(f"COMMAND --no-such-option {stream}", tmp_path, "measure")
    assert (code, out) == (2, "")


def test_a_table_whose_reader_left_is_interrupted(tmp_path):
    line = "{ sleep 1; COMMAND; echo code $? >&2; } | true"
    assert shell(line, tmp_path, "table")[2] == "code 130\n"


@pytest.mark.parametrize(
    ("number", "error_id"), [("ENOSPC", "SB0107"), ("EFBIG", "SB0107"), ("EROFS", "SB0123")]
)
def test_a_full_disk_is_no_internal_error(verb, capsys, number, error_id):
    def fail():
        raise OSError(getattr(errno, number), "full")

    verb(fail)
    assert cli.run(["probe"]) == 2
    assert capsys.readouterr().err.startswith(error_id)


def test_a_terminated_run_removes_its_scratch_folders(tmp_path):
    code = (
        "import sys, tempfile, time, types, typer\nfrom samebits import cli\n"
        "def probe():\n"
        "    with tempfile.TemporaryDirectory(dir=sys.argv[2]):\n"
        "        print('made', flush=True)\n"
        "        time.sleep(60)\n"
        "app = typer.Typer()\napp.command()(lambda folder: probe())\n"
        "sys.modules['samebits.cli.probe'] = types.SimpleNamespace(app=app)\n"
        "cli.VERBS['probe'] = ('probe', '')\ncli.main()"
    )
    command = [sys.executable, "-c", code, "probe", str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "made\n"
    child.terminate()
    assert child.wait(30) == 130
    assert child.stderr.read() == "interrupted; run the same command again to go on\n"
    assert list(tmp_path.iterdir()) == []


def test_reader_that_leaves_early():
    code = (
        "import sys, types, typer\nfrom samebits import cli\napp = typer.Typer()\n"
        "app.command()(lambda: [print('x' * 1000) for _ in range(1000)] and None)\n"
        "sys.modules['samebits.cli.probe'] = types.SimpleNamespace(app=app)\n"
        "cli.VERBS['probe'] = ('probe', '')\nsys.argv = ['samebits', 'probe']\ncli.main()"
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
