"""Text completions: raw prompts as text or token ids, one or several, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from omlx.web.completions import CompletionRequest, parse_completion
from omlx.web.errors import ApiError
from tests import tiny
from tests.web.serving import Server, events

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "alpha beta gamma delta"
PATH = "/v1/completions"
GREEDY = {"temperature": 0}
PROMPT = "raw\n"
"""The tape model reads on from the line break."""


async def complete(server: Server, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    status, answer, _ = await server.post({"prompt": prompt, **GREEDY, **fields}, PATH)
    assert status == 200, answer
    return answer


async def streamed(server: Server, prompt: Any = PROMPT, **fields: Any) -> list[dict[str, Any]]:
    body = {"prompt": prompt, "stream": True, **GREEDY, **fields}
    async with server.http.post(f"{server.url}{PATH}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        found = events(await answer.text())
    assert found[-1] == "[DONE]"
    assert found.count("[DONE]") == 1
    return [json.loads(event) for event in found[:-1]]


def texts(found: list[dict[str, Any]]) -> list[str]:
    """By the index of the choice."""
    whole: dict[int, str] = {}
    for chunk in found:
        for choice in chunk["choices"]:
            whole[choice["index"]] = whole.get(choice["index"], "") + choice["text"]
    return [whole[index] for index in sorted(whole)]


def reasons(found: list[dict[str, Any]]) -> list[str]:
    return [c["finish_reason"] for chunk in found for c in chunk["choices"] if c["finish_reason"]]


# ── the official client ──────────────────────────────────────────────────────────────────────


async def test_the_strict_client_accepts_an_answer(server: Server) -> None:
    client = server.client(_strict_response_validation=True)

    answer = await client.completions.create(
        model=server.model, prompt=PROMPT, logprobs=2, n=2, temperature=0
    )

    assert answer.object == "text_completion"
    assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10


async def test_the_client_reads_a_stream(server: Server) -> None:
    """Not the strict one: it forbids the null that stands for a reason until there is one."""
    stream = await server.client().completions.create(
        model=server.model,
        prompt=PROMPT,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    found = [chunk async for chunk in stream]

    assert "".join(chunk.choices[0].text for chunk in found if chunk.choices) == TEXT
    assert found[-1].usage is not None
    assert found[-1].usage.completion_tokens == 5


async def test_the_client_raises_its_own_errors(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await server.client().completions.create(model=server.model, prompt="x", suffix="y")

    assert refused.value.param == "suffix"


# ── prompts ──────────────────────────────────────────────────────────────────────────────────


async def test_text_and_its_tokens_are_one_prompt(server: Server) -> None:
    _, found, _ = await server.post({"content": PROMPT}, "/tokenize")
    text = await complete(server)
    tokens = await complete(server, found["tokens"])

    assert tokens["choices"][0]["text"] == text["choices"][0]["text"] == TEXT
    assert tokens["usage"]["prompt_tokens"] == text["usage"]["prompt_tokens"]
    assert tokens["omlx"]["computed_tokens"] == 1


async def test_a_rendered_chat_is_the_chat(server: Server) -> None:
    """What /apply-template gives, sent as text or as ids, hits what the chat has computed."""
    chat = await server.chat("rendered")
    body = {"messages": [{"role": "user", "content": "rendered"}]}
    _, rendered, _ = await server.post(body, "/apply-template")

    for prompt in (rendered["prompt"], rendered["tokens"]):
        answer = await complete(server, prompt)
        assert answer["choices"][0]["text"] == chat["choices"][0]["message"]["content"]
        assert answer["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"]
        assert answer["omlx"]["computed_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_answered_in_order(server: Server, stream: bool) -> None:
    prompts, fields = ["one\n", "alpha", " two"], {"n": 2, "max_tokens": 3}
    wanted = ["alpha beta gamma", " beta gamma delta", " three one two"]

    if stream:
        found = await streamed(server, prompts, stream_options={"include_usage": True}, **fields)
        given, usage = texts(found), found[-1]["usage"]
        assert reasons(found) == ["length"] * 6
    else:
        answer = await complete(server, prompts, **fields)
        given, usage = [choice["text"] for choice in answer["choices"]], answer["usage"]
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))

    assert given == [text for text in wanted for _ in range(2)]
    assert usage["completion_tokens"] == 18
    assert usage["prompt_tokens"] == sum(
        [(await complete(server, prompt))["usage"]["prompt_tokens"] for prompt in prompts]
    )


async def test_each_prompt_is_a_request_of_its_own_in_the_list(server: Server) -> None:
    answer = await complete(server, ["first\n", "second\n"])
    async with server.http.get(f"{server.url}/admin/api/requests?limit=2") as found:
        rows = (await found.json())["requests"]

    assert {row["id"] for row in rows} == {answer["id"], f"{answer['id']}-1"}
    assert {row["route"] for row in rows} == {PATH}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_echoed_whatever_its_form(server: Server, stream: bool) -> None:
    prompts: list[Any] = ["<|im_start|>x\n", [10, 11, 12]]
    _, spelled, _ = await server.post({"tokens": prompts[1]}, "/detokenize")

    for prompt, text in zip(prompts, (prompts[0], spelled["content"]), strict=True):
        fields = {"echo": True, "max_tokens": 2}
        if stream:
            given = texts(await streamed(server, prompt, **fields))[0]
        else:
            given = (await complete(server, prompt, **fields))["choices"][0]["text"]
        plain = (await complete(server, prompt, max_tokens=2))["choices"][0]["text"]
        assert given == text + plain


async def test_no_tokens_at_all_fills_the_cache(server: Server) -> None:
    prompt = "warm it " * 10 + "\n"
    warm = await complete(server, prompt, max_tokens=0, logprobs=1)
    echoed = await streamed(server, prompt, max_tokens=0, echo=True)
    then = await complete(server, prompt)

    assert warm["choices"][0]["text"] == ""
    assert warm["choices"][0]["finish_reason"] == "length"
    assert warm["choices"][0]["logprobs"]["tokens"] == []
    assert warm["usage"]["completion_tokens"] == 0
    assert texts(echoed) == [prompt]
    assert then["omlx"]["computed_tokens"] == 1


# ── streamed or not, the same answer ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "fields",
    [{}, {"max_tokens": 2}, {"stop": "gamma"}, {"n": 2}, {"logprobs": 3}, {"max_tokens": 0},
     {"seed": 3, "temperature": 1.5, "max_tokens": 6}],
)  # fmt: skip
async def test_streamed_and_whole_answers_agree(server: Server, fields: dict[str, Any]) -> None:
    """B94: text, reason, usage and log-probabilities."""
    await complete(server, **fields)
    whole = await complete(server, **fields)
    found = await streamed(server, **fields, stream_options={"include_usage": True})

    assert texts(found) == [choice["text"] for choice in whole["choices"]]
    assert reasons(found) == [choice["finish_reason"] for choice in whole["choices"]]
    assert found[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in found[:-1])
    assert found[-1]["choices"] == []
    assert "omlx" in found[-1]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [c["logprobs"][key] for x in found for c in x["choices"] if c["logprobs"]]
        if "logprobs" in fields:
            assert [entry for part in parts for entry in part] == whole["choices"][0]["logprobs"][
                key
            ]
        else:
            assert not parts


async def test_log_probabilities_have_the_older_shape(server: Server) -> None:
    """B88."""
    answer = await complete(server, logprobs=3, max_tokens=3)
    bare = await complete(server, logprobs=0, max_tokens=3)

    found = answer["choices"][0]["logprobs"]
    assert found["tokens"] == list(tiny.TAPE[1:4])
    assert found["text_offset"] == [0, 5, 10]
    assert all(-9999 <= logprob <= 0 for logprob in found["token_logprobs"])
    for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert next(iter(top)) == token
        assert len(top) <= 3
        assert list(top.values()) == sorted(top.values(), reverse=True)
    assert bare["choices"][0]["logprobs"]["token_logprobs"] == found["token_logprobs"]
    assert bare["choices"][0]["logprobs"]["top_logprobs"] is None


# ── what is refused ──────────────────────────────────────────────────────────────────────────


def parsed(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "x", **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "missing_field"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", None),
        ({"prompt": 5}, "prompt", "invalid_value"),
        ({"prompt": {}}, "prompt", "invalid_value"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_value"),
        ({"prompt": [True]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [1.5]}, "prompt", "invalid_value"),
        ({"prompt": [[1], "a"]}, "prompt", "invalid_value"),
        ({"prompt": [[1], [None]]}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", "invalid_value"),
        ({"suffix": "y"}, "suffix", "unsupported_value"),
        ({"best_of": 2}, "best_of", "unsupported_value"),
        ({"best_of": 0}, "best_of", "invalid_value"),
        ({"echo": True, "logprobs": 0}, "logprobs", "unsupported_value"),
        ({"echo": 1}, "echo", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": -1}, "logprobs", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"stop": [""]}, "stop[0]", "invalid_value"),
        ({"stream_options": 5}, "stream_options", "invalid_value"),
        ({"response_format": {"type": "yaml"}}, "response_format", "unsupported_value"),
    ],
)
async def test_what_is_wrong_or_cannot_be_done_is_refused_by_its_name(
    fields: dict[str, Any], param: str, code: str | None
) -> None:
    """B79, B88."""
    if code is None:
        assert parsed(**fields).prompt == [()]  # refused once the room for it is known
        return
    with pytest.raises(ApiError) as refused:
        parsed(**fields)

    assert refused.value.status == 400
    assert (refused.value.param, refused.value.code) == (param, code)


@pytest.mark.parametrize(
    "fields", [{"suffix": ""}, {"suffix": None}, {"best_of": 1}, {"n": 2, "best_of": 2}]
)
async def test_what_asks_for_nothing_is_no_reason_to_refuse(fields: dict[str, Any]) -> None:
    assert parsed(**fields).prompt == ["x"]


@pytest.mark.parametrize("prompt", ["", [""], [[]], ["ok", ""], [10**9], [[1], [99999]]])
async def test_an_empty_prompt_and_an_unknown_token_are_refused(
    server: Server, prompt: object
) -> None:
    server.gate.calls.clear()

    status, answer, _ = await server.post({"prompt": prompt}, PATH)

    assert status == 400
    assert answer["error"]["param"] == "prompt"
    assert server.gate.calls == []


async def test_a_prompt_that_fills_the_context_is_refused(server: Server) -> None:
    """B83."""
    for stream in (False, True):
        body = {"prompt": [10] * tiny.CONTEXT, "stream": stream}
        status, answer, _ = await server.post(body, PATH)
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"
        assert answer["error"]["param"] == "prompt"


async def test_more_prompts_than_may_wait_are_refused_as_one(server: Server) -> None:
    """B89: none of them runs on for nobody."""
    prompts = [f"{number}\n" for number in range(100)]
    status, answer, headers = await server.post({"prompt": prompts, "max_tokens": 2000}, PATH)

    assert status == 429
    assert answer["error"]["code"] == "queue_full"
    assert int(headers["Retry-After"]) >= 1
    await server.handling(0)
    assert (await complete(server))["choices"][0]["text"] == TEXT


async def test_a_fault_in_one_prompt_fails_the_request(server: Server) -> None:
    server.gate.break_at("prefill")
    status, answer, _ = await server.post({"prompt": ["x" * 40 + "\n", "\n"]}, PATH)
    server.gate.break_at("prefill")
    found = await streamed(server, ["y" * 40 + "\n", "\n"])

    assert status == 500
    assert answer["error"]["code"] == "engine_error"
    assert found[-1]["error"]["code"] == "engine_error"
    assert (await complete(server))["choices"][0]["text"] == TEXT


async def test_the_path_without_the_version_is_the_same(server: Server) -> None:
    status, answer, headers = await server.post({"prompt": PROMPT, **GREEDY}, "/completions")

    assert status == 200
    assert answer["choices"][0]["text"] == TEXT
    assert headers["x-request-id"] == answer["id"]
    assert answer["id"].startswith("cmpl-")
