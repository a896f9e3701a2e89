"""What clients were told adds up to the dashboard, to /metrics, and to all time after a restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.web.serving import Server, chat, loop_for_ever, serving

ModelPath = Callable[[str], Path]
WORDS = " alpha beta gamma delta"
CACHE_FIELDS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


@dataclass
class Sums:
    """Of what answers said."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    answers: int = 0

    def openai(self, usage: dict[str, Any], answers: int = 1) -> None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        self._add(usage["prompt_tokens"], cached, usage["completion_tokens"], answers)

    def anthropic(self, usage: dict[str, Any]) -> None:
        prompt = sum(usage[field] for field in CACHE_FIELDS)
        self._add(prompt, usage["cache_read_input_tokens"], usage["output_tokens"])

    def responses(self, usage: dict[str, Any]) -> None:
        cached = usage["input_tokens_details"]["cached_tokens"]
        self._add(usage["input_tokens"], cached, usage["output_tokens"])

    def row(self, row: dict[str, Any]) -> None:
        """Of a request whose client left before it was told."""
        self._add(row["prompt_tokens"], row["cached_tokens"], row["generated_tokens"], 0)

    def _add(self, prompt: int, cached: int, generated: int, answers: int = 1) -> None:
        assert 0 <= cached < prompt
        self.prompt += prompt
        self.cached += cached
        self.generated += generated
        self.answers += answers


async def ask(server: Server, path: str, **body: Any) -> dict[str, Any]:
    status, answer, _ = await server.post({"temperature": 0, **body}, path)
    assert status == 200, answer
    return answer


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def every_dialect(server: Server, text: str, sums: Sums) -> None:
    """The same prompt by each route, whole and streamed."""
    for number in range(2):
        told = await server.chat(text, n=number + 1)
        sums.openai(told["usage"])
        chunks = await server.stream(text, stream_options={"include_usage": True})
        sums.openai(json.loads(chunks[-2])["usage"])

        told = await ask(server, "/v1/completions", prompt=text, max_tokens=4)
        sums.openai(told["usage"])
        told = await ask(server, "/v1/completions", prompt=[text, text + "!"], max_tokens=2)
        sums.openai(told["usage"], answers=2)

        body = {"messages": messages(text), "max_tokens": 8, "temperature": 0}
        sums.anthropic((await ask(server, "/v1/messages", **body))["usage"])
        events = dict(await server.events(body, "/v1/messages"))
        sums.anthropic(events["message_delta"]["usage"])

        asked = {"input": text, "max_output_tokens": 16, "temperature": 0}
        sums.responses((await ask(server, "/v1/responses", **asked))["usage"])
        events = dict(await server.events(asked, "/v1/responses"))
        sums.responses(events["response.completed"]["response"]["usage"])


async def leave_while_decoding(server: Server, text: str) -> dict[str, Any]:
    """A client that leaves in the middle of its answer; returns the request's row."""
    async with server.watching() as ended:
        async with server.opened(text, **loop_for_ever()) as answer:
            await answer.content.readuntil(b"three")
        return await ended()


async def leave_while_prefilling(server: Server, text: str) -> dict[str, Any]:
    """The same while a part of its prompt is computed."""
    async with server.watching() as ended:
        server.gate.hold("prefill")
        async with server.opened(text, **loop_for_ever()):
            await server.gate.reached()
        await server.gone()
        server.gate.open()
        return await ended()


async def read(server: Server) -> tuple[dict[str, Any], dict[str, float], list[dict[str, Any]]]:
    async with server.http.get(f"{server.url}/admin/api/stats") as answer:
        stats = await answer.json()
    async with server.http.get(f"{server.url}/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    async with server.http.get(f"{server.url}/admin/api/requests?limit=1000") as answer:
        rows = (await answer.json())["requests"]
    samples = [sample for family in families for sample in family.samples]
    metrics = {sample.name: sample.value for sample in samples if not sample.labels}
    return stats, metrics, rows


async def test_the_sums_of_all_answers_are_the_numbers_everywhere(
    model_path: ModelPath, tmp_path: Path
) -> None:
    sums = Sums()
    async with serving(model_path("tape"), tmp_path, metrics_vllm_names=True) as server:
        await every_dialect(server, WORDS * 30, sums)
        await server.chat(WORDS * 40, max_tokens=0)  # fills the cache
        filled = (await read(server))[2][0]
        assert (filled["generated_tokens"], filled["finish_reason"]) == (0, "length")
        sums.row(filled)
        sums.answers += 1

        left = await leave_while_decoding(server, WORDS * 20 + " left")
        assert left["state"] == "cancelled"
        sums.row(left)
        early = await leave_while_prefilling(server, "other" * 100)
        assert (early["state"], early["generated_tokens"]) == ("cancelled", 0)
        assert (await server.post({"messages": []}))[0] == 400
        counted = {"messages": messages("hello")}
        assert (await server.post(counted, "/v1/messages/count_tokens"))[0] == 200

        stats, metrics, rows = await read(server)

    session = stats["session"]
    assert (session["processed_tokens"], session["cached_tokens"]) == (sums.prompt, sums.cached)
    assert session["generated_tokens"] == sums.generated
    assert session["requests"] == {
        "completed": sums.answers,
        "cancelled": 2,
        "failed": 0,
        "rejected": 0,
    }
    assert session["cached_tokens"] > 0
    assert session["efficiency"] == sums.cached / sums.prompt
    assert stats["alltime"] == stats["1h"] == stats["24h"] == session
    assert metrics["omlx_processed_tokens_total"] == sums.prompt
    assert metrics["omlx_cached_tokens_total"] == sums.cached
    assert metrics["omlx_generated_tokens_total"] == sums.generated
    assert session["unfinished_tokens"] == early["computed_tokens"]

    for row in rows:
        if row["id"] != early["id"]:
            assert row["cached_tokens"] + row["computed_tokens"] == row["prompt_tokens"], row
        omlx = row["omlx"]
        assert sum(omlx["cached_from"].values()) == row["cached_tokens"]
        phases = [
            omlx[f"{name}_ms"] for name in ("queue", "lookup", "restore", "prefill", "decode")
        ]
        assert abs(sum(phases) - row["total_ms"]) <= 2, row

    async with serving(model_path("tape"), tmp_path) as server:
        stats, metrics, rows = await read(server)

    assert stats["session"]["processed_tokens"] == metrics["omlx_processed_tokens_total"] == 0
    assert stats["alltime"] == stats["24h"] == session
    assert metrics["omlx_alltime_processed_tokens_total"] == sums.prompt
    assert rows == []


async def test_only_what_was_processed_counts_and_each_of_it_once(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """B101."""
    prompt = {"prompt": list(range(40, 140)), "max_tokens": 2, "temperature": 0}
    async with serving(model_path("tape"), tmp_path) as server:
        fresh = (await read(server))[0]["session"]
        for _ in range(2):
            await ask(server, "/v1/completions", **prompt)
        await leave_while_prefilling(server, "other" * 100)
        assert (await server.post({**prompt, "max_tokens": -1}, "/v1/completions"))[0] == 400
        server.gate.break_at("prefill")
        broken = {**prompt, "prompt": [50] * 90}
        assert (await server.post(broken, "/v1/completions"))[0] == 500
        session = (await read(server))[0]["session"]
        after = await ask(server, "/v1/completions", **broken)

    assert (fresh["processed_tokens"], fresh["efficiency"]) == (0, 0.0)
    # Reuse is exact to the token: all but the last one, which must be computed.
    assert (session["processed_tokens"], session["cached_tokens"]) == (200, 99)
    assert session["efficiency"] == 99 / 200
    assert session["requests"] == {"completed": 2, "cancelled": 1, "failed": 1, "rejected": 0}
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    (tmp_path / "stats.json").write_text('{"processed_tokens": 10, "cached_tokens": 11}')
    async with serving(model_path("tape"), tmp_path) as server:
        alltime = (await read(server))[0]["alltime"]

    assert alltime["processed_tokens"] == 0


async def test_a_restart_keeps_the_charts_and_the_measured_speed(
    model_path: ModelPath, tmp_path: Path
) -> None:
    text = WORDS * 60
    async with serving(model_path("tape"), tmp_path) as server:
        await server.chat(text, max_tokens=1)

    async with serving(model_path("tape"), tmp_path) as server:
        async with server.watching() as ended:
            told = await server.chat(text, max_tokens=1)
            row = await ended()
        async with server.http.get(f"{server.url}/admin/api/history?res=1m") as answer:
            history = await answer.json()

    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert isinstance(row["saved_ms"], int)
    assert sum(found[4] for found in history["rows"]) == 2
    assert [what for _, what in history["marks"]] == ["model", "model"]


def moved_aside(home: Path) -> int:
    assert (home / "history.sqlite").stat().st_size > 0
    return len(list(home.glob("history.sqlite.corrupt-*")))


async def test_a_broken_history_stops_no_server(model_path: ModelPath, tmp_path: Path) -> None:
    (tmp_path / "history.sqlite").write_bytes(b"no database, but as long as the header of one" * 9)

    async with serving(model_path("tape"), tmp_path) as server:
        await server.chat("hello", max_tokens=1)
        stats, _, _ = await read(server)

    assert stats["24h"]["requests"]["completed"] == 1
    assert moved_aside(tmp_path) == 1


# ── what a person may do ─────────────────────────────────────────────────────────────────────


async def test_a_request_that_is_cancelled_by_hand_tells_its_client(
    model_path: ModelPath, tmp_path: Path
) -> None:
    async with serving(model_path("tape"), tmp_path) as server, server.watching() as ended:
        body = chat("on and on", stream=True, **loop_for_ever())
        server.gate.hold("decode")
        async with server.http.post(f"{server.url}/v1/chat/completions", json=body) as stream:
            name = stream.headers["x-request-id"]
            await server.gate.reached()
            path = f"/admin/api/requests/{name}/cancel"
            server.gate.open()
            status, answer, _ = await server.post({}, path, headers=JSON)
            rest = await stream.text()
        row = await ended()
        again, _, _ = await server.post({}, path, headers=JSON)
        await server.handling(0)

    assert (status, answer) == (200, {"cancelled": True})
    assert (row["id"], row["state"]) == (name, "cancelled")
    assert '"code":"cancelled"' in rest and '"finish_reason":"stop"' not in rest
    assert again == 404


JSON = {"Content-Type": "application/json"}


async def test_a_request_that_waits_can_be_cancelled_and_is_not_asked_for_again(
    model_path: ModelPath, tmp_path: Path
) -> None:
    async with serving(model_path("tape"), tmp_path, max_concurrent_requests=1) as server:
        server.gate.hold("decode")
        async with server.opened("first", **loop_for_ever()):
            second = asyncio.create_task(server.post(chat("second")))
            stats = await server.gauges(lambda stats: len(stats["running"]) == 2)
            (waiting,) = (row for row in stats["running"] if row["state"] == "waiting")
            path = f"/admin/api/requests/{waiting['id']}/cancel"
            status, _, _ = await server.post({}, path, headers=JSON)
            answered, error, _ = await second
            server.gate.open()

    assert status == 200
    # Clients ask again after 408, 409, 429 and every 5xx.
    assert (answered, error["error"]["code"]) == (499, "cancelled")


async def test_other_sites_can_neither_cancel_nor_switch_on(
    model_path: ModelPath, tmp_path: Path
) -> None:
    async with serving(model_path("tape"), tmp_path) as server:
        for path in ("/admin/api/requests/x/cancel", "/admin/api/capture"):
            foreign = {**JSON, "Origin": "https://elsewhere.example"}
            assert (await server.post({"on": True}, path, headers=foreign))[0] == 403
            form = {"Content-Type": "text/plain"}
            assert (await server.post({"on": True}, path, headers=form))[0] == 415
        assert not server.app.edge.captures.on


async def test_texts_are_kept_only_while_somebody_asked_for_them(
    model_path: ModelPath, tmp_path: Path, caplog: Any
) -> None:
    async def texts(server: Server, name: str) -> tuple[int, dict[str, Any]]:
        async with server.http.get(f"{server.url}/admin/api/requests/{name}/text") as answer:
            return answer.status, await answer.json()

    async def switch(server: Server, on: bool) -> dict[str, Any]:
        status, answer, _ = await server.post({"on": on}, "/admin/api/capture", headers=JSON)
        assert status == 200
        return answer

    async with serving(model_path("tape"), tmp_path) as server:
        before = (await server.chat("secret before"))["id"]
        assert await switch(server, True) == {"on": True, "kept": [], "kept_max": 50}
        during = (await server.chat("secret during", n=2))["id"]
        status, found = await texts(server, during)
        forgotten, _ = await texts(server, before)
        listed = await read(server)
        for number in range(60):
            server.app.edge.captures.begin(f"more-{number}", "x" * 300_000)
        bounded = len(server.app.edge.captures.ids())
        assert await switch(server, False) == {"on": False, "kept": [], "kept_max": 50}
        assert (await texts(server, during))[0] == 404

    assert (status, forgotten) == (200, 404)
    assert "secret during" in found["prompt"]
    assert found["answers"] == ["alpha beta gamma delta"] * 2
    assert "secret" not in json.dumps(listed) and "secret" not in caplog.text
    assert bounded == 50
