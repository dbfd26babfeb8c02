"""Tokenizers made from GGUF metadata: their tokens are llama.cpp's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st

from converters.gguf_header import read_gguf_header
from lmpack.errors import CheckpointError, UnsupportedError, UsageError
from lmpack.pack import Pack
from runtime.tokenizer import load_tokenizer, open_tokenizer
from tests.llamacpp_vocabulary import LlamaCppVocabulary
from tests.tiny_vocabularies import bpe_keys, golden, hard_strings, sentencepiece_keys, write_gguf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from runtime.tokenizer import Tokenizer

KINDS = ("gpt-2", "qwen2", "llama-bpe", "sentencepiece")


def keys_of(kind: str, **others: Any) -> dict[str, Any]:
    """The metadata of a tiny vocabulary."""
    if kind == "sentencepiece":
        return sentencepiece_keys(golden()["pieces"], golden()["scores"], **others)
    return bpe_keys(golden()["merges"], kind, **others)


def assert_equal_to_llamacpp(path: Path, texts: Sequence[str]) -> None:
    """Compare tokens, texts, pieces and ends of generation of a GGUF's vocabulary."""
    tokenizer = open_tokenizer(path)
    with LlamaCppVocabulary(path) as oracle:
        assert tokenizer.vocab_size == oracle.vocab_size
        assert tokenizer.eog_ids == oracle.eog_ids()
        assert tokenizer.adds_bos == oracle.adds_bos
        assert [tokenizer.token_bytes(i) for i in range(oracle.vocab_size)] == [
            oracle.piece(i) for i in range(oracle.vocab_size)
        ]
        for text in texts:
            for add_special in (False, True):
                for parse_special in (False, True):
                    ids = tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
                    expected = oracle.tokenize(text, add_special=add_special, parse_special=parse_special)
                    assert ids == expected, f"{text!r}, {add_special=}, {parse_special=}"
                    shows = {"remove_special": add_special, "unparse_special": parse_special}
                    assert tokenizer.decode(ids, **shows) == oracle.detokenize(ids, **shows).decode(
                        errors="replace"
                    )


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """One of the four kinds of vocabulary."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def tokenizer(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny vocabulary of that kind, from a GGUF without weights."""
    return open_tokenizer(write_gguf(tmp_path_factory.mktemp(kind) / "vocabulary.gguf", keys_of(kind)))


def test_hard_strings_give_the_tokens_that_llamacpp_gave(kind: str, tokenizer: Tokenizer) -> None:
    assert len(hard_strings()) >= 200
    for text, (plain, special) in zip(hard_strings(), golden()["answers"][kind], strict=True):
        assert tokenizer.encode(text, add_special=False) == plain, repr(text)
        assert tokenizer.encode(text, parse_special=True) == special, repr(text)


def test_hard_strings_give_the_tokens_that_llamacpp_gives(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "v.gguf", keys_of(kind), with_weights=True)

    assert_equal_to_llamacpp(path, hard_strings())


def test_the_demo_models_vocabulary_gives_llamacpps_tokens(demo_gguf: Path) -> None:
    assert_equal_to_llamacpp(demo_gguf, hard_strings())


def test_every_familys_vocabulary_gives_llamacpps_tokens(models_dir: Path) -> None:
    for path in sorted((models_dir / "families").glob("*/*-bf16.gguf")):
        assert_equal_to_llamacpp(path, hard_strings()[::7])


def test_a_pack_has_its_sources_tokenizer(demo_gguf: Path, demo_pack: Path) -> None:
    packed, source = load_tokenizer(Pack.open(demo_pack)), open_tokenizer(demo_gguf)

    assert [packed.encode(text) for text in hard_strings()] == [
        source.encode(text) for text in hard_strings()
    ]
    assert packed.eog_ids == source.eog_ids
    assert packed.chat_template == source.chat_template


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(
    kind: str, tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text, add_special=False)
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)

    if kind == "sentencepiece":  # which writes a space as ▁, and one in front
        assert (
            joined == text.replace("\u2581", " ").encode()
            or joined[1:] == text.replace("\u2581", " ").encode()
        )
    else:
        assert joined == text.encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\ud83d", r"character 1 is the lone surrogate U\+D83D"),
        ("\udc80", r"character 0 is the lone surrogate U\+DC80"),
    ],
)
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tokenizer.encode(text)


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(UsageError, match=rf"token id {token_id}: the vocabulary has ids 0 to"):
            tokenizer.token_bytes(token_id)


def test_the_start_token_comes_when_the_file_or_its_pre_tokenizer_says_so(tmp_path: Path) -> None:
    says_nothing = open_tokenizer(write_gguf(tmp_path / "a.gguf", keys_of("qwen2")))
    says_yes = open_tokenizer(
        write_gguf(tmp_path / "b.gguf", keys_of("qwen2", add_bos_token=True, add_eos_token=True))
    )
    llama = open_tokenizer(write_gguf(tmp_path / "c.gguf", keys_of("llama-bpe")))
    says_no = open_tokenizer(write_gguf(tmp_path / "d.gguf", keys_of("llama-bpe", add_bos_token=False)))

    assert says_nothing.encode("") == []
    assert says_yes.encode("") == [says_yes.bos_id, says_yes.eos_id]
    assert llama.encode("") == [llama.bos_id]
    assert says_no.encode("") == []


def test_special_tokens_in_a_text_are_text_unless_asked_for(kind: str, tokenizer: Tokenizer) -> None:
    text = "a<|im_start|>b"
    (im_start,) = {i for i in tokenizer.encode(text, parse_special=True) if tokenizer.is_special(i)} - {
        tokenizer.bos_id
    }

    assert tokenizer.piece(im_start) == "<|im_start|>"
    assert im_start not in tokenizer.encode(text)


@pytest.mark.parametrize(
    "others",
    [
        {"add_space_prefix": False},
        {"add_eos_token": True, "add_bos_token": False},
        {"scores": None},
    ],
)
def test_sentencepiece_flags_mean_what_they_mean_to_llamacpp(others: dict[str, Any], tmp_path: Path) -> None:
    keys = {key: value for key, value in (keys_of("sentencepiece") | others).items() if value is not None}
    path = write_gguf(tmp_path / "v.gguf", keys, with_weights=True)

    assert_equal_to_llamacpp(path, [*hard_strings()[::3], "<s> a<mask>  b </s>"])


def test_phi_3_tokens_swallow_the_space_behind_them(tmp_path: Path) -> None:
    keys = keys_of("sentencepiece")
    keys["tokens"] = [*keys["tokens"], "<|endoftext|>"]
    keys["token_type"] = [*keys["token_type"], TokenType.CONTROL]
    keys["scores"] = [*keys["scores"], 0.0]
    path = write_gguf(tmp_path / "v.gguf", keys, with_weights=True, name="Phi-3 mini")

    assert_equal_to_llamacpp(path, ["<|im_start|> \n x", "<mask>  y</s>  z <s>  w", "<|endoftext|> v"])


def test_merges_that_make_no_token_fall_back_to_bytes_as_in_llamacpp(tmp_path: Path) -> None:
    for pre in ("gpt-2", "llama-bpe"):
        keys = keys_of(pre)
        kept = [i for i in range(len(keys["tokens"])) if i % 13 or i < 200]
        del kept[50:60]  # ten byte characters as well
        keys["tokens"] = [keys["tokens"][i] for i in kept]
        keys["token_type"] = [keys["token_type"][i] for i in kept]
        keys["merges"] = [merge for i, merge in enumerate(keys["merges"]) if i % 7] * 2
        keys |= {"bos_token_id": 0, "eos_token_id": 1}
        path = write_gguf(tmp_path / f"{pre}.gguf", keys, with_weights=True)

        assert_equal_to_llamacpp(path, hard_strings()[::2])


@pytest.mark.parametrize(
    ("added", "ends"),
    [
        (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}),
        (["<|end|>", "<|return|>", "<|call|>", "<|channel|>"], {"<|return|>", "<|call|>"}),
        (["<|end|>"], {"<|end|>"}),
        (["</s>", "<|tool_response>"], {"<|tool_response>"}),
        (["<fim_pad>", "<fim_prefix>", "<|file_sep|>"], {"<fim_pad>", "<|file_sep|>"}),
        (["<|unused_7|>", "[PAD]", "[EOS]"], {"[PAD]", "[EOS]"}),
    ],
)
def test_texts_tell_which_tokens_end_a_generation(added: list[str], ends: set[str], tmp_path: Path) -> None:
    keys = bpe_keys(golden()["merges"], "gpt-2")
    first = keys["tokens"].index("<|endoftext|>")
    keys["tokens"] = [*(text for text in keys["tokens"][:first] if text not in added), "<|start|>", *added]
    first = keys["tokens"].index("<|start|>")
    keys["token_type"] = [TokenType.NORMAL] * len(keys["tokens"])
    keys |= {"bos_token_id": first, "eos_token_id": first}
    path = write_gguf(tmp_path / "v.gguf", keys, with_weights=True)
    tokenizer = open_tokenizer(path)

    assert {keys["tokens"][i] for i in tokenizer.eog_ids} & set(added) == ends
    assert_equal_to_llamacpp(path, ["".join(added), " ".join(added)])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "bert"}, UnsupportedError, r"tokenizer\.ggml\.model is 'bert'; known are: gpt2"),
        ({"pre": "klingon"}, UnsupportedError, r"tokenizer\.ggml\.pre: pre-tokenizer 'klingon' is not known"),
        ({"pre": 3}, CheckpointError, r"tokenizer\.ggml\.pre is 3, expected a string"),
        ({"model": None}, CheckpointError, r"has no tokenizer\.ggml\.model"),
        ({"tokens": None}, CheckpointError, r"has no tokenizer\.ggml\.tokens"),
        ({"merges": None}, CheckpointError, r"has no tokenizer\.ggml\.merges"),
        ({"tokens": [1, 2]}, CheckpointError, r"tokens is .*, expected an array of strings"),
        ({"tokens": ["a", "b", "a"]}, CheckpointError, r"tokens 0 and 2 have the same text 'a'"),
        ({"token_type": [1, 1]}, CheckpointError, r"token_type has 2 entries for \d+ tokens"),
        ({"token_type": "x"}, CheckpointError, r"token_type is 'x', expected an array of numbers"),
        ({"add_bos_token": 1}, CheckpointError, r"add_bos_token is 1, expected true or false"),
        ({"bos_token_id": "x"}, CheckpointError, r"bos_token_id is 'x', expected a token id"),
        (
            {
                "pre": "gpt-2",
                "bos_token_id": None,
                "tokens": ["a"],
                "merges": [""],
                "token_type": [1],
                "add_bos_token": True,
            },
            CheckpointError,
            r"add_bos_token is true, and bos_token_id names no token",
        ),
        (
            {"pre": "glm4", "bos_token_id": None, "add_bos_token": True},
            CheckpointError,
            r"add_bos_token is true, and bos_token_id names no token",
        ),
    ],
)
def test_metadata_that_contradict_themselves_are_refused(
    change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    keys = {key: value for key, value in (keys_of("qwen2") | change).items() if value is not None}
    path = write_gguf(tmp_path / "v.gguf", keys)

    with pytest.raises(error, match=message):
        open_tokenizer(path)


def test_what_holds_no_vocabulary_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither tokenizer\.json nor tokenizer\.model"):
        open_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="no such file or folder"):
        open_tokenizer(tmp_path / "nothing")
    (tmp_path / "qwen.tiktoken").touch()
    with pytest.raises(UnsupportedError, match=r"qwen\.tiktoken: tiktoken files are not supported"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize("unit", ["a", "ab", " ", "\n", "1", "漢", "!", "e\u0301", "word "])
def test_the_time_for_a_long_text_is_not_quadratic(tokenizer: Tokenizer, unit: str) -> None:
    text = unit * (100_000 // len(unit))  # a quadratic tokenizer takes hours for it

    ids = tokenizer.encode(text, add_special=False)

    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == text.strip()


@pytest.mark.parametrize("kind", ["gpt-2", "sentencepiece"])
def test_a_token_that_is_not_utf_8_keeps_its_bytes_and_matches_no_text(kind: str, tmp_path: Path) -> None:
    keys = keys_of(kind)
    keys["tokens"][300] = "qz-qz"
    path = write_gguf(tmp_path / "v.gguf", keys)
    path.write_bytes(path.read_bytes().replace(b"qz-qz", b"qz\xff\xfeq"))

    tokenizer = open_tokenizer(path)

    assert read_gguf_header(path).metadata["tokenizer.ggml.tokens"][300] == "qz\udcff\udcfeq"
    assert 300 not in tokenizer.encode("qz-qz qz\ufffd\ufffdq")
    if kind == "sentencepiece":
        assert tokenizer.token_bytes(300) == b"qz\xff\xfeq"
