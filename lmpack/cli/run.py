"""lmpack run: continue a prompt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from lmpack.cli.engine_options import EngineOptions, engine_options
from lmpack.cli.path_argument import PackPath
from lmpack.cli.report import print_json
from lmpack.cli.sampling_options import sampling_options, sampling_params
from lmpack.cli.text_input import Text, TextPath, text_or_file
from lmpack.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.engine import Engine
    from runtime.generated_token import GeneratedToken
    from runtime.kv_cache import KVCache
    from runtime.sampler import SamplingParams


@click.command(
    epilog="""Examples:

\b
  lmpack run qwen3.lmpack -p "Once upon a time" -n 64
  lmpack run qwen3.lmpack -p "Once upon a time" --ram 8GiB --stats
  lmpack run qwen3.lmpack -f prompt.txt --temperature 0.7 --min-p 0.05 --seed 1
  lmpack run qwen3.lmpack -p "The capital of France is" -n 1 --logprobs 5 --json
"""
)
@click.argument("pack", type=PackPath())
@click.option("-p", "--prompt", type=Text(), help="The text to continue.")
@click.option(
    "-f", "--file", type=TextPath(), help="Read the prompt from a file, or from - (standard input)."
)
@click.option(
    "--chat", is_flag=True, help="Put the prompt into the model's chat template, as a user's message."
)
@click.option("--no-bos", is_flag=True, help="Do not put the start token before the prompt.")
@click.option("--parse-special", is_flag=True, help="Read <|special|> tokens in the prompt as such.")
@click.option("--ignore-eos", is_flag=True, help="Go on where the model would stop.")
@click.option(
    "--logprobs",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Needs --json: the N best log-probabilities of each token.",
)
@click.option("--stats", is_flag=True, help="Say at the end what ran, how fast, and what the cache did.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a stream of text.")
@sampling_options
@engine_options
def command(
    pack: str,
    prompt: str | None,
    file: str | None,
    chat: bool,
    no_bos: bool,
    parse_special: bool,
    ignore_eos: bool,
    logprobs: int,
    stats: bool,
    as_json: bool,
    sampling: dict[str, Any],
    engine_options: EngineOptions,
) -> None:
    """Continue a prompt with the model in PACK; text streams to stdout."""
    if logprobs and not as_json:
        raise UsageError("--logprobs is part of the JSON document; add --json")
    params = sampling_params(sampling, logprobs=logprobs, ignore_eos=ignore_eos)
    text = text_or_file(prompt, file)
    with engine_options.load(pack) as engine:
        if chat:
            from runtime.chat_template import encode_chat

            prompt_ids = encode_chat(engine.tokenizer, [{"role": "user", "content": text}])
        else:
            prompt_ids = engine.tokenizer.encode(text, add_special=not no_bos, parse_special=parse_special)
        generated, answer, ended_by = stream_answer(
            engine, prompt_ids, params, _no_echo if as_json else echo_text
        )
        if as_json:
            print_json(_document(engine, prompt_ids, generated, answer, ended_by))
        else:
            click.echo()
        if stats:
            click.echo(engine.stats().describe(), err=True)


def stream_answer(
    engine: Engine,
    prompt_ids: list[int],
    params: SamplingParams,
    echo: Callable[[str], None],
    kv: KVCache | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[list[GeneratedToken], str, str]:
    """Generate, echo the text as it becomes final, and return the tokens, the whole text, and what ended it.

    That is "end" (the model's end token), "stop" (a stop string), "length" (max_tokens), "context" (it is full), or
    "interrupt": `should_stop` is asked after each token, and an answer that was stopped is whole up to that token.
    """
    from runtime.text_stream import TextStream

    stream = TextStream(engine.tokenizer, stop=params.stop)
    generated, pieces = [], []
    ended_by = "end"
    for token in engine.generate(prompt_ids, params, kv):
        generated.append(token)
        pieces.append(stream.push(token.token_id))
        echo(pieces[-1])
        if stream.stopped or should_stop():
            ended_by = "stop" if stream.stopped else "interrupt"
            break
    else:
        if len(generated) == params.max_tokens:
            ended_by = "length"
        elif len(prompt_ids) + len(generated) > engine.plan.context_length:
            ended_by = "context"
    pieces.append(stream.finish())
    echo(pieces[-1])
    if ended_by == "context":
        click.echo(f"\nthe context of {engine.plan.context_length} tokens (--context) is full", err=True)
    return generated, "".join(pieces), ended_by


def echo_text(text: str) -> None:
    """Write to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _no_echo(text: str) -> None:
    pass


def _document(
    engine: Engine, prompt_ids: list[int], generated: list[GeneratedToken], answer: str, ended_by: str
) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt_ids,
        "token_ids": [token.token_id for token in generated],
        "text": answer,
        "ended_by": ended_by,
        "logprobs": [token.logprob for token in generated],
        "top_logprobs": [
            [{"token_id": token_id, "logprob": logprob} for token_id, logprob in token.top_logprobs]
            for token in generated
        ],
        "stats": engine.stats().to_json(),
    }
