"""lmpack run, chat and perplexity on the demo model, as a user calls them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from lmpack.cli import chat, perplexity, run

if TYPE_CHECKING:
    from pathlib import Path

    import click

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def invoke(command: click.Command, *arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(command, arguments, input=given, catch_exceptions=False)


def test_run_streams_the_answer_to_stdout_and_the_rest_to_stderr(demo_pack: Path) -> None:
    result = invoke(run.command, str(demo_pack), "-p", QUESTION, "--chat", "-n", "20", "--stats")
    assert result.stdout == f"{ANSWER}\n"
    assert "tokens/s" in result.stderr


def test_run_json_is_one_document_with_ids_text_and_logprobs(demo_pack: Path) -> None:
    result = invoke(
        run.command, str(demo_pack), "-p", "Once upon a time", "-n", "5", "--logprobs", "3", "--json"
    )
    document = json.loads(result.stdout)
    assert len(document["token_ids"]) == len(document["logprobs"]) == len(document["top_logprobs"]) == 5
    assert all(len(top) == 3 for top in document["top_logprobs"])
    assert document["text"].startswith(" there")
    assert document["stats"]["kernels"] == "ggml"
    assert document["stats"]["hits"] + document["stats"]["misses"] > 0


def test_a_seed_gives_the_same_text_twice(demo_pack: Path) -> None:
    def text(seed: str) -> str:
        options = ("-p", "Once upon a time", "-n", "24", "--temperature", "1.0", "--seed", seed)
        return invoke(run.command, str(demo_pack), *options).stdout

    assert text("3") == text("3")
    assert text("3") != text("4")


def test_a_stop_text_ends_the_answer_before_it(demo_pack: Path) -> None:
    result = invoke(run.command, str(demo_pack), "-p", QUESTION, "--chat", "--stop", " is Par")
    assert result.stdout == "The capital of France\n"


@pytest.mark.parametrize(
    ("options", "ended_by"),
    [
        (["-p", QUESTION, "--chat"], "end"),
        (["-p", QUESTION, "--chat", "--stop", "Paris"], "stop"),
        (["-p", "Once", "-n", "5"], "length"),
        (["-p", "Once", "--context", "12", "--ignore-eos"], "context"),
    ],
)
def test_json_says_what_ended_the_answer(demo_pack: Path, options: list[str], ended_by: str) -> None:
    result = invoke(run.command, str(demo_pack), *options, "--json")
    assert json.loads(result.stdout)["ended_by"] == ended_by
    assert ("the context of 12 tokens (--context) is full" in result.stderr) == (ended_by == "context")


def test_piped_help_is_help_and_no_turn(demo_pack: Path) -> None:
    result = invoke(chat.command, str(demo_pack), given="/help\n")
    assert (result.stdout, "Ctrl-D leaves" in result.stderr) == ("", True)


def test_the_prompt_can_come_from_a_file(demo_pack: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(QUESTION, encoding="utf-8")
    assert invoke(run.command, str(demo_pack), "-f", str(prompt), "--chat").stdout == f"{ANSWER}\n"


def test_the_prompt_can_come_from_standard_input_or_a_pipe(demo_pack: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, QUESTION.encode())
    os.close(writing)
    for file in ("-", f"/dev/fd/{reading}"):
        result = invoke(run.command, str(demo_pack), "-f", file, "--chat", given=QUESTION)
        assert result.stdout == f"{ANSWER}\n"
    os.close(reading)


def test_line_ends_of_a_prompt_file_stay_as_they_are(demo_pack: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(b"one\r\ntwo\r\n")
    asked = ("-n", "1", "--json")
    from_file = json.loads(invoke(run.command, str(demo_pack), "-f", str(prompt), *asked).stdout)
    typed = json.loads(invoke(run.command, str(demo_pack), "-p", "one\r\ntwo\r\n", *asked).stdout)
    assert from_file["prompt_token_ids"] == typed["prompt_token_ids"]


def test_chat_remembers_the_turns_and_ends_with_the_input(demo_pack: Path) -> None:
    result = invoke(chat.command, str(demo_pack), "-n", "24", given=f"{QUESTION}\n{QUESTION}\n")
    first, second = result.stdout.splitlines()
    assert first == ANSWER
    assert "Paris" in second


def test_chat_goes_on_after_a_turn_that_does_not_fit(demo_pack: Path) -> None:
    result = invoke(
        chat.command, str(demo_pack), "--context", "64", "-n", "24", given=f"{'long ' * 99}\n{QUESTION}\n"
    )
    assert result.stdout == f"{ANSWER}\n"
    assert "do not fit a context of 64" in result.stderr


def test_chat_forgets_the_talk_when_told(demo_pack: Path) -> None:
    result = invoke(chat.command, str(demo_pack), "-n", "24", given=f"Hello\n/clear\n{QUESTION}\n")
    assert result.stdout.endswith(f"{ANSWER}\n")


def test_perplexity_prints_the_number_that_its_json_holds(demo_pack: Path, demo_gguf: Path) -> None:
    heldout = str(demo_gguf.with_name("heldout.txt"))
    options = (str(demo_pack), heldout, "--context", "128", "--chunks", "2")
    document = json.loads(invoke(perplexity.command, *options, "--json").stdout)
    assert document["num_tokens"] == 2 * 63
    assert f"perplexity {document['perplexity']:.4f} " in invoke(perplexity.command, *options).stdout
