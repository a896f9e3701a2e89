"""A server with room for a few rows: all are answered, in turn, and what can't be is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.process import PATIENCE_S, Server, said, until, user

pytestmark = pytest.mark.slow

ModelPath = Callable[[str], Path]
BUDGET = 3_000_000
ROWS, QUEUE = 8, 40


@pytest.fixture(scope="module")
def server(model_path: ModelPath, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """512 bytes of KV a token; weights of 0.4 MB."""
    options = {
        "--memory-budget": f"{BUDGET // 1000}KB",
        "--hot-cache-max-size": "60%",
        "--paged-cache-block-size": "16",
        "--prefill-step-tokens": "16",
        "--max-concurrent-requests": str(ROWS),
        "--max-queued-requests": str(QUEUE),
    }
    arguments = [word for pair in options.items() for word in pair]
    with Server(model_path("llama"), tmp_path_factory.mktemp("home"), *arguments) as running:
        yield running.wait_ready()


def memory(server: Server) -> dict[str, int]:
    return server.stats()["memory"]


def words(seed: int, count: int = 25) -> str:
    """A prompt of its own, of about five tokens a word."""
    return f"{seed} " + " ".join(str((seed * 7919 + i * i) % 9973) for i in range(count))


def refusal(server: Server, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(HTTPError) as caught:
        urlopen(request, timeout=PATIENCE_S).close()
    with caught.value as error:
        return error.code, json.loads(error.read())["error"]


class Watch:
    """The least and the most of some gauges while something goes on."""

    def __init__(self, server: Server) -> None:
        self.seen: list[dict[str, int]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(server,))

    def _look(self, server: Server) -> None:
        while not self._done.wait(0.2):
            self.seen.append(memory(server))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def test_more_than_fits_is_answered_in_turn_and_the_hot_tier_comes_back(server: Server) -> None:
    def ask(seed: int, max_tokens: int = 350) -> str:
        return said(server.chat(user(words(seed)), max_tokens=max_tokens))

    for seed in range(12):
        ask(seed, 2)  # so the server reckons with short answers
    assert until(lambda: memory(server)["hot_allowed_bytes"] > 0)
    full = memory(server)["hot_allowed_bytes"]

    with Watch(server) as watch, ThreadPoolExecutor(12) as clients:
        answers = list(clients.map(ask, range(12)))

    assert all(answers)
    assert min(gauges["hot_allowed_bytes"] for gauges in watch.seen) < full / 2
    assert max(gauges["waiting"] for gauges in watch.seen) > 0
    assert all(gauges["live_kv_bytes"] <= BUDGET for gauges in watch.seen)
    assert watch.seen[-1]["preempted"] > 0, "answers were longer than was reckoned with"
    assert until(lambda: memory(server)["hot_allowed_bytes"] == full), "it grows back"
    assert [ask(seed) for seed in range(6, 12)] == answers[6:], "those that came last as well"


def test_only_what_finds_no_place_in_the_queue_is_sent_away(server: Server) -> None:
    codes: list[int] = []

    def ask(seed: int) -> None:
        try:
            server.chat(user(words(seed)), max_tokens=100)
            codes.append(200)
        except HTTPError as error:
            with error:
                assert error.code == 429
                assert int(error.headers["Retry-After"]) >= 1
            codes.append(429)

    with ThreadPoolExecutor(2 * (ROWS + QUEUE)) as clients:
        list(clients.map(ask, range(100, 100 + 2 * (ROWS + QUEUE))))

    assert codes.count(200) >= ROWS + QUEUE
    assert codes.count(429) > 0
    assert server.alive


def test_what_can_never_fit_is_refused_at_once_with_the_numbers(server: Server) -> None:
    messages = user(words(5, 80) + "x" * 1400)

    code, error = refusal(server, "/v1/chat/completions", {"messages": messages, "stream": True})

    assert (code, error["code"]) == (400, "context_length_exceeded")
    assert "prompt is too long" in error["message"]
    assert "memory_budget (3.0 MB)" in error["message"]
    assert "Raise memory_budget or send less." in error["message"]
    body = {"model": "llama", "max_tokens": 5, "messages": messages}
    code, error = refusal(server, "/v1/messages", body)
    assert (code, error["type"]) == (400, "invalid_request_error")
    assert "prompt is too long" in error["message"]


def test_more_choices_than_fit_are_refused_and_a_huge_limit_is_not(server: Server) -> None:
    body = {"messages": user(words(6, 80) + "x" * 300), "n": ROWS}
    code, error = refusal(server, "/v1/chat/completions", body)
    assert code == 400
    assert f"for {ROWS} choices" in error["message"]

    answer = server.chat(user("short"), max_tokens=1_000_000)
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_the_server_says_at_the_start_what_a_request_may_take(server: Server) -> None:
    assert f"memory: {BUDGET / 1e6:.1f} MB: memory_budget of the RAM" in server.log
    assert "have room for" in server.log
