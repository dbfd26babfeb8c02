"""lmpack perplexity: how well a model predicts a text."""

from __future__ import annotations

from dataclasses import asdict

import click

from lmpack.cli.engine_options import EngineOptions, engine_options
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import print_json
from lmpack.cli.text_input import read_text


@click.command(
    epilog="""Example:

\b
  lmpack perplexity qwen3.lmpack wiki.test.raw --context 512
"""
)
@click.argument("pack", type=click.Path(exists=True))
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--chunks", type=click.IntRange(min=1), help="Score only the first N chunks.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@engine_options
def command(pack: str, file: str, chunks: int | None, as_json: bool, engine_options: EngineOptions) -> None:
    """Perplexity of PACK's model on the text in FILE, scored as llama.cpp does.

    Chunks of --context tokens (default 512), the second half of each scored.
    """
    from runtime.perplexity import measure_perplexity

    text = read_text(file)
    context = engine_options.context or 512
    with engine_options.with_context(context).load(pack) as engine:
        token_ids = engine.tokenizer.encode(text)
        total = min(len(token_ids) // context, chunks or len(token_ids))
        with progress_bar(total, unit="chunk", description="perplexity") as progress:
            result = measure_perplexity(engine, token_ids, context, num_chunks=chunks, progress=progress)
        if as_json:
            print_json({**asdict(result), "stats": engine.stats().to_json()})
        else:
            click.echo(
                f"perplexity {result.perplexity:.4f} +/- {result.standard_error:.4f} "
                f"({result.num_tokens} tokens, {result.num_chunks} chunks of {result.context_length})"
            )
