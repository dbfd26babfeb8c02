"""Pre-tokenizers: known names cut text as llama.cpp does, unknown names are refused."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from tokenizers import Regex, pre_tokenizers

from lmpack.errors import UnsupportedError
from runtime.pre_tokenizer import PRE_TOKENIZERS, pre_tokenizer_named
from runtime.tokenizer import open_tokenizer
from tests.llamacpp_vocabulary import LlamaCppVocabulary
from tests.make_tokenizer_golden import digest
from tests.tiny_vocabularies import bpe_keys, golden, hard_strings, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

# one name for each different rule
DISTINCT = sorted({pre_tokenizer: name for name, pre_tokenizer in PRE_TOKENIZERS.items()}.values())


def words(name: str, text: str) -> list[str]:
    """A text's words; byte-level ones are given back as they were in the text."""
    return [text[start:end] for _, (start, end) in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)]


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_name_gives_the_tokens_that_llamacpp_gave(name: str, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_gguf(tmp_path / "v.gguf", bpe_keys(golden()["merges"], name)))

    found = [
        [tokenizer.encode(text, add_special=special, parse_special=special) for special in (False, True)]
        for text in hard_strings()
    ]

    assert digest(found) == golden()["digests"][name]


@pytest.mark.parametrize("name", DISTINCT)
def test_every_rule_gives_the_tokens_that_llamacpp_gives(name: str, tmp_path: Path) -> None:
    keys = bpe_keys(golden()["merges"], name)
    path = write_gguf(tmp_path / "v.gguf", keys, with_weights=True)
    tokenizer = open_tokenizer(path)
    texts = [
        "a1234567b 12²345 ",
        " \u2003'LL\u0301x~~\r\n\n  Ab漢字ab",
        "𐐀Ж1'S\u200dक्षि\u3000。",
        "x=1;\t\ty\n",
    ]

    with LlamaCppVocabulary(path) as oracle:
        for text in texts:
            ids = tokenizer.encode(text)
            assert ids == oracle.tokenize(text, add_special=True, parse_special=False), repr(text)
            for remove_special in (False, True):
                expected = oracle.detokenize(ids, remove_special=remove_special, unparse_special=True)
                assert tokenizer.decode(ids, remove_special=remove_special) == expected.decode(
                    errors="replace"
                )
        assert tokenizer.adds_bos == oracle.adds_bos


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UnsupportedError, match=r"m\.gguf: pre-tokenizer 'klingon' is not known; known are: .*qwen2"
    ):
        pre_tokenizer_named("klingon", "m.gguf")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'LL don't 1234  x", ["I", "'", "LL", " don", "'t", " 1234", " ", " x"]),
        ("qwen2", "I'LL don't 1234  x", ["I", "'LL", " don", "'t", " ", "1", "2", "3", "4", " ", " x"]),
        ("llama-bpe", "I'LL 1234567!\n\nx", ["I", "'LL", " ", "123", "456", "7", "!\n\n", "x"]),
        ("gpt-4o", "fooBar's HTTPServer", ["foo", "Bar's", " HTTPServer"]),
        ("gpt-4o", "страННо", ["страННо"]),
        ("deepseek-v3", "x=foo(1234)", ["x", "=foo", "(", "123", "4", ")"]),
        ("default", "a12345 $x", ["a", "123", "45", " ", "$", "x"]),
        ("starcoder", "a12", ["a", "1", "2"]),
        ("kimi-k2", "abc漢字def", ["abc", "漢字", "def"]),
        ("afmoe", "a1234567 12", ["a", "1", "234", "567", " ", "12"]),
        ("bloom", "Hello, world  x", ["Hello", ",", " world", " ", " x"]),
    ],
)
def test_well_known_rules_cut_where_their_models_were_trained_to(
    name: str, text: str, expected: list[str]
) -> None:
    assert words(name, text) == expected


def test_contractions_fold_only_ascii_case() -> None:
    assert words("qwen2", "a'ſ") == ["a", "'ſ"]
    assert words("llama-bpe", "x'S") == ["x", "'S"]


def test_characters_of_unicode_16_are_no_letters_because_llamacpp_does_not_know_them() -> None:
    garay_letter, todhri_letter = "\U00010d50", "\U000105c0"

    assert words("gpt-2", f"a{garay_letter}b") == ["a", garay_letter, "b"]
    assert words("gpt-2", f" {todhri_letter}é") == [f" {todhri_letter}", "é"]


def test_the_library_knows_the_unicode_version_that_the_rules_are_written_for() -> None:
    every_character = "".join(map(chr, [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]))

    def count(character_class: str) -> int:
        split = pre_tokenizers.Split(Regex(character_class), "removed")
        kept = sum(end - start for _, (start, end) in split.pre_tokenize_str(every_character))
        return len(every_character) - kept

    # Unicode 16.0's numbers; another version needs another list of characters to leave out
    assert {name: count(rf"\p{{{name}}}") for name in "LMN"} == {"L": 141028, "M": 2501, "N": 1911}


@pytest.mark.parametrize("name", [name for name in DISTINCT if name != "superbpe"])
@pytest.mark.parametrize("unit", ["a", "aB", " ", "\n", "1", "漢", "!", "\u0301", " a", "1a"])
def test_the_time_for_a_long_run_is_not_quadratic(name: str, unit: str) -> None:
    text = unit * (30_000 // len(unit))

    pieces = PRE_TOKENIZERS[name].build().pre_tokenize_str(text)  # a quadratic rule takes minutes over all

    assert pieces[-1][1][1] == len(text)
