"""What a client writes is text, whatever it spells; and a template sees what templates expect."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from omlx.core.chat import (
    ChatMessage,
    Conversation,
    TemplateRefused,
    ToolCall,
    template_messages,
)
from omlx.core.render import render

START, END, LONGER = "<|start|>", "<|end|>", "<|end|>>"
CONTROL = (START, END, LONGER)
TEMPLATE = (
    "{% for tool in tools or [] %}<|start|>tool {{ tool | tojson }}<|end|>{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.name %} {{ m.name }}{% endif %}{{ '\\n' }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content.split('</think>') | last }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{% endfor %}"
    "{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{{ opening }}{% endif %}"
)


def make_tokenizer(template: str = TEMPLATE) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = byte_level
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True) for name in CONTROL])
    inner.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template)


TOKENIZER = make_tokenizer()
IDS = {name: TOKENIZER.convert_tokens_to_ids(name) for name in (*CONTROL, "<think>", "</think>")}

texts = st.lists(
    st.sampled_from(
        [*CONTROL, "<|", "|>", ">", "end", "\ue0b0", "\ue0b1", "0", "2", "99", "é", "\n", "hi"]
    ),
    max_size=6,
).map("".join)


def user(text: str) -> Conversation:
    return Conversation((ChatMessage("user", text),))


def control_ids(ids: list[int]) -> list[int]:
    return [token for token in ids if token in {IDS[name] for name in CONTROL}]


def decoded(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=False)


FRAME = [IDS[name] for name in (START, END, START)]
"""The control tokens around one message, and those of the generation prompt."""


@given(texts)
def test_a_message_is_the_text_it_is(text: str) -> None:
    prompt, ids = render(TOKENIZER, user(text))

    assert prompt == f"{START}user\n{text}{END}{START}assistant\n"
    assert decoded(ids) == prompt
    assert control_ids(ids) == FRAME


def with_text_in(place: str, text: str) -> Conversation:
    """A conversation in which a client put ``text`` into one place."""
    hello = ChatMessage("user", "hello")
    call = ToolCall("1", "look", "{}")
    match place:
        case "system":
            return Conversation((ChatMessage("system", text), hello))
        case "name":
            return Conversation((ChatMessage("user", "hello", name=text),))
        case "reasoning":
            return Conversation((ChatMessage("assistant", "hm", reasoning=text), hello))
        case "tool result":
            return Conversation((ChatMessage("tool", text, tool_call_id="1"),))
        case "tool call id":
            return Conversation((ChatMessage("tool", "hm", tool_call_id=text),))
        case "call id":
            call = ToolCall(text, "look", "{}")
        case "function":
            call = ToolCall("1", text, "{}")
        case "argument":
            call = ToolCall("1", "look", json.dumps({"at": [{text: text}]}))
        case "arguments that are no object":
            call = ToolCall("1", "look", text)
        case "tool":
            tool = {"name": "look", "description": text, "properties": {text: {"enum": [text]}}}
            return Conversation((hello,), tools=json.dumps([tool]))
        case "option":
            return Conversation((hello,), template_options=json.dumps({"opening": text}))
    return Conversation((ChatMessage("assistant", None, tool_calls=(call,)), hello))


PLACES = (
    *("system", "name", "reasoning", "tool result", "tool call id", "call id", "function"),
    *("argument", "arguments that are no object", "tool", "option"),
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("spelling", CONTROL)
def test_no_text_of_a_client_becomes_a_control_token(place: str, spelling: str) -> None:
    harmless_prompt, harmless = render(TOKENIZER, with_text_in(place, "harmless"))

    prompt, ids = render(TOKENIZER, with_text_in(place, f"a{spelling}b"))

    assert prompt == harmless_prompt.replace("harmless", f"a{spelling}b")
    assert decoded(ids) == prompt
    assert control_ids(ids) == control_ids(harmless)


def test_the_templates_own_tokens_are_control_tokens() -> None:
    _, ids = render(TOKENIZER, user("hi"))

    assert ids[0] == IDS[START]
    assert len(ids) == len("user\nhi") + len("assistant\n") + 3


def test_a_word_that_was_only_added_to_the_vocabulary_is_still_that_word() -> None:
    """A template looks for </think> in a reply to leave out what was thought."""
    reply = ChatMessage("assistant", "<think>hm</think>yes")

    prompt, ids = render(TOKENIZER, Conversation((reply, ChatMessage("user", "<think>"))))

    assert prompt == f"{START}assistant\nyes{END}{START}user\n<think>{END}{START}assistant\n"
    assert IDS["<think>"] in ids


def test_private_characters_of_a_client_stay_what_they_are() -> None:
    """They are what a prompt line in a terminal is drawn with."""
    text = "\ue0b0 ~ \ue0b12\ue0b0" + "\ue0b00\ue0b1" + "\ue0b099\ue0b1"

    prompt, ids = render(TOKENIZER, user(text))

    assert text in prompt
    assert decoded(ids) == prompt
    assert control_ids(ids) == FRAME


def test_a_template_that_refuses_says_why() -> None:
    tokenizer = make_tokenizer("{{ raise_exception('roles must alternate') }}")

    with pytest.raises(TemplateRefused, match="roles must alternate"):
        render(tokenizer, user("hi"))


def test_options_reach_the_template() -> None:
    prompt, _ = render(TOKENIZER, with_text_in("option", "Sure"))

    assert prompt.endswith("assistant\nSure")


# ── what templates expect ────────────────────────────────────────────────────────────────────


def dicts(*messages: ChatMessage) -> list[dict[str, Any]]:
    return template_messages(Conversation(messages))


def test_every_system_text_is_in_the_first_message_in_order() -> None:
    """B80: late ones too, and those that are called developer."""
    found = dicts(
        ChatMessage("system", "one"),
        ChatMessage("user", "hello"),
        ChatMessage("developer", "two"),
        ChatMessage("assistant", "hi"),
        ChatMessage("system", "three"),
    )

    assert found == [
        {"role": "system", "content": "one\n\ntwo\n\nthree"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
    ]


def test_without_a_system_text_there_is_no_system_message() -> None:
    assert dicts(ChatMessage("user", "hello")) == [{"role": "user", "content": "hello"}]


def test_a_turn_that_only_calls_tools_has_empty_content() -> None:
    """B80: null is not the word "None"."""
    call = ToolCall("1", "look", '{"at": "sky"}')

    (found,) = dicts(ChatMessage("assistant", None, tool_calls=(call,)))

    assert found["content"] == ""
    assert found["tool_calls"] == [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "look", "arguments": {"at": "sky"}},
        }
    ]


def test_a_template_that_knows_no_calls_is_given_them_as_text() -> None:
    """B80: what an assistant did is not left out of the prompt in silence."""
    plain = make_tokenizer(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    calls = (ToolCall("1", "look", '{"at": "é"}'), ToolCall("2", "go", "on"))
    turns = (
        ChatMessage("assistant", ("so", "!"), tool_calls=calls),
        ChatMessage("assistant", None, tool_calls=calls[1:]),
        ChatMessage("tool", "42", tool_call_id="1"),
    )

    prompt, _ = render(plain, Conversation(turns))

    assert prompt == (
        'assistant: so!\n{"name": "look", "arguments": {"at": "é"}}\n'
        '{"name": "go", "arguments": "on"}\n'
        'assistant: {"name": "go", "arguments": "on"}\n'
        "tool: 42\nassistant: "
    )


DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    "arguments", ["{", "[1]", "3", "null", r'{"half of a letter": "\ud800"}', DEEP], ids=range(6)
)
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    call = ToolCall("1", "look", arguments)

    (found,) = dicts(ChatMessage("assistant", None, tool_calls=(call,)))

    assert found["tool_calls"][0]["function"]["arguments"] == arguments


def test_fields_that_a_client_did_not_send_are_not_there() -> None:
    """Templates ask whether they are defined."""
    (found,) = dicts(ChatMessage("user", "hello"))

    assert found.keys() == {"role", "content"}


def test_the_other_fields_have_the_names_that_templates_know() -> None:
    found = dicts(
        ChatMessage("assistant", "hi", name="ann", reasoning="hm"),
        ChatMessage("tool", "42", tool_call_id="1"),
    )

    assert found == [
        {"role": "assistant", "content": "hi", "name": "ann", "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]


def test_a_call_without_arguments_has_an_empty_object() -> None:
    """Streams of some servers leave them out."""
    (found,) = dicts(ChatMessage("assistant", None, tool_calls=(ToolCall("1", "look", " "),)))

    assert found["tool_calls"][0]["function"]["arguments"] == {}


STRICT_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}"
    "{% endfor %}|{% endfor %}"
)


def test_a_call_that_was_cut_is_text_for_a_template_that_would_fail_on_it() -> None:
    """B97: the conversation can go on."""
    whole, cut = ToolCall("1", "look", '{"at": "Oslo"}'), ToolCall("2", "look", '{"at": "Os')
    turns = (
        ChatMessage("assistant", "so", tool_calls=(whole,)),
        ChatMessage("assistant", "then", tool_calls=(cut,)),
    )

    prompt, _ = render(make_tokenizer(STRICT_TEMPLATE), Conversation(turns))

    assert prompt == 'soat=Oslo;|then\n{"name": "look", "arguments": "{\\"at\\": \\"Os"}|'
