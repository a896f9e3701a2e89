"""Faults of other servers, replayed over real sockets: state, numbers, names and settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from omlx.web.pages import NAV
from tests import talker, tiny
from tests.web.serving import Server, chat, events, loop_for_ever, serving
from tests.web.settings_desk import desk
from tests.web.test_containment import EVERY, STREAM, Dialect
from tests.web.test_tools import LOOK, MESSAGES_LOOK, RESPONSES_LOOK

pytestmark = pytest.mark.asyncio(loop_scope="module")

ModelPath = Callable[[str], Path]
TEXT = "alpha beta gamma delta"
JSON = {"Content-Type": "application/json"}
BLOCK = 16


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def written(server: Server) -> dict[str, Any]:
    """The statistics, once nothing waits for its file."""
    return await server.gauges(
        lambda stats: stats["cache"]["pending_bytes"] == 0 < stats["cache"]["ssd_files"]
    )


# ── K3: what was cleared is gone, and clearing disturbs nobody ───────────────────────────────


async def test_clearing_the_cache_while_others_run_leaves_nothing_to_be_found(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """B22: no earlier prompt is found again; the four that ran say what they would have said."""
    earlier = [f"{n} earlier prompt {n} " * 6 for n in range(8)]
    async with serving(model_path("tape"), tmp_path, max_concurrent_requests=8) as server:
        for text in earlier:
            await server.chat(text, cache_salt=text)
        await written(server)
        server.gate.hold("decode")
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(
                    server.opened(f"running {n} " * 9, **loop_for_ever(max_tokens=60))
                )
                for n in range(4)
            ]
            await server.gate.reached()
            status, cleared, _ = await server.post(
                {"tier": "all"}, "/admin/api/cache/clear", headers=JSON
            )
            server.gate.open()
            found = [events(await stream.text()) for stream in streams]
        again = [await server.chat(text, cache_salt=text) for text in earlier]

    assert status == 200
    assert cleared["freed_blocks"] > 8
    assert [cached(answer) for answer in again] == [0] * len(earlier)
    assert {answer["choices"][0]["message"]["content"] for answer in again} == {TEXT}
    for one in found:
        deltas = [json.loads(event)["choices"][0]["delta"] for event in one[:-1]]
        said = "".join(delta.get("content") or "" for delta in deltas).split()
        assert said == [tiny.LOOP[(n + 1) % 3].strip() for n in range(60)]


# ── K12, K13: a setting that is changed leaves the cache connected ───────────────────────────


async def test_prompts_hit_before_and_after_each_change_of_a_limit(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """B74: and what comes after the change is stored as before."""
    async with desk(model_path("tape"), tmp_path, hot_cache_max_size="64MB") as opened:
        server, text = opened.server, "warm " * 60
        whole = (await server.chat(text))["usage"]["prompt_tokens"] - 1
        for value in ("32MB", "64MB", "1MB", None):
            answer = await opened.patch({"hot_cache_max_size": value})
            assert answer["applied"] == ["hot_cache_max_size"]
            assert cached(await server.chat(text)) == whole
            new = f"after {value} " * 20
            prompt = (await server.chat(new))["usage"]["prompt_tokens"]
            assert cached(await server.chat(new)) == prompt - 1


# ── K11: recomputation is no hit ─────────────────────────────────────────────────────────────


async def test_what_was_lost_on_the_way_is_computed_and_counts_as_that(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """B49, B101: every file is gone when they are to be read; 200, and not one token is a hit."""
    async with serving(model_path("tape"), tmp_path) as server:
        text = "lost " * 60
        first = await server.chat(text)
        before = (await written(server))["session"]
        await server.clear_memory()
        shutil.rmtree(tmp_path / "cache" / "blocks.noindex")

        async with server.watching() as ended:
            again = await server.chat(text)
            row = await ended()
        after = (await server.gauges(lambda stats: stats["engine"]["running"] == 0))["session"]
        third = await server.chat(text)

    assert again["choices"] == first["choices"]
    assert cached(again) == row["cached_tokens"] == 0
    assert row["computed_tokens"] == row["prompt_tokens"] == again["usage"]["prompt_tokens"]
    assert again["omlx"]["reuse_ended"] == {"reason": "rejected_file", "token": 0}
    assert after["cached_tokens"] == before["cached_tokens"]
    assert after["processed_tokens"] == before["processed_tokens"] + row["prompt_tokens"]
    assert cached(third) == row["prompt_tokens"] - 1


# ── K9: a length that nobody can send ────────────────────────────────────────────────────────


@EVERY
async def test_an_endless_body_is_refused_before_it_is_sent(
    server: Server, dialect: Dialect
) -> None:
    """B82: by its length alone; nothing is read, kept or waited for."""
    raw = await server.raw(
        b"POST " + dialect.path.encode() + b" HTTP/1.1\r\nHost: localhost\r\n"
        b"Connection: close\r\nContent-Length: 1000000000000000\r\n\r\n{",
        at_most=12,
    )

    assert raw.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("name", ["no-such-model", "../../etc/passwd", "\0", "A" * 10_000, "/"])
@EVERY
@STREAM
async def test_no_dialect_answers_for_another_model(
    server: Server, dialect: Dialect, name: str, stream: bool
) -> None:
    """B41, B86: a 404 also for a stream, with no path in it."""
    server.gate.calls.clear()
    body = {**dialect.ask("x"), "model": name, "stream": stream}

    status, answer, _ = await server.post(body, dialect.path)

    assert status == 404
    assert len(answer["error"]["message"]) < 300
    assert str(server.app.loaded.home) not in json.dumps(answer)
    assert server.gate.calls == []


# ── K12: names are data ──────────────────────────────────────────────────────────────────────


async def test_the_name_of_a_models_folder_is_text_on_every_page(
    model_path: ModelPath, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B52: and so is a client's own name, there and in the log."""
    caplog.set_level("INFO")
    evil = "x' onclick='1\"><script>alert(1)<"
    model = tmp_path / evil
    model.symlink_to(model_path("tape"))
    client = {"User-Agent": "<script>1</script> INFO forged"}
    async with serving(model, tmp_path / "home") as server:
        _, answer, _ = await server.post(chat("x"), headers=client)
        for item in NAV:
            async with server.http.get(f"{server.url}{item.href}") as page:
                html = await page.text()
            assert page.status == 200
            assert "<script>alert" not in html and "onclick='1" not in html
        for path in ("stats", "requests", "connect", "settings"):
            async with server.http.get(f"{server.url}/admin/api/{path}") as told:
                assert told.content_type == "application/json"
                assert told.headers["X-Content-Type-Options"] == "nosniff"

    assert answer["model"] == evil
    assert not [entry for entry in caplog.records if "\n" in entry.getMessage()]


@pytest.mark.parametrize(
    "name", ["..%2f..%2fetc%2fpasswd", "%2fetc", "a%2f..%2fb", "%00", "x" * 4000]
)
async def test_a_request_that_is_asked_for_by_a_path_is_not_there(
    server: Server, name: str
) -> None:
    """B41."""
    for place in ("", "/text"):
        async with server.http.get(f"{server.url}/admin/api/requests/{name}{place}") as answer:
            text = await answer.text()
        assert answer.status in (404, 400), text
        assert "root:" not in text and "Traceback" not in text


# ── K10: half a call is no call, in any dialect ──────────────────────────────────────────────


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def talking(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """Thinks, says something and calls a tool; see tests/talker.py."""
    model = talker.build(tmp_path_factory.mktemp("models"))
    async with serving(model, tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.mark.parametrize("count", range(7, 11))
async def test_a_call_that_is_cut_is_no_call_in_any_dialect(talking: Server, count: int) -> None:
    """B97: the reason is the limit's, whole and streamed, and nothing of the call is told."""
    asked = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    messages = {**asked, "max_tokens": count, "tools": [MESSAGES_LOOK]}
    responses = {
        "input": "hi",
        "temperature": 0,
        "max_output_tokens": count,
        "tools": [RESPONSES_LOOK],
    }

    _, chatted, _ = await talking.post({**asked, "max_tokens": count, "tools": [LOOK]})
    _, one, _ = await talking.post(messages, "/v1/messages")
    streamed = await talking.events(messages, "/v1/messages")
    _, other, _ = await talking.post(responses, "/v1/responses")
    last_name, last = (await talking.events(responses, "/v1/responses"))[-1]

    assert chatted["choices"][0]["finish_reason"] == "length"
    assert one["stop_reason"] == "max_tokens"
    (delta,) = [data for name, data in streamed if name == "message_delta"]
    assert delta["delta"]["stop_reason"] == "max_tokens"
    assert last_name == "response.incomplete"
    assert other["status"] == last["response"]["status"] == "incomplete"
    for told in (chatted, one, streamed, other, last):
        text = json.dumps(told)
        assert (
            '"tool_use"' not in text
            and '"function_call"' not in text
            and "Paris" not in text
            and "<tool_call>" not in text
        )
