"""lmpack chat: talk to a model."""

from __future__ import annotations

import sys
from typing import Any

import click

from lmpack.cli.engine_options import EngineOptions, engine_options
from lmpack.cli.run import echo_text, stream_answer
from lmpack.cli.sampling_options import sampling_options, sampling_params
from lmpack.errors import UsageError


@click.command(
    epilog="""Examples:

\b
  lmpack chat qwen3.lmpack
  lmpack chat qwen3.lmpack --system "You are brief." --temperature 0.7 --ram 8GiB
  echo "What is the capital of France?" | lmpack chat qwen3.lmpack
"""
)
@click.argument("pack", type=click.Path(exists=True))
@click.option("--system", metavar="TEXT", help="A system message before the first turn.")
@click.option("--stats", is_flag=True, help="Say at the end what ran, how fast, and what the cache did.")
@sampling_options
@engine_options
def command(
    pack: str, system: str | None, stats: bool, sampling: dict[str, Any], engine_options: EngineOptions
) -> None:
    """Talk to the model in PACK, one line a turn; /clear forgets the talk, /exit, Ctrl-D or an empty line ends it."""
    params = sampling_params(sampling)
    messages = [{"role": "system", "content": system}] if system else []
    with engine_options.load(pack) as engine:
        from runtime.chat_template import encode_chat

        kv = engine.new_kv()
        while line := _read_turn():
            if line == "/clear":
                del messages[1 if system else 0 :]
                continue
            messages.append({"role": "user", "content": line})
            try:
                prompt_ids = encode_chat(engine.tokenizer, messages)
                _, answer = stream_answer(engine, prompt_ids, params, echo_text, kv)
            except UsageError as error:
                messages.pop()
                click.echo(
                    f"{error}; this turn is dropped, say something shorter or /clear the talk", err=True
                )
                continue
            messages.append({"role": "assistant", "content": answer})
            click.echo()
        if stats:
            click.echo(engine.stats().describe(), err=True)


def _read_turn() -> str:
    """The user's next line, or nothing when they are done."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False, err=True)
    line = sys.stdin.readline().strip()
    return "" if line == "/exit" else line
