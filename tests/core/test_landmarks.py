"""Where in a prompt its shared parts end is found for every template, and tools are inside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omlx.core.chat import ChatMessage, Conversation, ToolCall
from omlx.core.render import BREAKPOINTS_MAX, landmarks, render
from tests.core.test_render import TEMPLATE, decoded, make_tokenizer

TOOLS = '[{"name": "look"}]'
SYSTEM_FIRST = (
    "{% for m in messages %}{% if loop.first and m.role == 'system' %}<|start|>system\n"
    "{{ m.content }}{% for tool in tools or [] %}\n{{ tool | tojson }}{% endfor %}<|end|>"
    "{% else %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "<|start|>assistant\n"
)
IN_THE_USERS_TURN = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'user' and loop.index0 < 2 %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}<|start|>assistant\n"
)
TEMPLATES = [TEMPLATE, SYSTEM_FIRST, IN_THE_USERS_TURN]

SYSTEM = ChatMessage("system", "Be kind.")
USER = ChatMessage("user", "What is it?")


def before(conversation: Conversation, template: str = TEMPLATE) -> tuple[str, list[str]]:
    """The text of the system part, and that before each hint."""
    tokenizer = make_tokenizer(template)
    _, ids = render(tokenizer, conversation)
    num_system, hints = landmarks(tokenizer, conversation, ids)
    return decoded(ids[:num_system]), [decoded(ids[:count]) for count in hints]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_system_part_ends_before_the_user_and_behind_the_tools(template: str) -> None:
    text, _ = before(Conversation((SYSTEM, USER), TOOLS), template)

    assert "look" in text
    assert "kind" in text
    assert text.endswith(("user\n", "}\n"))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("first", ["", "Z", "7", "\n", "<|end|>"])
def test_two_users_share_it_whatever_they_write(template: str, first: str) -> None:
    conversation = Conversation((SYSTEM, ChatMessage("user", f"{first}one")), TOOLS)
    other = Conversation((SYSTEM, ChatMessage("user", "other")), TOOLS)
    tokenizer = make_tokenizer(template)
    _, ids = render(tokenizer, conversation)
    _, others = render(tokenizer, other)

    num_system, _ = landmarks(tokenizer, conversation, ids)

    assert ids[:num_system] == others[:num_system]
    assert num_system == landmarks(tokenizer, other, others)[0]


def test_a_breakpoint_is_where_its_block_ends() -> None:
    parts = ("a long document", "a question")
    user = ChatMessage("user", parts, breaks=(1,))

    _, hints = before(Conversation((SYSTEM, user, ChatMessage("assistant", "yes"), USER)))

    assert [hint.rpartition("\n")[2] for hint in hints] == ["a long document"]


def test_breakpoints_in_the_system_text_and_behind_tools() -> None:
    system = ChatMessage("system", ("always. ", "today."), breaks=(1,))
    conversation = Conversation((system, USER), TOOLS, break_after_tools=True)

    _, hints = before(conversation)

    assert [hint.rpartition("|>")[2] for hint in hints] == ["system\n", "system\nalways. "]
    assert all("look" in hint for hint in hints)


def test_the_end_of_the_system_text_is_the_end_of_the_system_part() -> None:
    """So the tools are inside, wherever the template puts them."""
    system = replace(SYSTEM, breaks=(1,))

    assert before(Conversation((system, USER), TOOLS), SYSTEM_FIRST)[1] == []


def test_a_breakpoint_behind_calls_has_them_inside() -> None:
    call = ToolCall("1", "look", "{}")
    called = ChatMessage("assistant", None, tool_calls=(call,), breaks=(1,))
    said = ChatMessage("tool", "nothing", tool_call_id="1", breaks=(1,))

    _, hints = before(Conversation((USER, called, said)))

    assert [hint.rpartition("|>")[2] for hint in hints] == ["tool\n", "tool\nnothing"]
    assert "look" in hints[0]


def test_a_breakpoint_behind_calls_that_nothing_follows_is_none() -> None:
    call = ToolCall("1", "look", "{}")
    called = ChatMessage("assistant", None, tool_calls=(call,), breaks=(1,))

    assert before(Conversation((USER, called)))[1] == []


def test_of_many_breakpoints_the_last_count() -> None:
    turns = [ChatMessage("user", f"turn {n}", breaks=(1,)) for n in range(BREAKPOINTS_MAX + 2)]

    _, hints = before(Conversation(tuple(turns)))

    last = [hint.rpartition("\n")[2] for hint in hints]
    assert last == [f"turn {n}" for n in range(2, BREAKPOINTS_MAX + 2)]


def test_control_tokens_that_a_client_spells_are_no_trouble() -> None:
    user = ChatMessage("user", ("say <|end|>", " again"), breaks=(1,))

    _, hints = before(Conversation((user, USER)))

    assert [hint.rpartition("\n")[2] for hint in hints] == ["say <|end|>"]


def test_a_template_that_takes_no_other_words_has_no_landmarks() -> None:
    refuses = "{% if messages[0].content != 'hi' %}{{ raise_exception('no') }}{% endif %}hi"
    conversation = Conversation((ChatMessage("user", "hi", breaks=(1,)),))

    assert before(conversation, refuses) == ("", [])


def test_without_a_user_there_is_no_system_part() -> None:
    assert before(Conversation((SYSTEM,))) == ("", [])
