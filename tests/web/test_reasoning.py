"""Thoughts over real sockets: what is told of them, under which name, and how they are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import talker
from tests.web.serving import Server, chat, serving
from tests.web.test_tools import LOOK, put_together, says, server, whole

__all__ = ["server"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPENS = {"chat_template_kwargs": {"opens": True}}
"""The template begins the thought."""


async def test_thoughts_are_split_off_exactly(server: Server) -> None:
    """B98."""
    found = await whole(server, "hi", **says(" thinks"))

    assert found["message"]["reasoning_content"] == "I think"
    assert found["message"]["content"] == "I am."
    assert found["finish_reason"] == "stop"
    details = found["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 4}
    assert found["usage"]["completion_tokens"] == 8, "thoughts included, and the last one"


async def test_a_thought_that_is_cut_is_no_answer(server: Server) -> None:
    """B98: in both modes."""
    for ask in (whole, put_together):
        found = await ask(server, "hi", max_tokens=5, **says(" endless"))
        assert found["message"]["reasoning_content"] == "what is all this "
        assert found["message"]["content"] == ""
        assert found["finish_reason"] == "length"


async def test_a_thought_that_the_template_begins_is_one(server: Server) -> None:
    for ask in (whole, put_together):
        found = await ask(server, "hi", **OPENS)
        assert found["message"]["reasoning_content"] == "a thought"
        assert found["message"]["content"] == "an answer"
        assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_stop_strings_are_not_looked_for_in_thoughts(server: Server) -> None:
    found = await whole(server, "hi", stop=["I"], **says(" thinks"))

    assert found["message"]["reasoning_content"] == "I think"
    assert found["message"]["content"] == ""
    assert found["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("reasoning_content", {"reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("both", {"reasoning_content", "reasoning"}),
    ],
)
async def test_the_field_has_the_name_that_the_setting_gives_it(
    tmp_path: Path, setting: str, names: set[str]
) -> None:
    """Clients read one or the other."""
    async with serving(talker.build(tmp_path), tmp_path, reasoning_field=setting) as named:
        answer = await named.chat("hi", **says(" thinks"))
        frames = await named.stream("hi", **says(" thinks"))
    message = answer["choices"][0]["message"]
    deltas = [json.loads(f)["choices"][0]["delta"] for f in frames[:-1]]

    assert {name for name in message if "reasoning" in name} == names
    assert {name for delta in deltas for name in delta if "reasoning" in name} == names


async def test_anthropics_client_reads_thoughts_whole_and_streamed(server: Server) -> None:
    client = server.anthropic(_strict_response_validation=True)
    asked: Any = {
        "model": server.model,
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "hi"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "extra_body": {**says(" thinks"), "temperature": 0},
    }

    answer = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()

    for found in (answer, final):
        thought, text = found.content
        assert thought.type == "thinking"
        assert thought.thinking == "I think"
        assert thought.signature
        assert text.type == "text"
        assert text.text == "I am."
        assert found.stop_reason == "end_turn"
    assert "signature" in kinds
    assert "thinking" in kinds


async def test_a_budget_that_no_template_asks_for_is_named_as_ignored(server: Server) -> None:
    body = {
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "hi"}],
        "thinking": {"type": "enabled", "budget_tokens": 5},
    }
    _, _, headers = await server.post({**body, "service_tier": "auto"}, "/v1/messages")

    assert headers["x-omlx-ignored"] == "service_tier,thinking.budget_tokens"


async def test_a_cut_thought_is_an_incomplete_item_of_a_response(server: Server) -> None:
    body = {"input": "hi", "max_output_tokens": 5, "temperature": 0, **says(" endless")}
    _, answer, _ = await server.post(body, "/v1/responses")
    events = await server.events(body, "/v1/responses")

    for found in (answer, events[-1][1]["response"]):
        assert found["status"] == "incomplete"
        (item,) = found["output"]
        assert (item["type"], item["status"]) == ("reasoning", "incomplete")
        assert item["content"] == [{"type": "reasoning_text", "text": "what is all this "}]
        assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    told = [data["delta"] for name, data in events if name == "response.reasoning_text.delta"]
    assert "".join(told) == "what is all this "


async def test_logprobs_go_with_what_was_said(server: Server) -> None:
    """A response has a place for those of its text alone; a chat tells those of every token."""
    body = {"input": "hi", "temperature": 0, **says(" thinks")}
    body |= {"include": ["message.output_text.logprobs"]}
    _, answer, _ = await server.post(body, "/v1/responses")
    events = await server.events(body, "/v1/responses")
    chatted = await server.chat("hi", logprobs=True, **says(" thinks"))
    frames = await server.stream("hi", logprobs=True, **says(" thinks"))

    entries = answer["output"][1]["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == [">I am", ".", talker.EOS]
    told = [data["logprobs"] for name, data in events if name == "response.output_text.delta"]
    assert [entry["token"] for some in told for entry in some] == [">I am", ".", talker.EOS]
    every = [*talker.TAPES[" thinks"]]
    content = chatted["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == every
    streamed = [json.loads(frame)["choices"][0]["logprobs"] for frame in frames[:-1]]
    assert [e["token"] for some in streamed if some for e in some["content"]] == every


async def test_a_raw_completion_is_text_throughout(server: Server) -> None:
    """It has no conversation, so no markup either."""
    body = {"prompt": " thinks", "temperature": 0}
    status, answer, _ = await server.post(body, "/v1/completions")

    assert status == 200
    assert answer["choices"][0]["text"] == "<think>I think</think>I am."
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_what_only_fills_the_cache_thinks_nothing(server: Server) -> None:
    answer = await server.chat("hi", max_tokens=0, tools=[LOOK], **OPENS)

    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_thoughts_of_an_earlier_turn_reach_the_prompt(server: Server) -> None:
    turn = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    body = {"messages": [*chat("a")["messages"], turn, *chat("b")["messages"]]}
    _, answer, _ = await server.post(body, "/apply-template")

    assert "<think>\nhm\n</think>\n\nso" in answer["prompt"]
