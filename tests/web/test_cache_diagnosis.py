"""Clients are told which part of a prompt changed, in the fields that their makers gave it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from openai.types.responses import Response

from omlx.core.diagnosis import STRIDE
from tests import talker
from tests.web.serving import Server, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

ModelPath = Callable[[str], Path]
SYSTEM = "Answer in a few words, and be kind to whoever asks. "
TOOLS: Any = [
    {"name": name, "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
    for name in ("look", "listen")
]
FUNCTIONS: Any = [
    {"type": "function", "name": tool["name"], "parameters": tool["input_schema"], "strict": False}
    for tool in TOOLS
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """Of a model whose template shows tools."""
    model = talker.build(tmp_path_factory.mktemp("models"))
    async with serving(model, tmp_path_factory.mktemp("home")) as running:
        yield running


def turns(*texts: str) -> Any:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


class Messages:
    """Anthropic's strict client; each conversation begins with a name of its own."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name = server, name
        self.client = server.anthropic(_strict_response_validation=True)

    def fields(self, *texts: str, **fields: Any) -> dict[str, Any]:
        return {
            "model": self.server.model,
            "max_tokens": 1,
            "system": f"{self.name}. {SYSTEM}",
            "tools": TOOLS,
            "messages": turns(*texts),
            **fields,
        }

    async def ask(
        self, *texts: str, after: str | None = None, **fields: Any
    ) -> anthropic.types.Message:
        asked = self.fields(*texts, diagnostics={"previous_message_id": after}, **fields)
        return await self.client.messages.create(**asked)


def reason(message: anthropic.types.Message) -> Any:
    assert message.diagnostics is not None
    return message.diagnostics.cache_miss_reason


def prompt_tokens(message: anthropic.types.Message) -> int:
    usage = message.usage
    read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    return usage.input_tokens + read + written


# ── messages ─────────────────────────────────────────────────────────────────────────────────


async def test_a_conversation_that_goes_on_has_no_reason(server: Server) -> None:
    talk = Messages(server, "goes on")
    first = await talk.ask("hello")
    second = await talk.ask("hello", "hi", "more", after=first.id)
    again = await talk.ask("hello", "hi", "more", after=second.id)

    assert first.diagnostics is second.diagnostics is again.diagnostics is None


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"system": "short"}, "system_changed"),
        ({"tools": TOOLS[:1]}, "tools_changed"),
        ({"tools": TOOLS[::-1]}, "tools_changed"),
        ({"messages": turns("another question", "hi", "more")}, "messages_changed"),
    ],
)
async def test_what_changed_is_named_with_its_cost(
    server: Server, fields: dict[str, Any], kind: str
) -> None:
    """The cost is what the earlier prompt had beyond what was found."""
    talk = Messages(server, f"changed {kind} {sorted(fields)} {len(str(fields))}")
    texts = ("a question of some length", "hi", "more")
    first = await talk.ask(*texts)
    changed = await talk.ask(*texts, after=first.id, **fields)

    found = reason(changed)
    shared = changed.usage.cache_read_input_tokens or 0
    reusable = min(prompt_tokens(first), prompt_tokens(changed) - 1)
    assert found.type == kind
    assert 0 <= found.cache_missed_input_tokens - (reusable - shared) <= STRIDE


async def test_what_was_found_after_all_was_not_missed(server: Server) -> None:
    talk = Messages(server, "found after all")
    first = await talk.ask("one question")
    other = await talk.ask("another question", after=first.id)
    again = await talk.ask("another question", after=first.id)

    assert reason(other).type == "messages_changed"
    assert again.diagnostics is None


async def test_a_stream_tells_it_first(server: Server) -> None:
    talk = Messages(server, "a stream")
    first = await talk.ask("hello")
    asked = talk.fields(
        "hello", system="another one", diagnostics={"previous_message_id": first.id}
    )
    events = [event async for event in await talk.client.messages.create(**asked, stream=True)]

    assert events[0].type == "message_start"
    assert reason(events[0].message).type == "system_changed"


async def test_an_id_that_is_not_known_is_not_found(server: Server) -> None:
    found = await Messages(server, "unknown").ask("hello", after="msg_gone")

    assert reason(found).type == "previous_message_not_found"


async def test_what_has_no_name_of_theirs_is_unavailable(server: Server) -> None:
    talk = Messages(server, "unavailable")
    first = await talk.ask("hello")
    salted = await talk.ask("hello", after=first.id, extra_body={"cache_salt": "x"})
    uncached = await talk.ask("hello", after=first.id, extra_body={"cache_prompt": False})

    assert reason(salted).type == "unavailable"
    assert reason(uncached).type == "unavailable"


async def test_nobody_is_told_who_did_not_ask(server: Server) -> None:
    talk = Messages(server, "not asked")
    first = await talk.client.messages.create(**talk.fields("hello"))
    other = await talk.client.messages.create(**talk.fields("hello", system="another"))

    assert first.diagnostics is other.diagnostics is None


async def test_a_request_that_was_refused_is_not_remembered(server: Server) -> None:
    talk = Messages(server, "refused")
    body = talk.fields("hello " * 1000)
    status, answer, _ = await server.post(body, "/v1/messages")
    found = await talk.ask("hello", after=answer["request_id"])

    assert status == 400
    assert reason(found).type == "previous_message_not_found"


# ── responses ────────────────────────────────────────────────────────────────────────────────


class Responses:
    """OpenAI's strict client."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name = server, name
        self.client = server.client(_strict_response_validation=True)

    async def ask(self, *texts: str, after: str | None = None, **fields: Any) -> Response:
        asked: dict[str, Any] = {
            "model": self.server.model,
            "max_output_tokens": 1,
            "instructions": f"{self.name}. {SYSTEM}",
            "tools": FUNCTIONS,
            "input": turns(*texts),
            "prompt_cache_options": {"comparison_response_id": after} if after else {},
            **fields,
        }
        return await self.client.responses.create(**asked)


def diagnosed(response: Response) -> Any:
    found = response.prompt_cache_diagnostics
    assert found is not None
    return found


async def test_a_response_that_goes_on_is_a_hit(server: Server) -> None:
    talk = Responses(server, "goes on")
    first = await talk.ask("hello")
    second = await talk.ask("hello", "hi", "more", after=first.id)

    assert first.prompt_cache_diagnostics is None
    assert diagnosed(second).type == "cache_hit"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"instructions": "short"}, "input_changed"),
        ({"tools": FUNCTIONS[:1]}, "tools_changed"),
        ({"input": turns("another question", "hi", "more")}, "input_changed"),
    ],
)
async def test_what_changed_in_a_response_is_named_with_its_cost(
    server: Server, fields: dict[str, Any], kind: str
) -> None:
    talk = Responses(server, f"changed {kind} {sorted(fields)}")
    texts = ("a question of some length", "hi", "more")
    first = await talk.ask(*texts)
    found = diagnosed(await talk.ask(*texts, after=first.id, **fields))

    assert (found.type, found.reason) == ("cache_miss", kind)
    assert first.usage is not None
    assert found.comparison_reusable_tokens % STRIDE == 0
    assert found.comparison_reusable_tokens + found.cache_missed_tokens <= first.usage.input_tokens


async def test_a_streamed_response_tells_it_at_its_end(server: Server) -> None:
    talk = Responses(server, "streamed")
    first = await talk.ask("hello")
    stream = await talk.client.responses.create(
        model=server.model,
        max_output_tokens=1,
        instructions="another",
        input=turns("hello"),
        prompt_cache_options={"comparison_response_id": first.id},
        stream=True,
    )
    events = [event async for event in stream]

    assert events[-1].type == "response.incomplete"
    assert diagnosed(events[-1].response).reason == "tools_changed"


async def test_a_response_that_nobody_knows_is_not_found(server: Server) -> None:
    found = await Responses(server, "unknown").ask("hello", after="resp_gone")

    assert diagnosed(found).type == "comparison_response_not_found"


async def test_the_same_prompt_that_is_not_there_any_more_is_no_hit(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """It did not change, and it was not found: they have no name for that."""
    async with serving(model_path("tape"), tmp_path, ssd_cache_max_size=0) as server:
        talk = Responses(server, "gone")
        first = await talk.ask("hello", tools=[])
        await server.clear_memory()
        second = await talk.ask("hello", tools=[], after=first.id)

    assert diagnosed(second).type == "unavailable"


# ── our own extension, in every dialect ──────────────────────────────────────────────────────


async def changed(server: Server, path: str, body: dict[str, Any]) -> Any:
    status, answer, _ = await server.post(body, path)
    assert status == 200, answer
    return answer["omlx"]["changed"]


async def test_without_an_id_the_earlier_request_most_like_it_is_meant(server: Server) -> None:
    def chat(system: str, *texts: str, **fields: Any) -> dict[str, Any]:
        said = {"role": "system", "content": system}
        return {"messages": [said, *turns(*texts)], "max_tokens": 1, **fields}

    path = "/v1/chat/completions"
    first = await changed(server, path, chat("It is 10:01. Be kind.", "what is our own?"))
    second = await changed(server, path, chat("It is 10:02. Be kind.", "what is our own?"))
    goes_on = await changed(server, path, chat("It is 10:02. Be kind.", "what is our own?", "x"))
    other = await changed(server, path, chat("Be brief.", "something else"))

    assert first is goes_on is other is None
    assert second["section"] == "system"
    assert second["since"].startswith("chatcmpl-")
    assert second["missed_tokens"] > 0


async def test_a_turn_that_was_edited_is_named_by_its_place(server: Server) -> None:
    body = {"max_tokens": 1, "messages": turns("what is edited?", "this", "and more")}
    await changed(server, "/v1/messages", body)
    edited = {**body, "messages": turns("what is edited?", "that, which is longer", "and more")}

    found = await changed(server, "/v1/messages", edited)

    assert (found["section"], found["message"]) == ("messages", 1)


async def test_prompts_that_are_no_conversations_are_not_compared(server: Server) -> None:
    body = {"prompt": "some text " * 5, "max_tokens": 1}
    await changed(server, "/v1/completions", body)

    assert await changed(server, "/v1/completions", {**body, "prompt": "other text"}) is None


async def test_the_request_list_and_the_log_say_it_too(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"max_tokens": 1, "system": "one", "messages": turns("for the list")}
    await server.post(body, "/v1/messages")
    caplog.set_level("INFO")
    async with server.watching() as ended:
        await server.post({**body, "system": "two"}, "/v1/messages")
        row = await ended()

    assert row["omlx"]["changed"]["section"] == "system"
    assert any("changed=system missed_tokens=" in record.message for record in caplog.records)


async def test_counting_and_rendering_leave_no_trace(server: Server) -> None:
    body = {"system": "counted", "messages": turns("counted only")}
    await server.post(body, "/v1/messages/count_tokens")

    found = await changed(server, "/v1/messages", {**body, "system": "other", "max_tokens": 1})

    assert found is None
