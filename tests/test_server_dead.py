"""An engine that dies takes the process with it, or comes back: it is never there and silent."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests import dying_engine
from tests.process import PATIENCE_S, Server, said, until, user
from tests.tiny import LOOP, TAPE

pytestmark = pytest.mark.slow

ModelPath = Callable[[str], Path]
TEXT = "".join(TAPE[1:-1])
FOR_EVER = {"chat_template_kwargs": {"opening": LOOP[0]}, "max_tokens": 1000}
GIVES_UP = 4
"""Restarts fail so often until the server has had enough of them."""


@pytest.fixture
def dying(
    model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], Server]:
    def start(lost: int) -> Server:
        monkeypatch.setenv("LOST", str(lost))
        through = (sys.executable, str(dying_engine.PATH))
        return Server(model_path("tape"), tmp_path, through=through)

    return start


def streamed(server: Server) -> Iterator[str]:
    with server.open(user("lost"), stream=True, **FOR_EVER) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield line.decode().removeprefix("data: ").strip()


def test_an_engine_that_never_comes_back_ends_the_process(dying: Callable[[int], Server]) -> None:
    """B32: with 70 and a line that says why; the client in the middle of a stream is told."""
    with dying(GIVES_UP) as server:
        server.wait_ready()

        *said_before, error, done = list(streamed(server))
        code = server.process.wait(PATIENCE_S)

        assert code == 70
        assert "giving up: model_runner crashed too often" in server.log
        assert "Fatal Python error" not in server.log
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "engine_restarting"
    assert "the device" not in error
    assert not any('"finish_reason":"' in chunk for chunk in said_before)


def said_again(server: Server) -> str | None:
    """The answer; None while actors are being started again, when clients are told to come back."""
    try:
        return said(server.chat(user("lost")))
    except HTTPError as error:
        with error:
            assert error.code == 503
            assert int(error.headers["Retry-After"]) > 0
        return None


def test_an_engine_that_comes_back_serves_on(dying: Callable[[int], Server]) -> None:
    """B32, K7: as often as it may crash; health is ok, and what is asked again is right."""
    with dying(GIVES_UP - 1) as server:
        server.wait_ready()
        before = server.chat(user("hello"), max_tokens=2)

        *_, error, _ = list(streamed(server))

        assert json.loads(error)["error"]["code"] == "engine_restarting"
        assert until(lambda: said_again(server) == TEXT.lstrip())
        assert server.health() == "ok"
        assert server.chat(user("hello"), max_tokens=2)["choices"] == before["choices"]
        assert server.log.count("crashed; restarting") == GIVES_UP - 1
        server.stop()
