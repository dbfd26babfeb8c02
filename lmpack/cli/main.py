"""The frame of the command line: finds a command, runs it, and turns errors into one line and an exit code.

It imports a command's module when that command is named, and nothing heavier than click before.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

import click
from click.shell_completion import shell_complete

from lmpack import __version__
from lmpack.cli import endings
from lmpack.cli.report import one_line
from lmpack.cli.standard_streams import STANDARD_OUTPUT, drop_refused_output, use_utf8
from lmpack.errors import LmpackError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

# name -> what `lmpack --help` says; each is `command` in the module lmpack.cli.NAME
COMMANDS = {
    "pull": "Get a model from a Hugging Face repository as a pack.",
    "push": "Upload a pack to a Hugging Face repository.",
    "convert": "Make a pack from a GGUF or safetensors checkpoint.",
    "export": "Give the source files back, byte for byte.",
    "validate": "Check a pack against its manifest.",
    "diff": "Say where two packs differ, or two routing profiles.",
    "unpack": "Make the files of a compressed pack mappable again.",
    "inspect": "Show what a pack or a checkpoint holds.",
    "profile": "Record which experts a set of prompts uses.",
    "merge": "Add up routing profiles of one model.",
    "simulate": "Replay a recorded trace through cache policies.",
    "run": "Continue a text.",
    "chat": "Talk to a model.",
    "bench": "Time a pack at one or several memory budgets.",
    "perplexity": "Score a text as llama.cpp's tool does.",
    "tokenize": "Show a text's token ids and pieces.",
    "warm": "Read the hot experts into the page cache.",
    "doctor": "Measure the drive, and say how experts will be read from it.",
    "demo": "Convert, validate, profile and run the embedded demo model.",
}

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


class LazyGroup(click.Group):
    """A group whose help comes from COMMANDS, so that showing it imports no command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order in which a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module; None when there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"lmpack.cli.{cmd_name}").command
        assert isinstance(command, click.Command), f"lmpack.cli.{cmd_name} defines no click command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands from COMMANDS."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""Exit codes: 0 done; 1 a model, a pack, the drive or the memory failed, and one line says how; 2 what was
typed cannot work; 130 interrupted; 141 the reader of a pipe went away; 143 terminated.

Example: lmpack demo""",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Run Mixture-of-Experts models that are larger than memory.

    A checkpoint becomes a pack: one page-aligned file per expert and a manifest. The runtime keeps the
    experts in use in memory and reads the others from the drive when a token needs them.
    """


def run(args: Sequence[str]) -> int:
    """Run one command line without the program's name and return its exit code; errors go to stderr."""
    try:
        exit_code = _invoke(args)
        sys.stdout.flush()
    except LmpackError as error:
        return _fail(str(error), error.exit_code)
    except click.UsageError as error:
        asked = error.ctx.command_path if error.ctx else "lmpack"
        return _fail(f"{error.format_message()} (see: {asked} --help)", error.exit_code)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _say("", EXIT_INTERRUPTED)  # the terminal stands behind a ^C
    except BrokenPipeError:
        drop_refused_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # the operating system refused something the user named, or our output
        if error.errno is None or error.filename is None:
            raise
        from lmpack.drive import advice

        drop_refused_output()
        refused, why = os.fsdecode(error.filename), advice(error)
        if refused == STANDARD_OUTPUT:  # most commands report what they have made, and that appeared whole
            why = f"{why.partition(';')[0]}; the report is lost, what was made before it is there and whole"
        return _fail(f"{refused}: {why}", LmpackError.exit_code)
    return exit_code


def main() -> None:
    """The `lmpack` command."""
    use_utf8()
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.exit(_fail("the current folder has been deleted; change to another one", UsageError.exit_code))
    # torch's and ggml's idle threads would spin against each other: 50 times slower where another program runs
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "_LMPACK_COMPLETE" in os.environ:  # a shell asks how a command line could go on
        sys.exit(shell_complete(cli, {}, "lmpack", "_LMPACK_COMPLETE", os.environ["_LMPACK_COMPLETE"]))
    endings.listen()
    try:
        exit_code = run(sys.argv[1:])
    except KeyboardInterrupt:  # another one, while the first was told
        exit_code = EXIT_INTERRUPTED
    except SystemExit as ended:  # no call here: one looks for signals
        exit_code = ended.code  # type: ignore[assignment]
    endings.leave(exit_code)


def _invoke(args: Sequence[str]) -> int:
    """Parse and run; no arguments ask for the help."""
    try:
        with cli.make_context("lmpack", list(args) or ["--help"]) as ctx:
            cli.invoke(ctx)
    except click.exceptions.Exit as asked:
        return asked.exit_code
    return 0


def _fail(message: str, exit_code: int) -> int:
    """Print the one line of an error; names from a checkpoint cannot send control codes to the terminal."""
    return _say(f"lmpack: error: {one_line(message)}", exit_code)


def _say(line: str, exit_code: int) -> int:
    """Print a line to stderr and return the exit code, which tells the same when nobody can read the line."""
    try:
        click.echo(line, err=True)
    except OSError:
        drop_refused_output()
    return exit_code
