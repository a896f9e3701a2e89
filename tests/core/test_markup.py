"""What a model writes is parted into text, thoughts and calls, however it is cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from omlx.core.markup import CALL, CONTENT, REASONING, Edge, Markup, ModelMarkup, Reader
from omlx.core.pieces import CallText, Piece, Text, Thought, joined
from omlx.core.text import TextStream
from tests.core.test_text import Pieces, cut

QWEN = ModelMarkup(
    think=("<think>", "</think>"),
    call=("<call>", "</call>"),
    takes_tools=True,
    end_is_token=True,
)
EOS = 10**6


def read(
    pieces: Sequence[str],
    markup: Markup,
    stops: Sequence[str] = (),
    *,
    complete: bool = True,
) -> tuple[list[Piece], TextStream]:
    stream = TextStream(Pieces(pieces), stops=stops, hidden={EOS}, markup=markup)
    found: list[Piece] = []
    for token in range(len(pieces)):
        found += stream.push(token)
        if stream.ended:
            break
    found += stream.finish(complete=complete)
    return joined(found), stream


def said(text: str, stops: Sequence[str] = (), **asked: Any) -> list[Piece]:
    prompt = asked.pop("prompt", "")
    complete = asked.pop("complete", True)
    markup = QWEN.reading(prompt, tools=asked.pop("tools", True), **asked)
    return read(list(text), markup, stops, complete=complete)[0]


# ── what is what ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", [Text("hello")]),
        ("", []),
        ("<think>hm</think>so", [Thought("hm"), Text("so")]),
        ("<think>\nhm\n\nhm\n</think>\n\nso\n", [Thought("hm\n\nhm"), Text("so\n")]),
        ("<think></think>so", [Text("so")]),
        ("<think>\n\n</think>\n\nso", [Text("so")]),
        ("so<think>hm</think>go", [Text("so"), Thought("hm"), Text("go")]),
        ("<call>x</call>", [CallText("x")]),
        ("I look.\n<call>\nx\n</call>\n", [Text("I look."), CallText("\nx\n")]),
        ("<call>x</call>\n<call>y</call>", [CallText("x"), CallText("y")]),
        ("<call></call>", [CallText("")]),
        ("<think>hm<call>x</call>", [Thought("hm"), CallText("x")]),
        ("<call><think>x</think></call>", [CallText("<think>x</think>")]),
        ("<call>x", [CallText("x")]),
        ("a <thin and <calling>", [Text("a <thin and <calling>")]),
        ("a <think", [Text("a <think")]),
        ("no</think> so</call>.", [Text("no so.")]),
        ("<think>a<think>b</think>", [Thought("ab")]),
        ("<think>for ever", [Thought("for ever")]),
        ("<think>for ever\n", [Thought("for ever")]),
        ("two\n\n", [Text("two\n\n")]),
    ],
)
def test_each_part_is_for_somebody(text: str, expected: list[Piece]) -> None:
    """B98: thoughts are split off exactly, and no marker is shown."""
    assert said(text) == expected


def test_a_thought_that_the_template_began_is_one_from_the_first_word() -> None:
    for end in ("<think>", "<think>\n"):
        assert said("hm</think>so", prompt=f"assistant\n{end}") == [Thought("hm"), Text("so")]
    assert said("\nhm", prompt="assistant\n<think>\n") == [Thought("hm")]


def test_a_thought_that_the_template_ended_is_over() -> None:
    assert said("so", prompt="assistant\n<think>\n\n</think>\n\n") == [Text("so")]


def test_a_user_who_writes_a_marker_begins_no_thought() -> None:
    assert said("so", prompt="user: what is <think>?\nassistant: ") == [Text("so")]


def test_without_tools_the_markers_of_calls_are_text() -> None:
    """A model may be asked how a call is written."""
    assert said("<call>x</call>", tools=False) == [Text("<call>x</call>")]


def test_a_call_that_was_cut_is_not_shown() -> None:
    """B97: half a call can't be run, and its markup is no text."""
    assert said("so <call>x", complete=False) == [Text("so ")]
    assert said("so <call>x</cal", complete=False) == [Text("so ")]
    assert said("so <cal", complete=False) == [Text("so <cal")]


def test_a_thought_that_was_cut_is_a_thought() -> None:
    """B98."""
    assert said("<think>hm</thi", complete=False) == [Thought("hm</thi")]


def test_the_answer_may_end_with_its_first_call() -> None:
    markup = QWEN.reading("", tools=True, one_call=True)

    found, stream = read(["<call>x</call>", "<call>y</call>"], markup)

    assert found == [CallText("x")]
    assert stream.ended
    assert stream.stopped is None


# ── stop strings ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "stops", "expected", "stopped"),
    [
        ("<think>a b</think>c b d", ["b"], [Thought("a b"), Text("c ")], "b"),
        ("<call>b</call>", ["b"], [CallText("b")], None),
        ("<think>x\n\ny</think>\n\na\n\nb", ["\n\n"], [Thought("x\n\ny"), Text("a")], "\n\n"),
        ("a<think>b</think>c", ["ac", "ab", "bc"], [Text("a"), Thought("b"), Text("c")], None),
        ("x\nUser:", ["User:"], [Text("x\n")], "User:"),
        ("a <b", ["<"], [Text("a ")], "<"),
        ("</think>a", ["</think>"], [Text("a")], None),
    ],
)
def test_stop_strings_are_looked_for_in_what_is_said_to_the_user(
    text: str, stops: list[str], expected: list[Piece], stopped: str | None
) -> None:
    found, stream = read(list(text), QWEN.reading("", tools=True), stops)

    assert (found, stream.stopped) == (expected, stopped)
    assert stream.ended == (stopped is not None)


# ── however it is cut ────────────────────────────────────────────────────────────────────────

scraps = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<call>", "</call>", "<", "</", ">", "think", "\n", "a", "stop"]
    ),
    max_size=12,
)


@given(scraps, st.sets(st.integers(0, 90)), st.booleans(), st.booleans(), st.booleans())
@example(["<think>", "<call>", "</call>"], {1}, True, False, True)
@example(["\n", "stop", "<think>"], set(), False, False, False)
def test_how_it_is_cut_makes_no_difference(
    words: list[str], places: set[int], tools: bool, one_call: bool, complete: bool
) -> None:
    text = "".join(words)
    markup = QWEN.reading("", tools=tools, one_call=one_call)

    letters, whole = list(text), cut(text, places)
    expected, by_letter = read(letters, markup, ["stop"], complete=complete)
    found, by_piece = read(whole, markup, ["stop"], complete=complete)

    assert found == expected
    assert by_piece.stopped == by_letter.stopped


@given(scraps)
def test_no_whole_marker_is_ever_shown(words: list[str]) -> None:
    markers = ("<think>", "</think>", "<call>", "</call>")
    found, _ = read(words, QWEN.reading("", tools=True))

    # Two halves around a marker may spell another one, which nobody wrote.
    if not any(half in words for half in ("<", "</", ">", "think")):
        shown = [piece.text for piece in found if isinstance(piece, (Text, Thought))]
        assert not [marker for marker in markers if marker in "".join(shown)]


@given(st.text("ab<>c", max_size=14), st.sets(st.integers(0, 14)))
@example("<a<b>", {3})
def test_of_markers_that_begin_alike_the_longest_counts(text: str, places: set[int]) -> None:
    edges = [Edge("x", "<a", "x"), Edge("x", "<a<b>", "y"), Edge("y", "<b>", "x")]

    def found(pieces: Sequence[str]) -> list[tuple[str, str]]:
        reader, parts = Reader(edges, "x"), []
        for piece in pieces:
            parts += reader.read(piece)
        parts += reader.finish()
        texts: list[tuple[str, str]] = [("x", "")]
        for state, more in parts:
            if state == texts[-1][0]:
                texts[-1] = (state, texts[-1][1] + more)
            else:
                texts.append((state, more))
        return texts

    assert found(cut(text, places)) == found(list(text))


def test_text_is_held_back_only_while_it_may_become_a_marker() -> None:
    stream = TextStream(
        Pieces(["a ", "<", "b", "\n", "c", "<think>", "d"]),
        stops=(),
        hidden=(),
        markup=QWEN.reading("", tools=True),
    )

    assert [stream.push(token) for token in range(7)] == [
        (Text("a "),),
        (),
        (Text("<b"),),
        (),
        (Text("\nc"),),
        (),
        (Thought("d"),),
    ]


# ── tokens ───────────────────────────────────────────────────────────────────────────────────


def test_tokens_of_thoughts_are_counted_with_their_markers() -> None:
    markup = QWEN.reading("", tools=True)

    for pieces, count in (
        (["a", "b"], 0),
        (["<think>", "b", "</think>", "c"], 3),
        (["<th", "ink>", "b", "c</think>d", "e"], 3),
        (["<think>", "b"], 2),
    ):
        assert read(pieces, markup)[1].num_reasoning == count
    begun = QWEN.reading("<think>", tools=True)
    assert read(["a", "</think>", "b"], begun)[1].num_reasoning == 2


CHANNELS = ModelMarkup(
    think=("<|channel>thought", "<channel|>"),
    call=("<|tool_call>", "<tool_call|>"),
    control=((0, "<|channel>"), (1, "<channel|>"), (2, "<|tool_call>"), (3, '<|"|>')),
)


def control(texts: Sequence[str], tokens: Sequence[int]) -> list[Piece]:
    """Of control tokens, which are hidden, and words: what is shown of ``tokens``."""
    stream = TextStream(
        Pieces(texts),
        stops=(),
        hidden={0, 1, 2, 3, EOS},
        markup=CHANNELS.reading("", tools=True),
    )
    found = [piece for token in tokens for piece in stream.push(token)]
    return joined([*found, *stream.finish()])


def test_control_tokens_are_read_where_they_are_markers_and_in_calls() -> None:
    texts = ["<|channel>", "<channel|>", "<|tool_call>", '<|"|>', "thought", "hm", "x"]

    assert control(texts, [0, 4, 5, 1, 6]) == [Thought("hm"), Text("x")]
    assert control(texts, [6, 3, 6]) == [Text("xx")], "and nowhere else"
    assert control(texts, [2, 6, 3, 6, EOS]) == [CallText('x<|"|>x')]
    assert control(texts, [6, 0, 6]) == [Text("xx")], "half a marker is no text"


def test_a_state_that_is_for_nobody_is_not_shown() -> None:
    """As the headers of models whose answers are several messages."""
    model = ModelMarkup(
        call=("<calls>", "</calls>"),
        edges=(
            Edge("header", "to=self|", REASONING),
            Edge("header", "to=user|", CONTENT),
            Edge("header", "<calls>", CALL),
            Edge(REASONING, "<eom>", "header"),
        ),
        initial="header",
    )
    text = "to=self|hm<eom>start to=f|<calls>x</calls>so"

    found, _ = read(list(text), model.reading("", tools=True))

    assert found == [Thought("hm"), CallText("x"), Text("so")]
