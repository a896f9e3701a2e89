"""What clients say about caching is done or listed, and never changes what they are answered."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests import talker, tiny
from tests.web.serving import Server, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

ModelPath = Callable[[str], Path]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SYSTEM = "You look things up, and say so when there is nothing to be found. " * 2
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": name, "description": "Looks. " * 10, "parameters": {"type": "object"}},
    }
    for name in ("look", "listen")
]
BREAK = {"cache_control": {"type": "ephemeral"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hybrid(
    model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Server]:
    """A model with recurrent layers, whose template shows tools."""
    model = tmp_path_factory.mktemp("hybrid") / "hybrid"
    shutil.copytree(model_path("qwen3_5"), model)
    tiny.save_tokenizer(tiny.make_tokenizer(), model, talker.TEMPLATE)
    async with serving(model, tmp_path_factory.mktemp("home")) as running:
        yield running


async def answered(server: Server, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    status, answer, _ = await server.post(body, path)
    assert status == 200, answer
    return answer


async def num_cached(server: Server, body: dict[str, Any], path: str = CHAT) -> int:
    found = (await answered(server, body, path))["omlx"]["cached_from"]
    return found["ram"] + found["ssd"]


async def prompt(server: Server, messages: Any, tools: Any = None) -> list[int]:
    body = {"messages": messages, "tools": tools}
    return (await answered(server, body, "/apply-template"))["tokens"]


def num_shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next(i for i, (a, b) in enumerate(pairs) if a != b)


# ── where states are kept ────────────────────────────────────────────────────────────────────


async def test_two_users_with_one_system_text_and_tools_share_both(hybrid: Server) -> None:
    """The checkpoint is behind the tools, wherever the template puts them."""
    talks = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        for text in ("what is one?", "and what is another?", "7 of them?")
    ]
    fields = {"tools": TOOLS, "max_tokens": 1}
    one, other, _ = [await prompt(hybrid, talk, TOOLS) for talk in talks]

    found = [await num_cached(hybrid, {"messages": talk, **fields}) for talk in talks]

    shared = num_shared(one, other)
    assert shared > len(SYSTEM) + len(json.dumps(TOOLS)) * 0.9, "a byte is a token here"
    assert found == [0, shared, shared]


def document(name: str, question: str, **mark: Any) -> list[dict[str, Any]]:
    """Two blocks: a long one that others ask about as well, and a question."""
    text = f"{name}: " + "what there is to be read, " * 12
    return [{"type": "text", "text": text, **mark}, {"type": "text", "text": question}]


@pytest.mark.parametrize(
    ("path", "mark"),
    [
        (MESSAGES, BREAK),
        (MESSAGES, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}),
        (CHAT, BREAK),
        (CHAT, {"prompt_cache_breakpoint": {"mode": "explicit"}}),
        (RESPONSES, {"prompt_cache_breakpoint": {"mode": "explicit"}}),
    ],
)
async def test_a_breakpoint_keeps_the_state_at_exactly_its_place(
    hybrid: Server, path: str, mark: dict[str, Any]
) -> None:
    """Without it the second question computes the document again."""
    questions = ("Is it about the sea?", "Who wrote it, and when?")

    async def asked(name: str, question: str, **mark: Any) -> int:
        blocks = document(name, question, **mark)
        if path == RESPONSES:
            blocks = [{**block, "type": "input_text"} for block in blocks]
        messages = [{"role": "user", "content": blocks}]
        field, limit = "messages", "max_tokens"
        if path == RESPONSES:
            field, limit = "input", "max_output_tokens"
        return await num_cached(hybrid, {field: messages, limit: 1}, path)

    name = f"{path[4:]} {sorted(mark)} {len(str(mark))}"
    marked = [await asked(f"with {name}", text, **mark) for text in questions]
    plain = [await asked(f"none {name}", text) for text in questions]
    shared = num_shared(
        *[
            await prompt(hybrid, [{"role": "user", "content": document(f"with {name}", text)}])
            for text in questions
        ]
    )

    assert marked[1] == shared
    assert plain[1] < 40


async def test_a_breakpoint_behind_a_tools_result_is_one(hybrid: Server) -> None:
    def talk(question: str) -> dict[str, Any]:
        said = {"type": "tool_result", "tool_use_id": "1", "content": "found it. " * 20, **BREAK}
        used = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
        return {
            "max_tokens": 1,
            "messages": [
                {"role": "user", "content": "look for a result"},
                {"role": "assistant", "content": [used]},
                {"role": "user", "content": [said, {"type": "text", "text": question}]},
            ],
        }

    await answered(hybrid, talk("one?"), MESSAGES)

    assert await num_cached(hybrid, talk("two?"), MESSAGES) > 200


async def test_breakpoints_change_no_answer(hybrid: Server) -> None:
    fields = {"max_tokens": 8, "temperature": 0}
    plain, marked = [
        [{"role": "user", "content": document("the same answer", "what?", **mark)}]
        for mark in ({}, BREAK)
    ]
    cold = await answered(hybrid, {"messages": marked, **fields, "cache_salt": "a"})
    warm = await answered(hybrid, {"messages": marked, **fields, "cache_salt": "a"})
    other = await answered(hybrid, {"messages": plain, **fields, "cache_salt": "b"})

    texts = {answer["choices"][0]["message"]["content"] for answer in (cold, warm, other)}
    assert len(texts) == 1
    assert warm["omlx"]["computed_tokens"] == 1


# ── what is not to be kept ───────────────────────────────────────────────────────────────────

USER = [{"role": "user", "content": "a private matter, to be forgotten at once"}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 2},
    COMPLETIONS: {"prompt": "a private matter, to be forgotten at once", "max_tokens": 2},
    MESSAGES: {"messages": USER, "max_tokens": 2},
    RESPONSES: {"input": USER, "max_output_tokens": 2},
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    "fields", [{"cache_prompt": False}, {"prompt_cache_options": {"mode": "explicit"}}]
)
async def test_a_request_that_wants_no_cache_neither_stores_nor_finds(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    salted = {**ASKED[path], "cache_salt": f"{path} {sorted(fields)}"}
    await answered(server, {**salted, **fields}, path)
    first = await answered(server, salted, path)
    again = await answered(server, {**salted, **fields}, path)

    assert first["omlx"]["computed_tokens"] > 20, "nothing of it was kept"
    assert again["omlx"]["computed_tokens"] == first["omlx"]["computed_tokens"]
    assert again["omlx"]["reuse_ended"] == {"reason": "disabled", "token": 0}
    usage = again["usage"]
    if path == MESSAGES:
        assert usage["cache_creation_input_tokens"] == usage["cache_read_input_tokens"] == 0
    elif path != RESPONSES:
        details = usage["prompt_tokens_details"]
        assert details == {"cached_tokens": 0, "cache_write_tokens": 0}


async def test_a_recurrent_model_keeps_nothing_either(hybrid: Server) -> None:
    body = {**ASKED[CHAT], "cache_salt": "private"}
    await answered(hybrid, {**body, "cache_prompt": False, "n": 2})

    assert await num_cached(hybrid, body) == 0


async def test_explicit_with_a_breakpoint_is_cached(server: Server) -> None:
    talk = [{"role": "user", "content": document("explicit", "what?", **BREAK)}]
    body = {"messages": talk, "max_tokens": 1, "prompt_cache_options": {"mode": "explicit"}}
    await answered(server, body)

    assert (await answered(server, body))["omlx"]["computed_tokens"] == 1


# ── what belongs together ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"prompt_cache_key": "KEY"}),
        (COMPLETIONS, {"prompt_cache_key": "KEY"}),
        (RESPONSES, {"prompt_cache_key": "KEY"}),
        (MESSAGES, {"metadata": {"user_id": "KEY"}}),
    ],
)
async def test_a_key_names_the_conversation_and_keeps_nothing_apart(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    def keyed(key: str) -> dict[str, Any]:
        return json.loads(json.dumps({**ASKED[path], **fields}).replace("KEY", key))

    await answered(server, keyed("one"), path)
    async with server.watching() as ended:
        status, answer, headers = await server.post(keyed("two"), path)
        row = await ended()

    assert status == 200
    assert row["conversation"] == "two"
    assert answer["omlx"]["computed_tokens"] == 1
    assert "x-omlx-ignored" not in headers


# ── what is only listed ──────────────────────────────────────────────────────────────────────


async def test_how_long_to_keep_something_is_ignored_and_listed(server: Server) -> None:
    marked = document("ttl", "what?", cache_control={"type": "ephemeral", "ttl": "1h"})
    body = {"messages": [{"role": "user", "content": marked}], "max_tokens": 1}
    later = {"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}
    _, _, messages = await server.post(body, MESSAGES)
    _, _, chat = await server.post({**ASKED[CHAT], **later}, CHAT)
    _, _, plain = await server.post({**ASKED[MESSAGES], **BREAK}, MESSAGES)
    at_the_end = {**ASKED[MESSAGES], "cache_control": {"type": "ephemeral", "ttl": "5m"}}
    _, _, timed = await server.post(at_the_end, MESSAGES)

    assert messages["x-omlx-ignored"] == timed["x-omlx-ignored"] == "cache_control.ttl"
    assert chat["x-omlx-ignored"] == "prompt_cache_retention,prompt_cache_options.ttl"
    assert "x-omlx-ignored" not in plain, "a breakpoint at the end is where a state is kept"
