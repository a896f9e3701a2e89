"""Text to tokens and back, and the prompt of a chat: what a person looks at to see a difference."""

from __future__ import annotations

from typing import Any

import pytest

from tests import tiny
from tests.web.serving import Server, chat

pytestmark = pytest.mark.asyncio(loop_scope="module")

END = tiny.EOS


async def tokens(server: Server, content: str, **fields: Any) -> list[int]:
    status, answer, _ = await server.post({"content": content, **fields}, "/tokenize")
    assert status == 200, answer
    assert answer.keys() == {"tokens"}
    return answer["tokens"]


async def text(server: Server, ids: list[int]) -> str:
    status, answer, _ = await server.post({"tokens": ids, "model": "tape"}, "/detokenize")
    assert status == 200, answer
    assert answer.keys() == {"content"}
    return answer["content"]


@pytest.mark.parametrize("content", ["", "hello", " two  spaces ", "é 漢 🙂\n", f"a{END}b", "\0"])
async def test_text_comes_back_from_its_tokens(server: Server, content: str) -> None:
    assert await text(server, await tokens(server, content)) == content


async def test_the_spelling_of_a_control_token_is_one_token_or_the_text_it_is(
    server: Server,
) -> None:
    parsed = await tokens(server, END)
    plain = await tokens(server, END, parse_special=False)

    assert len(parsed) == 1
    assert len(plain) == len(END)
    assert await text(server, parsed) == await text(server, plain) == END


async def test_nothing_is_added_unless_it_is_asked(server: Server) -> None:
    plain = await tokens(server, "hi")

    assert plain == await tokens(server, "hi", add_special=False)
    assert (await tokens(server, "hi", add_special=True))[-len(plain) :] == plain


async def test_a_rendered_chat_is_the_prompt_that_is_computed(server: Server) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    status, answer, _ = await server.post({"messages": messages}, "/apply-template")
    done = await server.post({"messages": messages, "max_tokens": 1})

    assert status == 200
    assert answer.keys() == {"prompt", "tokens"}
    assert answer["prompt"].endswith("<|im_start|>assistant\n")
    assert await text(server, answer["tokens"]) == answer["prompt"]
    assert len(answer["tokens"]) == done[1]["usage"]["prompt_tokens"]


async def test_the_tokens_are_the_truth_where_a_client_spells_a_control_token(
    server: Server,
) -> None:
    body = chat(f"a{END}b")
    _, answer, _ = await server.post(body, "/apply-template")

    assert f"a{END}b" in answer["prompt"]
    assert answer["tokens"] != await tokens(server, answer["prompt"])
    (end,) = await tokens(server, END)
    assert answer["tokens"].count(end) == 1  # the template's own


async def test_options_of_a_chat_are_options_here(server: Server) -> None:
    body = {**chat("hi"), "chat_template_kwargs": {"opening": "Well, "}}
    _, answer, _ = await server.post(body, "/apply-template")

    assert answer["prompt"].endswith("assistant\nWell, ")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": "x", "add_special": "no"}, "add_special"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/apply-template", {"messages": [{"role": "user", "content": "x"}], "tools": {}}, "tools"),
    ],
)
async def test_what_is_wrong_is_refused_by_its_name(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer, _ = await server.post(body, path)

    assert status == 400
    assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "x"}),
        ("/detokenize", {"tokens": [10]}),
        ("/apply-template", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
async def test_another_model_is_not_found_and_nothing_is_counted(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    async def session() -> Any:
        async with server.http.get(f"{server.url}/admin/api/stats") as answer:
            return (await answer.json())["session"]

    before = await session()
    server.gate.calls.clear()

    ok, _, _ = await server.post(body, path)
    status, answer, _ = await server.post({**body, "model": "other"}, path)
    server.app.edge.state = "loading"
    try:
        early, _, headers = await server.post(body, path)
    finally:
        server.app.edge.state = "ready"

    assert (ok, status, early) == (200, 404, 503)
    assert answer["error"]["code"] == "model_not_found"
    assert int(headers["Retry-After"]) >= 1
    assert server.gate.calls == []
    assert await session() == before
