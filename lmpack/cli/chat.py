"""lmpack chat: talk to a model."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import click

from lmpack.cli.engine_options import EngineOptions, engine_options
from lmpack.cli.path_argument import PackPath
from lmpack.cli.run import echo_text, stream_answer
from lmpack.cli.sampling_options import sampling_options, sampling_params
from lmpack.cli.text_input import Text, check_utf8
from lmpack.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HELP = "/clear forgets the talk; Ctrl-C stops an answer; /exit or Ctrl-D leaves"

TICK_S = 0.1


@click.command(
    epilog="""Examples:

\b
  lmpack chat qwen3.lmpack
  lmpack chat qwen3.lmpack --system "You are brief." --temperature 0.7 --ram 8GiB
  echo "What is the capital of France?" | lmpack chat qwen3.lmpack
"""
)
@click.argument("pack", type=PackPath())
@click.option("--system", type=Text(), help="A system message before the first turn.")
@click.option("--stats", is_flag=True, help="Say at the end what ran, how fast, and what the cache did.")
@sampling_options
@engine_options
def command(
    pack: str, system: str | None, stats: bool, sampling: dict[str, Any], engine_options: EngineOptions
) -> None:
    """Talk to the model in PACK, one line a turn; a pasted text of several lines is one turn.

    /clear forgets the talk and /help lists what else there is. Ctrl-C stops an answer, and what was said of it
    stays part of the talk. /exit or Ctrl-D leaves.
    """
    params = sampling_params(sampling)
    messages = [{"role": "system", "content": system}] if system else []
    is_watched = sys.stdin.isatty()
    with engine_options.load(pack) as engine:
        from runtime.chat_template import encode_chat

        kv = engine.new_kv()
        if is_watched:
            click.echo(HELP, err=True)
        for line in _typed_turns() if is_watched else _piped_turns():
            if line == "/help":
                click.echo(HELP, err=True)
                continue
            if line == "/clear":
                del messages[1 if system else 0 :]
                continue
            messages.append({"role": "user", "content": line})
            try:
                check_utf8(line)
                prompt_ids = encode_chat(engine.tokenizer, messages)
                with _ctrl_c_asks() if is_watched else nullcontext(lambda: False) as should_stop:
                    _, answer, _ = stream_answer(engine, prompt_ids, params, echo_text, kv, should_stop)
            except UsageError as error:
                messages.pop()
                click.echo(f"{error}; this turn is dropped (/clear forgets the talk before it)", err=True)
                continue
            messages.append({"role": "assistant", "content": answer})
            click.echo()
        if stats:
            click.echo(engine.stats().describe(), err=True)


def _piped_turns() -> Iterator[str]:
    """The lines of stdin that are not blank, up to its end or /exit."""
    for line in sys.stdin:
        turn = line.strip()
        if turn == "/exit":
            return
        if turn:
            yield turn


def _typed_turns() -> Iterator[str]:
    """What a person types, with a line to edit and a history where Python has readline."""
    with suppress(ImportError):
        import readline  # noqa: F401 (input() uses it from now on)
    while True:
        try:
            with _ctrl_c_ends_the_wait():
                turn = _ask().strip()
        except EOFError:
            click.echo(err=True)
            return
        except KeyboardInterrupt:  # drops the line, as shells do
            click.echo(err=True)
            continue
        if turn == "/exit":
            return
        if turn:
            yield turn


def _ask() -> str:
    if sys.stdout.isatty():
        return input("> ")  # readline must know the prompt
    click.echo("> ", nl=False, err=True)
    return input()


@contextmanager
def _ctrl_c_ends_the_wait() -> Iterator[None]:
    """Let an interrupt end the wait for a key that comes after Python's last look for one and before the wait.

    It would be heard at the next key only. A clock interrupts the wait, and then Python looks again.
    """
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _ctrl_c_asks() -> Iterator[Callable[[], bool]]:
    """Say whether Ctrl-C was pressed inside the block; pressed again, it interrupts as ever.

    The answer ends with a whole token then, and the talk goes on.
    """
    is_asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal is_asked
        is_asked = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: is_asked
    finally:
        signal.signal(signal.SIGINT, before)
