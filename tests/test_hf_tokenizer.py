"""Tokenizers of safetensors folders: tokenizer.json as transformers reads it, tokenizer.model as llama.cpp does."""

from __future__ import annotations

import json
import shutil
import struct
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from transformers import AutoTokenizer

from lmpack.errors import CheckpointError, UnsupportedError
from runtime.pre_tokenizer import PRE_TOKENIZERS
from runtime.tokenizer import open_tokenizer, tokenizer_from_hf
from tests.tiny_vocabularies import bpe_keys, golden, hard_strings, write_gguf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def assert_equal_to_transformers(folder: Path, texts: Sequence[str]) -> None:
    """Compare ids and decoded texts with AutoTokenizer's."""
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = tokenizer_from_hf(folder)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in texts:
        for add_special in (False, True):
            for parse_special in (False, True):
                expected = theirs(
                    text, add_special_tokens=add_special, split_special_tokens=not parse_special
                ).input_ids
                ids = ours.encode(text, add_special=add_special, parse_special=parse_special)
                assert ids == expected, f"{text!r}, {add_special=}, {parse_special=}"
        shown = theirs.decode(expected, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == shown, repr(text)


def write_tokenizer_json(folder: Path, pre: str = "llama-bpe", **config: Any) -> Path:
    """A folder with the tiny byte-level vocabulary as a tokenizer.json."""
    keys = bpe_keys(golden()["merges"], pre)
    first_special = keys["tokens"].index("<|endoftext|>")
    vocabulary = {text: i for i, text in enumerate(keys["tokens"][:first_special])}
    merges = [tuple(merge.split(" ")) for merge in keys["merges"]]
    library = Tokenizer(models.BPE(vocabulary, merges))
    library.pre_tokenizer = PRE_TOKENIZERS[pre].build()
    library.decoder = decoders.ByteLevel()
    library.add_tokens(
        [AddedToken(text, special=text.startswith("<|")) for text in keys["tokens"][first_special:]]
    )
    library.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", keys["bos_token_id"])]
    )
    library.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def sentencepiece_file(
    pieces: Sequence[tuple[str, float, int]], *, model_type: int = 2, charsmap: bytes = b""
) -> bytes:
    """A tokenizer.model, byte by byte."""

    def field(number: int, raw: bytes) -> bytes:
        return (
            bytes([number << 3 | 2]) + (bytes([len(raw)]) if len(raw) < 128 else b"%c\x01" % len(raw)) + raw
        )

    found = b"".join(
        field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind]))
        for text, score, kind in pieces
    )
    return found + field(2, bytes([0x18, model_type])) + field(3, field(2, charsmap))


def test_a_tokenizer_json_gives_the_tokens_that_transformers_gives(tmp_path: Path) -> None:
    assert_equal_to_transformers(write_tokenizer_json(tmp_path), hard_strings())


def test_a_tokenizer_json_and_a_gguf_of_one_vocabulary_give_the_same_tokens(tmp_path: Path) -> None:
    from_json = open_tokenizer(write_tokenizer_json(tmp_path, "qwen2", eos_token="<|im_end|>"))
    from_gguf = open_tokenizer(
        write_gguf(tmp_path / "v.gguf", bpe_keys(golden()["merges"], "qwen2", add_bos_token=True))
    )

    for text in hard_strings():
        assert from_json.encode(text) == from_gguf.encode(text), repr(text)
    for i in range(from_gguf.vocab_size):
        assert from_json.token_bytes(i) == from_gguf.token_bytes(i)
    assert from_json.eog_ids == from_gguf.eog_ids
    assert (from_json.bos_id, from_json.eos_id) == (from_gguf.bos_id, from_gguf.eos_id)


def test_the_test_models_folders_give_the_tokens_that_transformers_gives(models_dir: Path) -> None:
    assert_equal_to_transformers(models_dir / "tiny" / "hf", hard_strings())
    for folder in ("qwen2_moe", "olmoe", "gpt_oss", "glm4_moe"):
        assert_equal_to_transformers(models_dir / "families" / folder / "hf", hard_strings()[::9])


@pytest.mark.parametrize("family", ["mixtral", "phimoe", "ernie4_5_moe"])
def test_a_sentencepiece_file_gives_the_tokens_of_its_gguf(family: str, models_dir: Path) -> None:
    folder = models_dir / "families" / family
    from_file, from_gguf = open_tokenizer(folder / "hf"), open_tokenizer(folder / f"{family}-bf16.gguf")

    assert from_file.vocab_size == from_gguf.vocab_size
    assert from_file.eog_ids == from_gguf.eog_ids
    for text in hard_strings():
        for special in (False, True):
            expected = from_gguf.encode(text, add_special=special, parse_special=special)
            assert from_file.encode(text, add_special=special, parse_special=special) == expected, repr(text)


def test_generation_ends_at_the_ids_of_generation_config_and_at_known_texts(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path, eos_token="<|im_end|>")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    tokenizer = open_tokenizer(tmp_path)

    texts = {tokenizer.piece(i) for i in tokenizer.eog_ids - {3, 4}}
    assert tokenizer.eog_ids >= {3, 4}
    assert texts >= {"<|im_end|>", "<|endoftext|>", "<|eot_id|>"}


def test_tokenizer_config_says_whether_a_text_gets_start_and_end_tokens(tmp_path: Path) -> None:
    plain = open_tokenizer(write_tokenizer_json(tmp_path, add_bos_token=False))
    both = open_tokenizer(
        write_tokenizer_json(
            tmp_path,
            add_bos_token=True,
            add_eos_token=True,
            eos_token={"content": "<|im_end|>", "lstrip": False},
        )
    )

    assert plain.encode("") == []
    assert both.encode("") == [both.bos_id, both.eos_id]
    assert both.decode(both.encode("a b"), remove_special=True) == "a b"


def test_ids_that_only_pad_the_embedding_matrix_have_no_text(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 5000}}')
    tokenizer = open_tokenizer(tmp_path)

    assert tokenizer.vocab_size == 5000
    assert tokenizer.token_bytes(4999) == b""


def test_the_chat_template_comes_from_its_own_file_before_the_config(tmp_path: Path) -> None:
    write_tokenizer_json(
        tmp_path, chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    )
    assert open_tokenizer(tmp_path).chat_template == "d"

    (tmp_path / "chat_template.json").write_text('{"chat_template": "j"}')
    assert open_tokenizer(tmp_path).chat_template == "j"

    (tmp_path / "chat_template.jinja").write_text("é")
    assert open_tokenizer(tmp_path).chat_template == "é"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", r"tokenizer\.json: the tokenizers library cannot read it"),
        ("tokenizer_config.json", b"[1]", r"tokenizer_config\.json: is not a JSON object; download it again"),
        ("generation_config.json", b"\xff", r"generation_config\.json: is not JSON"),
        (
            "added_tokens.json",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
            r"added_tokens\.json: is a Git LFS pointer",
        ),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja: byte 0 is not UTF-8"),
    ],
)
def test_broken_files_are_refused_with_their_names(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    write_tokenizer_json(tmp_path)
    (tmp_path / name).write_bytes(content)

    with pytest.raises(CheckpointError, match=message):
        open_tokenizer(tmp_path)


def test_added_tokens_beside_a_sentencepiece_file_join_its_vocabulary(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("\u2581", -1.0, 1), ("a", -2.0, 1)]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(pieces))
    added = {"5": {"content": "<|user|>", "special": True}, "6": {"content": "<mark>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added, "bos_token": "<s>"})
    )
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    tokenizer = open_tokenizer(tmp_path)

    assert tokenizer.vocab_size == 8
    assert tokenizer.encode("a<|user|>a<mark>", parse_special=True) == [1, 3, 4, 5, 3, 4, 6]
    assert tokenizer.encode("<mark>") == [1, 6]
    assert tokenizer.token_bytes(7) == b""
    assert tokenizer.eog_ids == {2}


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"not a protocol buffer", CheckpointError, "is not a SentencePiece model"),
        (b"", CheckpointError, "it has no pieces"),
        (sentencepiece_file([("a", 0.0, 1)])[:-3], CheckpointError, "is not a SentencePiece model"),
        (sentencepiece_file([("a", 0.0, 1)], model_type=1), UnsupportedError, r"of type 1, only BPE \(2\)"),
        (
            sentencepiece_file([("a", 0.0, 1)], charsmap=b"x"),
            UnsupportedError,
            "rewrites text with a character map",
        ),
    ],
)
def test_other_sentencepiece_files_are_refused(
    content: bytes, error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)

    with pytest.raises(error, match=message):
        open_tokenizer(tmp_path)


def test_a_pack_of_a_safetensors_folder_has_its_tokenizer(models_dir: Path, tmp_path: Path) -> None:
    from converters.conversion import convert

    source = models_dir / "families" / "mixtral" / "hf"
    convert(source, tmp_path / "m.lmpack")
    shutil.copytree(source, tmp_path / "copy")

    packed, copied = open_tokenizer(tmp_path / "m.lmpack"), open_tokenizer(tmp_path / "copy")
    assert [packed.encode(text) for text in hard_strings()] == [
        copied.encode(text) for text in hard_strings()
    ]
