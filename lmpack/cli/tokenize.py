"""lmpack tokenize: show a text's token ids and pieces."""

from __future__ import annotations

import click

from lmpack.cli.path_argument import ModelPath
from lmpack.cli.report import print_json
from lmpack.cli.text_input import Text, TextPath, text_or_file


@click.command(
    epilog="""Examples:

\b
  lmpack tokenize qwen3.lmpack -p "Hello world"
  lmpack tokenize qwen3-Q4_K_M.gguf -f book.txt --json
  lmpack tokenize Qwen3-30B-A3B/ -p "<|im_start|>user" --parse-special --no-bos
"""
)
@click.argument("source", metavar="PACK_OR_SRC", type=ModelPath())
@click.option("-p", "--prompt", type=Text(), help="The text.")
@click.option("-f", "--file", type=TextPath(), help="Read the text from a file, or from - (standard input).")
@click.option("--no-bos", is_flag=True, help="Leave out the tokens that the model wants around a text.")
@click.option("--parse-special", is_flag=True, help="Read <|special|> tokens in the text as such.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON document: ids, pieces, and the pieces' bytes in hex."
)
def command(
    source: str, prompt: str | None, file: str | None, no_bos: bool, parse_special: bool, as_json: bool
) -> None:
    """Show how the tokenizer of PACK_OR_SRC cuts a text, one token a line.

    PACK_OR_SRC is a pack, a GGUF file (a vocabulary without weights is enough), or a folder of either container.
    """
    from runtime.tokenizer import open_tokenizer

    text = text_or_file(prompt, file)
    tokenizer = open_tokenizer(source)
    ids = tokenizer.encode(text, add_special=not no_bos, parse_special=parse_special)
    if as_json:
        print_json(
            {
                "ids": ids,
                "pieces": [tokenizer.piece(i) for i in ids],
                "bytes": [tokenizer.token_bytes(i).hex() for i in ids],  # a part of a character is no text
            }
        )
        return
    for token_id in ids:
        click.echo(f"{token_id:>8}  {_shown(tokenizer.token_bytes(token_id))}")


def _shown(raw: bytes) -> str:
    r"""A piece on one line: 'text' as Python writes it, or bytes where they are no whole characters."""
    try:
        return repr(raw.decode())
    except UnicodeDecodeError:
        return repr(raw)
