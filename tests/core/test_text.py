"""Text is shown as early as it may be, to the letter, however it is cut into tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from omlx.core.pieces import text_of
from omlx.core.text import TextStream

HIDDEN = 10**6


class Pieces:
    """A detokenizer whose token n is the n-th piece of text. "?" stays incomplete until the next.

    What is incomplete at the end is given as it is, as a real one gives a replacement character.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces
        self._waiting = ""
        self.last_segment = ""

    def add_token(self, token: int, /) -> None:
        text = self._waiting + self._pieces[token]
        whole = text.rstrip("?")
        self._waiting = text[len(whole) :]
        self.last_segment = whole

    def finalize(self) -> None:
        self.last_segment, self._waiting = self._waiting, ""


def shown(pieces: Sequence[str], stops: Iterable[str] = ()) -> tuple[str, str | None, list[str]]:
    """All text, the stop string that ended it, and what each token showed."""
    stream = TextStream(Pieces(pieces), stops=tuple(stops), hidden={HIDDEN})
    parts: list[str] = []
    for token in range(len(pieces)):
        parts.append(text_of(stream.push(token)))
        if stream.stopped is not None:
            break
    rest = text_of(stream.finish())
    return "".join(parts) + rest, stream.stopped, parts


def cut(text: str, places: Iterable[int]) -> list[str]:
    """``text`` in pieces that end at ``places``."""
    ends = [*sorted(place for place in places if place < len(text)), len(text)]
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def stopped_by_hand(text: str, stops: Sequence[str]) -> str:
    """The specification: letter by letter, until the text ends with a stop string."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


TEXT = "alpha beta gamma delta"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        (TEXT, ["beta gamma"], "alpha "),
        (TEXT, ["a g"], "alpha bet"),
        ("x\nUser:", ["\nUser:"], "x"),
        (TEXT, ["zzz"], TEXT),
        (TEXT, ["alpha"], ""),
        (TEXT, ["bet", "beta"], "alpha "),
        (TEXT, ["delta"], "alpha beta gamma "),
        (TEXT, ["deltas"], TEXT),
        (TEXT, ["a"], ""),
        (TEXT, [], TEXT),
        ("aab", ["ab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("abcd", ["bc", "abcd"], "a"),
        ("привет мир", ["т м"], "приве"),
    ],
)
def test_a_stop_string_ends_the_text_wherever_it_is_cut(
    text: str, stops: list[str], expected: str
) -> None:
    """B91."""
    splits = [cut(text, [place]) for place in range(len(text))]

    for pieces in [*splits, list(text), [text], ["", *text, ""]]:
        assert shown(pieces, stops)[0] == expected


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.sets(st.integers(0, 12)),
)
@example("abcd", ["bc", "abcd"], set())
@example("aabaab", ["abab", "baa"], {3})
def test_how_the_text_is_cut_makes_no_difference(
    text: str, stops: list[str], places: set[int]
) -> None:
    assert shown(cut(text, places), stops)[0] == stopped_by_hand(text, stops)


@given(st.text("ab", max_size=10), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1))
def test_nothing_is_held_back_that_can_no_longer_be_a_stop_string(
    text: str, stops: list[str]
) -> None:
    _, _, parts = shown(list(text), stops)

    for count in range(1, len(parts) + 1):
        so_far = text[:count]
        if stopped_by_hand(so_far, stops) != so_far:
            break
        ends = [so_far[i:] for i in range(count + 1)]
        held = next(end for end in ends if any(stop.startswith(end) for stop in stops))
        assert "".join(parts[:count]) == so_far[: count - len(held)]


def test_without_stop_strings_each_token_is_shown_at_once() -> None:
    assert shown(["al", "pha", "", " beta"])[2] == ["al", "pha", "", " beta"]


def test_an_incomplete_character_waits_for_the_rest_of_it() -> None:
    assert shown(["a", "?", "b"])[2] == ["a", "", "?b"]


def test_what_is_incomplete_at_the_end_is_not_lost() -> None:
    assert shown(["a", "?"])[0] == "a?"
    assert shown(["b", "et", "?"], ["beta"])[0] == "bet?"


def test_what_is_held_back_at_the_end_is_not_lost() -> None:
    text, stopped, parts = shown(["alpha be", "t"], ["beta"])

    assert (text, stopped) == ("alpha bet", None)
    assert parts == ["alpha ", ""]


def test_the_last_incomplete_character_may_complete_a_stop_string() -> None:
    assert shown(["ab", "?"], ["b?"])[:2] == ("a", "b?")


def test_a_hidden_token_shows_nothing_and_breaks_nothing() -> None:
    """An end-of-turn token inside what may be a stop string."""
    stream = TextStream(Pieces(["be", "ta"]), stops=("beta",), hidden={HIDDEN})

    assert [stream.push(token) for token in (0, HIDDEN, 1)] == [(), (), ()]
    assert stream.stopped == "beta"


def test_nothing_follows_a_stop_string() -> None:
    stream = TextStream(Pieces(["beta", " gamma"]), stops=("beta",), hidden=())
    stream.push(0)

    assert stream.push(1) == ()
    assert stream.finish() == ()


def test_the_stop_string_that_was_complete_first_is_named() -> None:
    assert shown([TEXT], ["gamma", "bet", "beta"])[1] == "bet"
    assert shown(["abc"], ["c", "bc"])[1] == "bc", "the longest of those that end here"


def test_an_empty_stop_string_is_refused() -> None:
    """B85: it would stop before the first letter."""
    with pytest.raises(AssertionError, match="stop everything"):
        TextStream(Pieces([]), stops=("",), hidden=())
