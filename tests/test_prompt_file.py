"""Prompt files are read line by line, and what is wrong is named with its line."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from lmpack.errors import UsageError
from profiles.prompt_file import Message, Prompt, read_prompt_set

if TYPE_CHECKING:
    from pathlib import Path


def test_every_line_of_a_text_is_a_prompt_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("One\u2028still one\n\n  two \r\n \t\nNaïve 🦊".encode())
    assert read_prompt_set(path).prompts == (
        Prompt(1, "One\u2028still one", ()),
        Prompt(3, "  two ", ()),
        Prompt(5, "Naïve 🦊", ()),
    )


def test_json_lines_hold_texts_and_chats(tmp_path: Path) -> None:
    path = tmp_path / "p.JSONL"
    path.write_text(
        '{"prompt": "a\\nb", "id": 7}\n\n'
        '{"messages": [{"role": "system", "content": "Be brief."}, {"content": "Hi", "role": "user"}]}\n',
        encoding="utf-8",
    )
    assert read_prompt_set(path).prompts == (
        Prompt(1, "a\nb", ()),
        Prompt(3, None, (Message("system", "Be brief."), Message("user", "Hi"))),
    )


def test_the_set_is_known_by_the_hash_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    raw = b"\xef\xbb\xbfone\r\ntwo"
    path.write_bytes(raw)
    prompts = read_prompt_set(path)
    assert prompts.sha256 == hashlib.sha256(raw).hexdigest()
    assert [prompt.text for prompt in prompts.prompts] == ["one", "two"]
    assert prompts.at(prompts.prompts[1]) == f"{path}:2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "column 2 is not JSON"),
        ("[1]", 'expected {"prompt": ...} or {"messages": [...]}, got a list of 1 values'),
        ('{"text": "a"}', 'expected {"prompt": ...} or {"messages": [...]}'),
        ('{"prompt": "a", "messages": []}', 'expected {"prompt": ...} or {"messages": [...]}'),
        ('{"prompt": ""}', "prompt: expected a string that is not empty"),
        ('{"prompt": 5}', "prompt: expected a string that is not empty, got 5"),
        ('{"prompt": "\\ud83e"}', "prompt: expected a string without lone surrogates"),
        ('{"prompt": "a", "prompt": "b"}', "stands twice"),
        ('{"messages": []}', "messages: expected a list of 1 to 4096 values"),
        ('{"messages": "hi"}', "messages: expected a list"),
        ('{"messages": ["hi"]}', "messages[0]: expected an object"),
        ('{"messages": [{"role": "user"}]}', "messages[0] misses content"),
        ('{"messages": [{"role": "user", "content": "a", "name": "b"}]}', "messages[0] has unknown 'name'"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "messages[0].content: expected a string"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number_and_what_was_expected(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_prompt_set(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_line_that_is_not_utf8_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"p.{suffix}"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(UsageError, match=rf"p\.{suffix}:2: byte 12 .*not UTF-8"):
        read_prompt_set(path)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(UsageError, match="no prompts"):
        read_prompt_set(path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("a", encoding="utf-8")
    with pytest.raises(UsageError, match=r"expected a \.txt file \(one prompt a line\) or a \.jsonl file"):
        read_prompt_set(path)


def test_a_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_prompt_set(tmp_path / "p.txt")
