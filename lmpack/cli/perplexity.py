"""lmpack perplexity: how well a model predicts a text."""

from __future__ import annotations

from dataclasses import asdict, replace

import click

from lmpack.cli.engine_options import EngineOptions, engine_options_with
from lmpack.cli.path_argument import PackPath
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import print_json
from lmpack.cli.text_input import TextPath, read_text
from lmpack.plural import counted

DEFAULT_CONTEXT = 512  # llama.cpp's


@click.command(
    epilog="""Example:

\b
  lmpack perplexity qwen3.lmpack wiki.test.raw --context 512
"""
)
@click.argument("pack", type=PackPath())
@click.argument("file", type=TextPath())
@click.option("--chunks", type=click.IntRange(min=1), help="Score only the first N chunks.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@engine_options_with(context=f"Tokens of a chunk. Default: {DEFAULT_CONTEXT}.")
def command(pack: str, file: str, chunks: int | None, as_json: bool, engine_options: EngineOptions) -> None:
    """Perplexity of PACK's model on the text in FILE, scored as llama.cpp does.

    The text is cut into chunks of --context tokens; the second half of each is scored, given what is before it.
    """
    from runtime.perplexity import measure_perplexity

    text = read_text(file)
    context = engine_options.context or DEFAULT_CONTEXT
    with replace(engine_options, context=context).load(pack) as engine:
        token_ids = engine.tokenizer.encode(text)
        total = min(len(token_ids) // context, chunks or len(token_ids))
        with progress_bar(total, unit="chunk", description="perplexity") as progress:
            result = measure_perplexity(engine, token_ids, context, num_chunks=chunks, progress=progress)
        if as_json:
            print_json({**asdict(result), "stats": engine.stats().to_json()})
        else:
            click.echo(
                f"perplexity {result.perplexity:.4f} +/- {result.standard_error:.4f} "
                f"({counted(result.num_tokens, 'token')}, {counted(result.num_chunks, 'chunk')} of {result.context_length})"
            )
