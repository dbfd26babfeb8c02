"""TextStream: text comes as soon as it is final, whatever the borders of the tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpack.errors import UsageError
from runtime.text_stream import TextStream

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTROL = 1000


class TokenTable:
    """Tokens that are given as bytes; id 1000 is a control token."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return b"<|end|>" if token_id == CONTROL else self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == CONTROL


def stream_pieces(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    """What each push returns, and finish at the end."""
    stream = TextStream(TokenTable(pieces), stop)
    shown = [stream.push(i) for i in range(len(pieces))]
    return [*shown, stream.finish()], stream.stopped


def expected_text(text: str, stop: Sequence[str]) -> str:
    """The text up to the stop string that is complete first: the definition, character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(each) for each in stop if text[:end].endswith(each)]
        if starts:
            return text[: min(starts)]
    return text


def cut(raw: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Bytes in pieces, cut at the given places."""
    places = [0, *sorted(place % (len(raw) + 1) for place in cuts), len(raw)]
    return [raw[start:end] for start, end in pairwise(places)]


def test_a_character_comes_with_its_last_byte() -> None:
    shown, _ = stream_pieces([b"a\xf0\x9f", b"\x98", b"\x80b"])

    assert shown == ["a", "", "😀b", ""]


def test_an_unfinished_character_is_replaced_only_at_the_end() -> None:
    shown, _ = stream_pieces([b"a", b"\xe6\xbc"])

    assert shown == ["a", "", "\ufffd"]


def test_bytes_that_can_never_become_a_character_do_not_hold_the_stream_up() -> None:
    shown, _ = stream_pieces([b"\xff", b"a", b"\xc3", b"b"])

    assert shown == ["\ufffd", "a", "", "\ufffdb", ""]


def test_a_stop_string_over_several_tokens_is_cut() -> None:
    shown, stopped = stream_pieces([b"Hi", b"<", b"end", b">", b"more"], ["<end>"])

    assert shown == ["Hi", "", "", "", "", ""]
    assert stopped


def test_what_looked_like_a_stop_string_is_given_when_it_is_none() -> None:
    shown, stopped = stream_pieces([b"a<", b"en", b"x"], ["<end>"])

    assert shown == ["a", "", "<enx", ""]
    assert not stopped


def test_what_is_withheld_is_given_at_the_end() -> None:
    shown, stopped = stream_pieces([b"a<en"], ["<end>"])

    assert shown == ["a", "<en"]
    assert not stopped


def test_text_inside_the_token_of_a_stop_string_is_kept_up_to_it() -> None:
    shown, stopped = stream_pieces([b"abcSTOPdef"], ["STOP"])

    assert "".join(shown) == "abc"
    assert stopped


def test_control_tokens_are_hidden_unless_asked_for() -> None:
    hiding = TextStream(TokenTable([b"a"]))
    showing = TextStream(TokenTable([b"a"]), show_special=True)

    assert hiding.push(0) + hiding.push(CONTROL) == "a"
    assert showing.push(0) + showing.push(CONTROL) == "a<|end|>"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="a stop string is empty"):
        TextStream(TokenTable([]), [""])


@given(raw=st.binary(max_size=40), cuts=st.lists(st.integers(0, 100), max_size=10))
def test_any_bytes_give_the_text_of_them_all_whatever_the_borders(raw: bytes, cuts: list[int]) -> None:
    shown, _ = stream_pieces(cut(raw, cuts))

    assert "".join(shown) == raw.decode(errors="replace")


@given(
    text=st.text(alphabet="abé😀", max_size=30),
    stop=st.lists(st.text(alphabet="abé😀", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_stop_strings_cut_at_the_same_place_whatever_the_borders(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    shown, stopped = stream_pieces(cut(text.encode(), cuts), stop)

    assert "".join(shown) == expected_text(text, stop)
    assert stopped == any(each in text for each in stop)


@given(text=st.text(alphabet="ab", max_size=30), stop=st.text(alphabet="ab", min_size=1, max_size=4))
def test_no_more_is_withheld_than_could_become_the_stop_string(text: str, stop: str) -> None:
    stream = TextStream(TokenTable([char.encode() for char in text]), [stop])
    given_so_far = ""
    for i in range(len(text)):
        given_so_far += stream.push(i)
        if stream.stopped:
            break
        withheld = text[len(given_so_far) : i + 1]
        assert stop.startswith(withheld)
