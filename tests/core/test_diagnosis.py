"""What is said of a prompt that changed is true, and nothing is said where nothing is known."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from omlx.core import diagnosis
from omlx.core.chat import ChatMessage, Conversation, ToolCall
from omlx.core.diagnosis import (
    CLOSING_TOKENS,
    HASH_BYTES,
    STRIDE,
    Change,
    Diagnosis,
    Fingerprint,
    Occasion,
    Section,
    fingerprint,
)

PLAIN = Occasion()
tokens = st.lists(st.integers(0, 1), max_size=6 * STRIDE)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def chat(
    *turns: str, system: str = "Be kind.", tools: str = "ab", options: dict[str, Any] | None = None
) -> Conversation:
    """Turns of a user and an assistant, by turns."""
    roles = ("user", "assistant")
    messages = [ChatMessage(roles[i % 2], turn) for i, turn in enumerate(turns)]
    return Conversation(
        (ChatMessage("system", system), *messages),
        json.dumps([tool(name) for name in tools]),
        json.dumps(options) if options is not None else None,
    )


def drawn(conversation: Conversation) -> list[int]:
    """A template without surprises: tools, system text, turns, the beginning of an answer."""
    parts = [conversation.tools or "", *(message.text for message in conversation.messages)]
    return [ord(char) for part in parts for char in part.ljust(40, "~")] + [0, 1, 2]


def taken(conversation: Conversation, occasion: Occasion = PLAIN) -> Fingerprint:
    return fingerprint(conversation, drawn(conversation), occasion)


def change(before: Conversation, after: Conversation) -> Change | None:
    known = Diagnosis()
    known.remember("before", taken(before))
    found = known.compare(taken(after), "before")
    assert found is not None
    return found.change


# ── which part ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("after", "section"),
    [
        (chat("one", "two", tools="abc"), Section.TOOLS),
        (chat("one", "two", tools="a"), Section.TOOLS),
        (chat("one", "two", tools="ba"), Section.TOOLS),
        (chat("one", "two", tools="ba", system="Be brief."), Section.TOOLS),
        (chat("one", "two", system="Be brief."), Section.SYSTEM),
        (chat("other", "two", system="Be brief."), Section.SYSTEM),
        (chat("other", "two"), Section.MESSAGES),
        (chat("one", "other", "three"), Section.MESSAGES),
    ],
)
def test_the_first_part_that_differs_is_named(after: Conversation, section: Section) -> None:
    found = change(chat("one", "two"), after)

    assert found is not None
    assert (found.since, found.section) == ("before", section)


def test_the_turn_is_counted_without_system_messages() -> None:
    found = change(chat("one", "two", "three"), chat("one", "two", "other", "four"))

    assert found is not None
    assert found.message == 2


def test_tools_that_only_moved_are_told_apart() -> None:
    moved, more = (change(chat("one"), chat("one", tools=tools)) for tools in ("ba", "bac"))

    assert moved is not None
    assert moved.reordered
    assert more is not None
    assert not more.reordered


@pytest.mark.parametrize(
    "after",
    [
        chat("one", "two"),
        chat("one", "two", "three"),
        chat("one", "two", "three", "four", "five"),
        chat("one"),
    ],
)
def test_what_goes_on_repeats_or_is_shorter_has_not_changed(after: Conversation) -> None:
    assert change(chat("one", "two"), after) is None


def test_what_clients_change_from_turn_to_turn_is_no_change() -> None:
    """Breakpoints move on, thoughts are dropped, calls are named anew."""
    call = ToolCall("id-1", "look", "{}")
    turn = ChatMessage("assistant", "hm", tool_calls=(call,), reasoning="so", breaks=(1,))
    plain = replace(turn, tool_calls=(replace(call, id="id-2"),), reasoning=None, breaks=())
    user = ChatMessage("user", "hi")

    assert change(Conversation((user, turn)), Conversation((user, plain))) is None


def test_the_same_words_in_another_prompt_are_the_options_or_the_template() -> None:
    same, other = chat("one"), chat("one", options={"style": "x"})
    thinks = chat("one", options={"enable_thinking": True})
    moved = [0, *drawn(same)]

    def told(conversation: Conversation) -> Change | None:
        known = Diagnosis()
        known.remember("before", taken(same))
        found = known.compare(fingerprint(conversation, moved, PLAIN), "before")
        assert found is not None
        return found.change

    options, thinking, template = told(other), told(thinks), told(same)

    assert options is not None
    assert thinking is not None
    assert template is not None
    assert (options.section, options.thinking) == (Section.OPTIONS, False)
    assert (thinking.section, thinking.thinking) == (Section.OPTIONS, True)
    assert template.section is Section.TEMPLATE


def test_another_salt_shares_nothing() -> None:
    known = Diagnosis()
    known.remember("before", taken(chat("one")))
    found = known.compare(taken(chat("one"), Occasion(salt="x")), "before")

    assert found is not None
    assert found.change is not None
    assert (found.change.section, found.change.shared_tokens) == (Section.SALT, 0)


# ── what it cost ─────────────────────────────────────────────────────────────────────────────


@given(tokens, tokens)
def test_shared_tokens_are_known_to_within_a_stride(one: list[int], other: list[int]) -> None:
    pairs = zip(one, other, strict=False)
    exact = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    user = Conversation((ChatMessage("user", "hi"),))

    found = fingerprint(user, one, PLAIN).shared_tokens(fingerprint(user, other, PLAIN))

    assert found == exact // STRIDE * STRIDE


def test_the_cost_is_what_the_earlier_prompt_had_behind_the_difference() -> None:
    before, after = chat("one", "two", "three"), chat("one", "other", "three")
    found = change(before, after)
    exact = next(
        i for i, (a, b) in enumerate(zip(drawn(before), drawn(after), strict=True)) if a != b
    )

    assert found is not None
    behind = len(drawn(before)) - 1 - exact
    assert behind <= found.missed_tokens(0) < behind + STRIDE


def test_what_was_found_elsewhere_cost_nothing() -> None:
    found = change(chat("one", "two"), chat("other", "two"))

    assert found is not None
    assert found.missed_tokens(found.reusable_tokens) == 0
    assert found.as_json(found.reusable_tokens) is None
    assert found.as_json(0) == {
        "section": "messages",
        "since": "before",
        "message": 0,
        "token": found.shared_tokens,
        "missed_tokens": found.missed_tokens(0),
    }


def test_a_shorter_prompt_cannot_have_missed_more_than_it_has() -> None:
    found = change(chat("one", *["more"] * 20), chat("other"))

    assert found is not None
    assert found.missed_tokens(0) < len(drawn(chat("other")))


def test_the_beginning_of_an_answer_is_no_difference() -> None:
    """A prompt ends with it, and the answer that comes back reads differently there."""
    before = chat("one")
    prompt = drawn(before)
    longer = [*prompt[: len(prompt) - CLOSING_TOKENS + STRIDE], *range(1000, 1100)]
    known = Diagnosis()
    known.remember("before", taken(before))

    found = known.compare(fingerprint(chat("one", "two"), longer, PLAIN), "before")

    assert found is not None
    assert found.change is None


# ── with which one ───────────────────────────────────────────────────────────────────────────


def best(known: Diagnosis, now: Fingerprint) -> str | None:
    found = known.compare_with_best(now)
    return found.change.since if found and found.change else None


def test_an_id_that_is_not_known_is_nothing() -> None:
    assert Diagnosis().compare(taken(chat("one")), "gone") is None


def test_other_conversations_say_nothing() -> None:
    known = Diagnosis()
    known.remember("other", taken(chat("something else")))
    known.remember("salted", taken(chat("one"), Occasion(salt="x")))

    assert known.compare_with_best(taken(chat("one", system="Be brief."))) is None
    assert known.compare_with_best(fingerprint(Conversation(()), [], PLAIN)) is None


def test_a_group_is_one_conversation_whatever_it_begins_with() -> None:
    known = Diagnosis()
    known.remember("before", taken(chat("one"), Occasion(group="g")))

    assert best(known, taken(chat("other"), Occasion(group="g"))) == "before"
    assert best(known, taken(chat("other"), Occasion(group="h"))) is None
    assert best(known, taken(chat("other"))) is None


def test_the_one_that_shares_most_is_compared_and_of_equals_the_last() -> None:
    known = Diagnosis()
    known.remember("short", taken(chat("one", "x", "three")))
    known.remember("long", taken(chat("one", "two", "three", "four")))
    known.remember("again", taken(chat("one", "two", "three", "four")))
    known.remember("last", taken(chat("one", "y", "three")))

    assert best(known, taken(chat("one", "two", "other", "four"))) == "again"


def test_a_prompt_that_goes_on_from_one_of_them_has_not_changed() -> None:
    known = Diagnosis()
    known.remember("branch", taken(chat("one", "x", "three")))
    known.remember("trunk", taken(chat("one", "two", "three")))

    found = known.compare_with_best(taken(chat("one", "two", "three", "four", "five")))

    assert found is not None
    assert found.change is None


# ── bounds ───────────────────────────────────────────────────────────────────────────────────


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "FINGERPRINTS_MAX", 2)
    known = Diagnosis()
    for name in ("a", "b", "a", "c"):
        known.remember(name, taken(chat(name)))

    assert len(known) == 2
    assert known.compare(taken(chat("b")), "b") is None
    assert known.compare(taken(chat("a")), "a") is not None


def test_long_prompts_count_by_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    one = taken(chat("a"))
    monkeypatch.setattr(diagnosis, "MARKS_BYTES_MAX", 2 * len(one.marks))
    known = Diagnosis()
    for name in ("a", "b", "c"):
        known.remember(name, one)

    assert len(known) == 2
    known.remember("longer than all", replace(one, marks=bytes(3 * len(one.marks))))
    assert len(known) == 0


def test_no_text_is_kept() -> None:
    found = repr(taken(chat("a secret", system="hidden"), Occasion("salt", "somebody")))

    assert not any(word in found for word in ("secret", "hidden", "salt=b'salt", "somebody"))
    assert len(taken(chat("a")).marks) == len(drawn(chat("a"))) // STRIDE * HASH_BYTES
