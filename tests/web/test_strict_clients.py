"""Every dialect, whole and streamed, by official clients that check each answer by its type.

Here are the calls that the tests of the dialects leave out.
"""

from __future__ import annotations

from typing import Any, Literal

import openai.types
import pydantic
import pytest

from tests import tiny
from tests.web.serving import Server, events

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "".join(tiny.TAPE[1:-1])
ASKED: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}


class Verdict(pydantic.BaseModel):
    good: bool
    score: Literal[1, 2, 3]


async def test_streamed_completions_but_for_the_reason_that_is_not_known_yet(
    server: Server,
) -> None:
    """OpenAI's own streams have null there, which its type forbids; all else is as the type says.

    So the pieces are read by the strict type once the null is a reason.
    """
    body = {"prompt": "\n", "stream": True, "logprobs": 1, "n": 2, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    async with server.http.post(f"{server.url}/v1/completions", json=body) as answer:
        *chunks, end = events(await answer.text())
    assert end == "[DONE]"

    found = [
        openai.types.Completion.model_validate_json(
            chunk.replace('"finish_reason":null', '"finish_reason":"stop"')
        )
        for chunk in chunks
    ]

    texts = {0: "", 1: ""}
    for chunk in found:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: TEXT, 1: TEXT}
    assert found[-1].usage is not None


async def test_messages_of_the_beta(server: Server) -> None:
    client = server.anthropic(_strict_response_validation=True)
    asked = {"model": server.model, **ASKED}

    whole = await client.beta.messages.create(**asked, betas=["extended-cache-ttl-2025-04-11"])
    async with client.beta.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    counted = await client.beta.messages.count_tokens(
        model=server.model, messages=ASKED["messages"]
    )

    said = [[(block.type, block.text) for block in m.content] for m in (whole, final)]  # pyright: ignore
    assert said == [[("text", TEXT)]] * 2
    assert final.stop_reason == whole.stop_reason == "end_turn"
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    usage = whole.usage
    read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    assert counted.input_tokens == usage.input_tokens + (read or 0) + (written or 0)


async def test_the_models_of_the_beta(server: Server) -> None:
    client = server.anthropic(_strict_response_validation=True)

    listed = [model async for model in client.beta.models.list()]

    assert [model.id for model in listed] == [server.model]
    assert await client.beta.models.retrieve(server.model) == listed[0]


async def test_a_response_in_the_form_of_a_type(server: Server) -> None:
    client = server.client(_strict_response_validation=True)

    response = await client.responses.parse(
        model=server.model, input="hi", text_format=Verdict, temperature=1
    )

    assert isinstance(response.output_parsed, Verdict)


async def test_a_streamed_chat_in_the_form_of_a_type(server: Server) -> None:
    client = server.client(_strict_response_validation=True)

    async with client.chat.completions.stream(
        model=server.model, messages=ASKED["messages"], response_format=Verdict, seed=2
    ) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()

    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Verdict)


async def test_a_message_in_the_form_of_a_type(server: Server) -> None:
    client = server.anthropic(_strict_response_validation=True)

    message = await client.messages.parse(
        model=server.model,
        messages=ASKED["messages"],
        max_tokens=512,
        output_format=Verdict,
        extra_body={"seed": 2},
    )

    assert isinstance(message.parsed_output, Verdict)
