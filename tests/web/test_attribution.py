"""A line that an agent puts before its system text, new each time, is left out of the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omlx.core.chat import ChatMessage, Conversation, without_attribution
from tests.web.serving import Server, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

ModelPath = Callable[[str], Path]
HEADER = "x-anthropic-billing-header: cc_version=2.1.36.4d9; cc_entrypoint=cli; cch=0a1b2;"
REST = "You are a helpful agent. " * 5
USER = ChatMessage("user", "hi")


def left(*system: str | tuple[str, ...] | None) -> list[str | tuple[str, ...] | None]:
    """What is left of system messages that stand before a user's."""
    messages = (*(ChatMessage("system", content) for content in system), USER)
    found = without_attribution(Conversation(messages)).messages
    assert found[-1] == USER
    return [message.content for message in found[:-1]]


# ── the rule ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "header",
    [HEADER, HEADER[:-1], f"{HEADER}  ", "x-anthropic-billing-header: abc123",
     "x-anthropic-billing-header:", "x-anthropic-billing-header:a=1;b=2"],
)  # fmt: skip
async def test_a_leading_line_or_part_is_left_out(header: str, end: str) -> None:
    assert left(f"{header}{end}{REST}") == [(REST,)]
    assert left((header, REST)) == [(REST,)]
    assert left((f"{header}{end}", REST)) == [(REST,)]
    assert left((f"{header}{end}one", "two")) == [("one", "two")]


async def test_a_message_that_holds_nothing_else_is_left_out() -> None:
    assert left(HEADER) == []
    assert left((HEADER,), REST) == [REST]


@pytest.mark.parametrize(
    "text",
    [
        REST,
        "",
        f" {HEADER}\n{REST}",
        f"\n{HEADER}\n{REST}",
        f"{REST}\n{HEADER}",
        f"{HEADER} You are a helpful agent.",
        f"{HEADER} You are;\n{REST}",
        "x-anthropic-billing-headers: a=1;\nrest",
        "X-Anthropic-Billing-Header: a=1;\nrest",
        "the x-anthropic-billing-header: a=1;",
        "x-anthropic-billing-header: is a header that agents send\nrest",
    ],
)
async def test_nothing_else_is_touched(text: str) -> None:
    conversation = Conversation((ChatMessage("system", text), USER))

    assert without_attribution(conversation) is conversation


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
async def test_what_anybody_else_says_is_not_touched(role: str) -> None:
    conversation = Conversation((ChatMessage(role, f"{HEADER}\n{REST}"), USER))

    assert without_attribution(conversation) is conversation


async def test_only_the_beginning_of_the_system_text_counts() -> None:
    assert left(REST, HEADER) == [REST, HEADER]
    assert left((REST, HEADER)) == [(REST, HEADER)]
    assert left(f"{HEADER}\n{HEADER}\n{REST}") == [(f"{HEADER}\n{REST}",)]


async def test_developer_is_system() -> None:
    messages = (USER, ChatMessage("developer", f"{HEADER}\n{REST}"))

    assert without_attribution(Conversation(messages)).messages[1].parts == (REST,)


async def test_breakpoints_stay_where_they_are() -> None:
    """Those behind the attribution alone are none."""
    marked = ChatMessage("system", (HEADER, "one", "two"), breaks=(1, 2, 3))
    line = ChatMessage("system", (f"{HEADER}\none", "two"), breaks=(1,))
    found = [without_attribution(Conversation((one, USER))).messages[0] for one in (marked, line)]

    assert [(one.content, one.breaks) for one in found] == [
        (("one", "two"), (1, 2)),
        (("one", "two"), (1,)),
    ]


# ── on every route ───────────────────────────────────────────────────────────────────────────


def bodies(header: str, name: str) -> dict[str, dict[str, Any]]:
    """The same conversation on each route, with a header before its system text."""
    user = {"role": "user", "content": f"hi {name}"}
    line, part = f"{header}\n{REST}", {"type": "text", "text": header}
    parts = [part, {"type": "text", "text": REST}]
    message = {"messages": [user], "max_tokens": 1}
    return {
        "/v1/chat/completions": {
            "messages": [{"role": "system", "content": line}, user],
            "max_tokens": 1,
        },
        "/v1/messages": {**message, "system": parts},
        "/messages": {**message, "system": line},
        "/v1/responses": {"instructions": line, "input": [user], "max_output_tokens": 1},
        "/responses": {
            "input": [{"role": "system", "content": parts}, user],
            "max_output_tokens": 1,
        },
    }


async def stripped(server: Server) -> int:
    async with server.http.get(f"{server.url}/admin/api/stats") as answer:
        return (await answer.json())["session"]["attribution_stripped"]


async def test_one_conversation_is_one_prefix_whatever_the_header_and_the_route(
    server: Server,
) -> None:
    """And each request in which it was left out is counted, once."""
    plain = bodies("", "routes")["/v1/chat/completions"]
    plain["messages"][0]["content"] = REST
    await server.post(plain)
    before = await stripped(server)

    for number, path in enumerate(bodies(HEADER, "routes")):
        body = bodies(HEADER.replace("0a1b2", f"0{number}"), "routes")[path]
        status, answer, _ = await server.post(body, path)
        assert status == 200, answer
        assert answer["omlx"]["computed_tokens"] == 1, path

    assert await stripped(server) == before + 5


async def test_the_prompt_that_is_shown_and_counted_is_the_one_without(server: Server) -> None:
    chat = bodies(HEADER, "shown")["/v1/chat/completions"]
    _, rendered, _ = await server.post({"messages": chat["messages"]}, "/apply-template")
    _, counted, _ = await server.post(
        bodies(HEADER, "shown")["/v1/messages"], "/v1/messages/count_tokens"
    )

    assert HEADER not in rendered["prompt"]
    assert REST in rendered["prompt"]
    assert counted["input_tokens"] == len(rendered["tokens"])


async def test_streams_count_too_and_counting_does_not(server: Server) -> None:
    before = await stripped(server)
    body = bodies(HEADER, "streams")["/v1/messages"]

    await server.post(body, "/v1/messages/count_tokens")
    await server.events(body, "/v1/messages")

    assert await stripped(server) == before + 1


async def test_it_can_be_switched_off(model_path: ModelPath, tmp_path: Path) -> None:
    async with serving(model_path("tape"), tmp_path, strip_attribution=False) as server:
        chat = bodies(HEADER, "kept")["/v1/chat/completions"]
        _, rendered, _ = await server.post({"messages": chat["messages"]}, "/apply-template")
        answers = await asyncio.gather(
            *(server.post(body, path) for path, body in bodies(HEADER, "kept").items())
        )
        count = await stripped(server)

    assert HEADER in rendered["prompt"]
    assert {status for status, _, _ in answers} == {200}
    assert count == 0
