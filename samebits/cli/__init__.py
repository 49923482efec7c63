"""The `samebits` command: its verbs, loaded when used, and its exit codes.

Every verb has the same exit codes (EXIT_CODES) and the same plain form of help. Data goes to
stdout, messages and progress to stderr.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from samebits import __version__, streams
from samebits.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, Refused, SamebitsError

HELP = """Make vLLM and Megatron-core compute the same token log-probabilities, and prove it.

Both engines compute bit-identical values from the same weights; patches, contract and evidence of
each model case say how, and show that it is so. Data goes to stdout, messages and progress to
stderr."""
EXIT_CODES = (
    "Exit codes: 0 equal or done, 1 different, 2 bad input or refused, 3 not observed or stale, "
    "4 internal error, 130 interrupted."
)

# verb -> (module with an `app`, one line of help); a module may hold several verbs.
VERBS = {
    "patch": ("patch", "Build, check, export and compare the patch series."),
    "bundle": ("bundle", "Pack the stack for hosts without a network."),
    "contract": ("contract", "Build, show, compare and admit a case's contract."),
    "prove": ("prove", "Run the gates of a case and write its evidence."),
    "trace": ("trace", "List what both engines run, by region, and what none holds."),
    "reproduce": ("reproduce", "Run a recorded case again and state what came out."),
    "verify": ("evidence", "Recompute the verdict of recorded evidence."),
    "rl": ("rl", "Run a short RL loop and count differing log-probabilities."),
    "case": ("case", "The model cases: status, steps, and a new one."),
    "plan": ("plan", "Say which layouts of a model a contract can cover."),
    "bench": ("bench", "Run the benchmarks, or show the recorded rows."),
    "measure": ("measure", "Say how far two dumps of log-probabilities are apart."),
    "doctor": ("doctor", "Check this machine before a job."),
    "explain": ("evidence", "Say what an error id means."),
    "env": ("env", "Print what decides bits on this machine."),
}

# The base that typer's public `BadParameter` shares with all errors of a command line.
_UsageProblem: Any = typer.BadParameter.__mro__[1]


class _Verbs(TyperGroup):
    """Lists stubs, so that `--help` imports no verb; loads a verb's module when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, _load(name) if name else None, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # typer would leave with 1, which means "different"
            raise RuntimeError("a process at the other end of a pipe has ended") from error
        except KeyboardInterrupt:  # typer would leave with the right code, but without a word
            raise typer.Abort from None


def _load(verb: str) -> Any:
    module = importlib.import_module(f"samebits.cli.{VERBS[verb][0]}")
    module.app.rich_markup_mode = None
    group = typer.main.get_group(module.app)
    commands = group.commands
    for command in (group, *commands.values()):
        command.epilog = EXIT_CODES
    if len(commands) == 1 and module.app.registered_callback is None:
        return next(iter(commands.values()))
    return commands.get(verb, group)


def _print_version(_ctx: Any, _param: Any, value: bool) -> None:
    if value:
        typer.echo(f"samebits {__version__}")
        raise typer.Exit


def _group() -> _Verbs:
    app = typer.Typer(
        cls=_Verbs, no_args_is_help=True, help=HELP, epilog=EXIT_CODES, rich_markup_mode=None
    )

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ) -> None:
        pass

    group = typer.main.get_group(app)
    for verb, (_, text) in VERBS.items():
        group.add_command(TyperCommand(verb, help=text), verb)
    return group  # type: ignore[return-value]


def _misused(error: Any) -> Refused:
    """SB1009, with the usage of the verb whose command line is not understood."""
    context = error.ctx
    command = "samebits" if context is None else context.command_path
    usage = "Usage: samebits VERB" if context is None else context.get_usage()
    return Refused(
        "SB1009",
        seen=error.format_message(),
        required=" ".join(usage.split()),
        hint=" ".join([command, "--help"]),
    )


def run(args: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    try:
        code = _group().main(args=list(args), prog_name="samebits", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except SamebitsError as error:
        streams.tell(str(error))
        return error.exit_code
    except _UsageProblem as error:
        helped = type(error).__name__ == "NoArgsIsHelpError"  # of a group without a verb
        streams.tell(error.format_message() if helped else str(_misused(error)))
        return error.exit_code
    except streams.ReaderLeft:
        return EXIT_INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        streams.tell("interrupted; run the same command again to go on")
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and (known := _refusal(error)):
            streams.tell(str(known))
            return known.exit_code
        lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-4)
        report = "hint: samebits env --json  # and report it with the lines above"
        streams.tell("".join(lines) + f"\n{report}")
        return EXIT_INTERNAL


def _refusal(error: OSError) -> Refused | None:
    from samebits.patching.workspace import refusal

    return refusal(error)


def _end_on_sigterm() -> None:
    """Leave on SIGTERM as on Ctrl-C: what a run made for itself is removed on the way out.

    A process forked from this one dies of the signal at once, as if it had no handler.
    """
    ours = os.getpid()

    def leave(number: int, _frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != ours:
            os.kill(os.getpid(), number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)


def main() -> NoReturn:
    """Entry point of the command `samebits`: exits with the code of `run`."""
    try:
        streams.prepare()
    except Refused as error:
        streams.tell(str(error))
        sys.exit(error.exit_code)
    _end_on_sigterm()
    sys.exit(run(sys.argv[1:]))
