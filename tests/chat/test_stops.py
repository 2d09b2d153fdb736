"""Stop strings: exact cut, least hold-back, the same for every chunking."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.chat.stops import StopScanner


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """Kept text and match when the text comes in pieces."""
    scanner = StopScanner(stops)
    text = "".join(scanner.push(piece) for piece in pieces)
    return text + ("" if scanner.match else scanner.flush()), scanner.match


def slow(stops: list[str], text: str) -> tuple[str, str | None]:
    """Letter by letter: the first stop string that the text ends with, the longest of several."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("stop", ["beta gamma", "\nUser:"])
def test_h21_stop_string_across_pieces_is_cut_exactly(stop: str) -> None:
    """H21: a stop string across two tokens was missed, or its first half leaked."""
    text = f"alpha {stop} delta"
    for first in range(len(text)):
        for second in range(first, len(text)):
            pieces = [text[:first], text[first:second], text[second:]]
            assert run([stop], pieces) == ("alpha ", stop)


def test_h21_reported_pieces_stop_before_the_match() -> None:
    """H21: the reported trigger."""
    assert run(["beta gamma"], ["alpha beta", " gam", "ma delta"]) == ("alpha ", "beta gamma")


def test_h21_only_a_tail_that_can_still_match_is_held() -> None:
    """H21: holding more makes streams stutter; holding less leaks half a stop string."""
    scanner = StopScanner(["</end>", "STOP"])
    assert scanner.push("hello <b") == "hello <b"
    assert scanner.push("x </e") == "x "
    assert scanner.push("m") == "</em"
    assert scanner.push(" ST") == " "
    assert scanner.push("S") == "ST"
    assert scanner.push("TOP more") == ""
    assert scanner.match == "STOP"


def test_r14_nothing_comes_out_after_a_match() -> None:
    """R14: text decoded after the match leaked at the end."""
    scanner = StopScanner(["five"])
    out = [scanner.push(piece) for piece in ["three four fi", "ve six", " seven", " eight"]]
    assert out == ["three four ", "", "", ""]
    assert scanner.flush() == ""


def test_unfinished_tail_is_flushed() -> None:
    """Half a stop string at the end of a reply is text and must not vanish."""
    assert run(["STOP!"], ["and STO", "P"]) == ("and STOP", None)


def test_self_overlapping_stop_string_is_found() -> None:
    """A scan that restarts after a failed try misses `aab` in `aaab`."""
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")


@given(
    stops=st.lists(st.text("ab c", min_size=1, max_size=4), min_size=1, max_size=4),
    pieces=st.lists(st.text("ab c", max_size=5), max_size=10),
)
@settings(max_examples=400, deadline=None)
def test_r03_result_is_the_same_for_every_chunking(stops: list[str], pieces: list[str]) -> None:
    """R03: single letters, one chunk, any chunks: equal to the slow scan of the whole text."""
    text = "".join(pieces)
    assert run(stops, pieces) == run(stops, [text]) == run(stops, list(text)) == slow(stops, text)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
)
@settings(max_examples=200, deadline=None)
def test_held_text_is_always_the_beginning_of_a_stop_string(
    stops: list[str], pieces: list[str]
) -> None:
    """Least hold-back: what is kept is a proper beginning of a stop string, and the longest one."""
    scanner = StopScanner(stops)
    seen = sent = ""
    for piece in pieces:
        seen += piece
        sent += scanner.push(piece)
        if scanner.match:
            return
        tails = [stop[:n] for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])]
        assert seen[len(sent) :] == max(tails, key=len, default="")
