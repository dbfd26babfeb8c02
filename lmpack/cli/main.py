"""The frame of the command line: finds a command, runs it, and turns errors into one line and an exit code.

It imports a command's module when that command is named, and nothing heavier than click before.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

import click

from lmpack import __version__
from lmpack.errors import LmpackError

if TYPE_CHECKING:
    from collections.abc import Sequence

# name -> what `lmpack --help` says; each is `command` in the module lmpack.cli.NAME
COMMANDS = {
    "convert": "Make a pack from a GGUF or safetensors checkpoint.",
    "export": "Give the source files back, byte for byte.",
    "validate": "Check a pack against its manifest.",
    "inspect": "Show what a pack or a checkpoint holds.",
    "profile": "Record which experts a set of prompts uses.",
    "run": "Continue a text.",
    "chat": "Talk to a model.",
    "perplexity": "Score a text as llama.cpp's tool does.",
    "tokenize": "Show a text's token ids and pieces.",
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

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a reader that went away ends it without a word."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _discard_stdout()
            ctx.exit(EXIT_BROKEN_PIPE)
        return result


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: lmpack demo",
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
        code = cli.main(list(args) or ["--help"], prog_name="lmpack", standalone_mode=False)
    except LmpackError as error:
        return _fail(str(error), error.exit_code)
    except click.UsageError as error:
        asked = error.ctx.command_path if error.ctx else "lmpack"
        return _fail(f"{error.format_message()} (see: {asked} --help)", error.exit_code)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except OSError as error:  # the operating system refused something the user named
        if error.errno is None:
            raise
        return _fail(f"{error.filename or 'lmpack'}: {error.strerror}", LmpackError.exit_code)
    return code if isinstance(code, int) else 0


def main() -> None:
    """The `lmpack` command."""
    # torch's and ggml's idle threads would spin against each other: 50 times slower where another program runs
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _replace_closed_streams()
    sys.exit(run(sys.argv[1:]))


def _replace_closed_streams() -> None:
    """A caller may close our standard streams; nothing is read from such a one and what it is told is lost."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until we exit)


def _fail(message: str, exit_code: int) -> int:
    """Print the one line of an error; names from a checkpoint cannot send control codes to the terminal."""
    line = "".join(char if char.isprintable() else " " for char in message)
    click.echo(f"lmpack: error: {line}", err=True)
    return exit_code


def _discard_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot fail."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
