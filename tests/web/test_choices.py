"""``n`` choices of one chat completion, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.web.serving import Server, chat, loop_for_ever

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "alpha beta gamma delta"


async def test_the_strict_client_accepts_two_choices(server: Server) -> None:
    client = server.client(_strict_response_validation=True)

    answer = await client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "two"}],
        n=2,
        logprobs=True,
        top_logprobs=2,
        temperature=0,
    )

    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    one, two = (choice.logprobs for choice in answer.choices)
    assert one is not None
    assert two is not None
    assert [t.token for t in one.content or ()] == [t.token for t in two.content or ()]


async def test_the_strict_client_accepts_two_streamed_choices(server: Server) -> None:
    client = server.client(_strict_response_validation=True)
    text = {0: "", 1: ""}
    reasons: dict[int, str] = {}
    usages: list[Any] = []

    stream = await client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "two"}],
        n=2,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing comes after a choice's end"
            text[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason

    assert text == {0: TEXT, 1: TEXT}
    assert reasons == {0: "stop", 1: "stop"}
    assert len(usages) == 1


async def test_the_prompt_counts_once_and_every_choice(server: Server) -> None:
    one = await server.chat("count", **loop_for_ever(max_tokens=5))
    async with server.watching() as ended:
        three = await server.chat("count", n=3, **loop_for_ever(max_tokens=5))
        record = await ended()

    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in three["choices"]} == {"length"}
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 15
    assert record["generated_tokens"] == 15
    assert record["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert record["id"] == three["id"]


async def test_seeded_choices_differ_and_come_again(server: Server) -> None:
    fields = {"n": 3, "seed": 4, "temperature": 2, "max_tokens": 12, "logit_bias": {}}

    first = await server.chat("seeded", **fields)
    again = await server.chat("seeded", **fields)
    last = await server.chat("seeded", **{**fields, "n": 1.0, "seed": 6})

    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert texts == [choice["message"]["content"] for choice in again["choices"]]
    assert last["choices"][0]["message"]["content"] == texts[2]


@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_of_choices_has_one_end(server: Server, usage: bool) -> None:
    found = await server.stream("end", n=2, stream_options={"include_usage": usage})

    assert found.count("[DONE]") == 1
    assert found[-1] == "[DONE]"
    chunks = [json.loads(event) for event in found[:-1]]
    roles = [c["index"] for chunk in chunks for c in chunk["choices"] if "role" in c["delta"]]
    assert roles == [0, 1]
    assert sum("omlx" in chunk for chunk in chunks) == 1
    assert "omlx" in chunks[-1]
    assert bool(chunks[-1].get("usage")) == usage


async def test_more_choices_than_can_run_at_once_are_refused_by_name(server: Server) -> None:
    status, answer, _ = await server.post(chat("many", n=5))

    assert status == 400
    assert answer["error"]["param"] == "n"
    assert "at most 4" in answer["error"]["message"]


@pytest.mark.parametrize("phase", ["prefill", "fork", "start"])
async def test_a_choice_that_fails_fails_the_request_and_no_other(
    server: Server, phase: str
) -> None:
    server.gate.break_at(phase)

    status, answer, _ = await server.post(chat(f"breaks at {phase} " * 9, n=3))

    assert status == 500, answer
    assert (await server.chat("next", n=2))["choices"][1]["message"]["content"] == TEXT


async def test_a_client_that_leaves_ends_every_choice(server: Server) -> None:
    async with server.watching() as ended:
        async with server.opened("leaves", n=3, **loop_for_ever(max_tokens=1500)):
            pass
        record = await ended()

    assert record["state"] == "cancelled"
    await server.handling(0)
