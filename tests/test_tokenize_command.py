"""lmpack tokenize: ids and pieces, from every kind of source."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lmpack.cli.main import run
from runtime.tokenizer import open_tokenizer
from tests.tiny_vocabularies import bpe_keys, golden, sentencepiece_keys, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_each_token_is_a_line_with_its_id_and_piece(
    demo_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tokenize", str(demo_gguf), "-p", "The é\n"]) == 0

    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    tokenizer = open_tokenizer(demo_gguf)
    assert [int(token_id) for token_id, _ in lines] == tokenizer.encode("The é\n")
    assert lines[0][1] == "'The'"
    assert lines[-1][1] == r"'\n'"


def test_json_holds_ids_pieces_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "v.gguf", sentencepiece_keys([], []))

    assert run(["tokenize", str(path), "-p", "é</s>", "--parse-special", "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == {
        "ids": [1, 3 + 0xE2, 3 + 0x96, 3 + 0x81, 3 + 0xC3, 3 + 0xA9, 2],
        "pieces": ["<s>", "\ufffd", "\ufffd", "\ufffd", "\ufffd", "\ufffd", "</s>"],
        "bytes": ["3c733e", "e2", "96", "81", "c3", "a9", "3c2f733e"],
    }


def test_flags_leave_special_tokens_out_and_let_them_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "v.gguf", bpe_keys(golden()["merges"], "llama-bpe"))
    tokenizer = open_tokenizer(path)

    def ids(*flags: str) -> list[int]:
        assert run(["tokenize", str(path), "-p", "<|im_end|>", "--json", *flags]) == 0
        found: list[int] = json.loads(capsys.readouterr().out)["ids"]
        return found

    assert ids() == tokenizer.encode("<|im_end|>")
    assert ids("--no-bos") == ids()[1:]
    assert ids("--no-bos", "--parse-special") == [tokenizer.eos_id]


def test_a_files_line_ends_stay_as_they_are(
    demo_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_bytes(b"a\r\nb\n")

    assert run(["tokenize", str(demo_gguf), "-f", str(tmp_path / "text.txt"), "--json"]) == 0

    ids = json.loads(capsys.readouterr().out)["ids"]
    assert open_tokenizer(demo_gguf).decode(ids) == "a\r\nb\n"


def test_a_pack_and_its_source_give_the_same_ids(
    demo_gguf: Path, demo_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (demo_gguf, demo_pack):
        assert run(["tokenize", str(source), "-p", "Hello there", "--json"]) == 0
    first, second = capsys.readouterr().out.split("}\n{")
    assert json.loads(first + "}") == json.loads("{" + second)


def test_wrong_usage_and_missing_sources_are_one_line(
    demo_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")

    assert run(["tokenize", str(demo_gguf)]) == 2
    assert "give the text with either -p TEXT or -f FILE" in capsys.readouterr().err
    assert run(["tokenize", str(tmp_path / "none"), "-p", "x"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert run(["tokenize", str(demo_gguf), "-f", str(tmp_path / "latin1.txt")]) == 2
    assert "byte 3 is not UTF-8" in capsys.readouterr().err
    assert run(["tokenize", str(tmp_path / "latin1.txt"), "-p", "x"]) == 1
    assert "expected a GGUF file" in capsys.readouterr().err
    assert run(["tokenize", str(demo_gguf), "-p", "a\udcff"]) == 2
    assert "byte 0xFF after 1 characters is not UTF-8" in capsys.readouterr().err
