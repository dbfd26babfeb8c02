"""End of generation: which tokens end an answer, told by their texts where a file does not list them.

The texts and the exceptions are llama.cpp's (llama_vocab::load, build 11549), so that a model stops at the same
tokens whichever engine runs it and whichever container it comes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Mapping
    from collections.abc import Set as AbstractSet

_END_TEXTS = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT>
_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
<|ifm|im_end|>
"""
END_TEXTS = frozenset(_END_TEXTS.split())

# fill-in-the-middle tokens, by the GGUF key that may name them; they are control tokens whatever their kind says
FILL_TEXTS: Mapping[str, frozenset[str]] = {
    name: frozenset(texts.split(" "))
    for name, texts in {
        "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
        "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
        "fim_sep": "<|file_sep|> <|plamo:file_separator|>",
        "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> "
        "<|plamo:fim_prefix|>",
        "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> "
        "<|plamo:fim_suffix|>",
        "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|> "
        "<|plamo:fim_middle|>",
    }.items()
}
# padding, the next repository and the next file end a completion; prefix, suffix and middle do not
FILL_ENDS = ("fim_pad", "fim_rep", "fim_sep")


def is_channel_end(texts: Container[str]) -> bool:
    """Say whether <|end|> ends only a channel of an answer: so it does beside <|return|> and <|call|>."""
    has_call = "<|call|>" in texts or "<|calls|>" in texts
    return has_call and ("<|return|>" in texts or "<|flush|>" in texts)


def is_plain_tag(ids: Mapping[str, int], eog_ids: Container[int]) -> bool:
    """Say whether </s> is an HTML tag like any other; so it is in Gemma 4 and PLaMo, which end by other tokens."""
    return any(text in ids and ids[text] in eog_ids for text in ("<|tool_response>", "<|plamo:eos|>"))


def end_ids_by_text(ids: Mapping[str, int], known_ids: AbstractSet[int] = frozenset()) -> frozenset[int]:
    """Return the ids of the tokens that end a generation, for a vocabulary given as text -> id.

    known_ids are those that a file names; they count too, and decide about the two texts with a second meaning.
    """
    found = {ids[text] for text in END_TEXTS if text in ids} | known_ids
    for name in FILL_ENDS:
        found.update(sorted(ids[text] for text in FILL_TEXTS[name] if text in ids)[:1])
    if "<|end|>" in ids and is_channel_end(ids):
        found.discard(ids["<|end|>"])
    if "</s>" in ids and is_plain_tag(ids, found):
        found.discard(ids["</s>"])
    return frozenset(found)
