"""``omlx serve`` as a process of its own: start it, ask it, look at its files, kill it.

Its log goes to a file, so a server never waits for somebody to read, and can be read while it runs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import Request, urlopen

PATIENCE_S = 60.0
POLL_S = 0.02

Message = dict[str, str]


class Faulty(Exception):
    """The server did what it must never do; the text says what."""


def free_port() -> int:
    """Below the ports that systems give to those who call, of which thousands come and go here."""
    chance = random.SystemRandom()  # others, with the same seed, look for one at the same time
    while True:
        port = chance.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def until(holds: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    """Ask again and again; whether it came to hold in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def files_under(root: Path) -> dict[Path, int]:
    """Every file that is there now, by its size. One that goes meanwhile is left out."""
    found: dict[Path, int] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            try:
                found[path] = path.lstat().st_size
            except FileNotFoundError:
                continue
    return found


def block_files(root: Path) -> dict[Path, int]:
    return {p: size for p, size in files_under(root).items() if p.suffix == ".safetensors"}


def temporaries(root: Path) -> list[Path]:
    return [path for path in files_under(root) if path.suffix == ".tmp"]


def writer_of(temporary: Path) -> int:
    """The process that a temporary is named after: ``.<hash>.<pid>-<random>.<random>.tmp``."""
    return int(temporary.name.split(".")[2].partition("-")[0])


class Server:
    """A server process. As a context it is killed at the end, if it still lives."""

    def __init__(
        self,
        model: Path,
        home: Path,
        *options: str,
        through: Sequence[str] = (),
    ) -> None:
        """``through``: a command that runs it, such as one that takes rights away."""
        self.home, self.cache = home, home / "cache"
        home.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log_file = home / f"log-{time.monotonic_ns()}"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("OMLX_")}
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(*through, sys.executable, "-m", "omlx", "serve", "--model", str(model)),
                    *("--port", str(port), *options),
                ],
                env={**inherited, "OMLX_HOME": str(home), "PYTHONFAULTHANDLER": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # ── its life ─────────────────────────────────────────────────────────────────────────────

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def health(self) -> str:
        """``ok``, ``loading`` or the like; ``unreachable`` before it listens."""
        try:
            return self.get("/health").get("status", "ok")
        except HTTPError as error:
            with error:
                return json.loads(error.read()).get("status", "unknown")
        except (OSError, HTTPException):
            return "unreachable"

    def wait_ready(self, within_s: float = PATIENCE_S) -> Self:
        """Raises Faulty when it ends instead, or takes too long."""
        until(lambda: not self.alive or self.health() == "ok", within_s)
        if not self.alive or self.health() != "ok":
            raise Faulty(f"it did not start ({self.process.poll()}):\n{self.log[-3000:]}")
        return self

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, within_s: float = PATIENCE_S) -> None:
        """End it politely. Raises Faulty when it ends with anything but 0."""
        self.send(signal.SIGTERM)
        code = self.process.wait(within_s)
        if code:
            raise Faulty(f"it ended with {code}:\n{self.log[-3000:]}")

    # ── what it says ─────────────────────────────────────────────────────────────────────────

    def get(self, path: str) -> dict[str, Any]:
        with urlopen(self.url + path, timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())

    def stats(self) -> dict[str, Any]:
        return self.get("/admin/api/stats")

    def tier_state(self) -> str:
        return self.stats()["cache"]["tier_state"]

    def open(self, messages: Sequence[Message], **fields: Any) -> Any:
        body = {"messages": list(messages), "temperature": 0, **fields}
        request = Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return urlopen(request, timeout=PATIENCE_S)

    def chat(self, messages: Sequence[Message], **fields: Any) -> dict[str, Any]:
        with self.open(messages, **fields) as answer:
            return json.loads(answer.read())

    def stream(self, messages: Sequence[Message], **fields: Any) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer. Raises Faulty when it ends without its last event."""
        usage = {"include_usage": True}
        with self.open(messages, stream=True, stream_options=usage, **fields) as answer:
            for line in answer:
                event = line.decode().strip().removeprefix("data: ")
                if event == "[DONE]":
                    return
                if event.startswith("{"):
                    yield json.loads(event)
        raise Faulty("a stream ended without [DONE]")

    def settled(self) -> bool:
        """Whether nothing runs and nothing waits to be written."""
        stats = self.stats()
        waiting = stats["cache"]["pending_bytes"] + stats["gdn"]["pending_bytes"]
        return not (waiting or stats["engine"]["running"] or stats["engine"]["waiting"])


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def said(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def first_logprob(answer: dict[str, Any]) -> float:
    return answer["choices"][0]["logprobs"]["content"][0]["logprob"]
