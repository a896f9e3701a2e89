"""The server as a process: what it leaves on disk, what it takes up again, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.tiny import LOOP, TAPE

pytestmark = pytest.mark.slow

ModelPath = Callable[[str], Path]
PATIENCE_S = 60.0
BLOCK = 16
TEXT = "".join(TAPE[1:-1])


@pytest.fixture
def model(model_path: ModelPath) -> Path:
    return model_path("tape")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(model: Path | str, *options: str, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "omlx", "serve", "--port", str(port), "--model", str(model)),
        *("--paged-cache-block-size", str(BLOCK), *options),
    ]


def environment(home: Path, **variables: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("OMLX_")}
    return {**inherited, "OMLX_HOME": str(home), **variables}


class Process:
    """A server that is ready. ``said`` grows as its log is read."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.said: list[str] = []
        assert process.stderr is not None
        for line in process.stderr:
            self.said.append(line)
            if line.rstrip().endswith("ready"):
                return
        raise AssertionError(f"it ended with {process.wait()}: {''.join(self.said)}")

    def ask(self, text: str, **fields: Any) -> dict[str, Any]:
        with self.open(text, **fields) as answer:
            return json.loads(answer.read())

    def open(self, text: str, **fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
        request = Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return urlopen(request, timeout=PATIENCE_S)

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(with_signal)
        return self.ended()

    def ended(self) -> int:
        """The exit code, once it has ended by itself."""
        _, rest = self.process.communicate(timeout=PATIENCE_S)
        self.said.append(rest)
        return self.process.returncode

    @property
    def log(self) -> str:
        return "".join(self.said)


@contextmanager
def serve(model: Path, home: Path, *options: str, **variables: str) -> Iterator[Process]:
    """A server process; killed at the end of the block if it still lives."""
    port = free_port()
    process = subprocess.Popen(
        command(model, *options, port=port),
        env=environment(home, **variables),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Process(process, port)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def failing(
    model: Path | str, home: Path, *options: str, port: int | None = None
) -> tuple[int, str]:
    """Exit code and log of a server that cannot start."""
    done = subprocess.run(
        command(model, *options, port=free_port() if port is None else port),
        env=environment(home),
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stderr


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def said(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def block_files(cache: Path) -> list[Path]:
    return [
        path for path in cache.rglob("*") if re.fullmatch(r"[0-9a-f]{64}\.safetensors", path.name)
    ]


def next_event(stream: Any) -> str:
    """The next ``data:`` of an open stream."""
    while True:
        line = stream.readline().decode().rstrip("\n")
        if line.startswith("data: "):
            return line.removeprefix("data: ")


def rest_of(stream: Any) -> list[str]:
    lines = stream.read().decode().splitlines()
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def loop(max_tokens: int) -> dict[str, Any]:
    return {"chat_template_kwargs": {"opening": LOOP[0]}, "max_tokens": max_tokens}


def looped(count: int) -> str:
    """Without the space it begins with, which mlx-lm's detokenizer leaves out."""
    return "".join((*LOOP[1:], LOOP[0])[i % 3] for i in range(count)).lstrip()


# ── what outlives it ─────────────────────────────────────────────────────────────────────────


def test_a_server_that_is_started_again_reuses_what_the_last_one_computed(
    model: Path, tmp_path: Path
) -> None:
    """B44, B53: to the last token, after a polite end; nobody else can read it."""
    text = "the same long prompt " * 20
    with serve(model, tmp_path) as first:
        cold = first.ask(text)
        code = first.stop()
    files = block_files(tmp_path / "cache")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in files}
    folders = {
        stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "cache").rglob("*") if p.is_dir()
    }

    with serve(model, tmp_path) as second:
        warm = second.ask(text)
        again = second.ask(text)

    assert code == 0
    assert "Traceback" not in first.log
    assert (modes, folders) == ({0o600}, {0o700})
    assert cached(cold) == 0
    assert cached(warm) == warm["usage"]["prompt_tokens"] - 1
    assert warm["omlx"]["cached_from"] == {"ram": 0, "ssd": cached(warm)}
    assert again["omlx"]["cached_from"] == {"ram": cached(warm), "ssd": 0}
    assert said(cold) == said(warm) == said(again) == TEXT


def test_a_server_that_was_killed_in_a_stream_leaves_only_whole_blocks(
    model: Path, tmp_path: Path
) -> None:
    """B10, B44, B50: the next one gets in, serves right, and reuses what had been written."""
    text = "killed in the middle " * 12
    with serve(model, tmp_path) as first:
        with first.open(text, stream=True, **loop(1500)) as stream:
            next_event(stream)
            deadline = time.monotonic() + PATIENCE_S
            while len(block_files(tmp_path / "cache")) < 12 and time.monotonic() < deadline:
                next_event(stream)
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
        written = len(block_files(tmp_path / "cache"))

    with serve(model, tmp_path) as second:
        answer = second.ask(text, **loop(30))

    assert written >= 12
    assert said(answer) == looped(30)
    prompt = answer["usage"]["prompt_tokens"]
    assert cached(answer) >= min(12, (prompt - 1) // BLOCK) * BLOCK
    assert not list((tmp_path / "cache").rglob(f"*.{first.process.pid}-*.tmp"))


# ── how it ends ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("with_signal", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_stop_finishes_what_it_has_begun(
    model: Path, tmp_path: Path, with_signal: signal.Signals
) -> None:
    """And a variable that it does not know, it had said so at the start."""
    with serve(model, tmp_path, OMLX_SSD_CACHE_MAX_SIZ="1GB") as server:
        with server.open("begun", stream=True, **loop(300)) as stream:
            events = [next_event(stream)]
            server.process.send_signal(with_signal)
            events += rest_of(stream)
        code = server.ended()

    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == looped(300)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert code == 0
    assert "Traceback" not in server.log
    warnings = [line for line in server.log.splitlines() if "OMLX_SSD_CACHE_MAX_SIZ" in line]
    assert len(warnings) == 1
    assert "WARNING" in warnings[0]
    assert "ssd_cache_max_size" in warnings[0].lower()


def test_a_stream_that_the_end_cuts_off_ends_with_an_error(model: Path, tmp_path: Path) -> None:
    """Without time to drain: an event that says so, no reason that is made up, and exit code 0."""
    with serve(model, tmp_path, "--drain-timeout-s", "0") as server:
        with server.open("cut off", stream=True, **loop(1900)) as stream:
            next_event(stream)
            server.process.send_signal(signal.SIGTERM)
            *chunks, last, done = rest_of(stream)
        code = server.ended()

    assert code == 0
    assert done == "[DONE]"
    assert json.loads(last)["error"]["code"] == "server_shutdown"
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)


def test_a_stream_that_a_second_signal_cuts_off_ends_with_an_error(
    model: Path, tmp_path: Path
) -> None:
    """There is time to drain, but somebody is in a hurry; it does not just break off."""
    with serve(model, tmp_path, "--drain-timeout-s", "600") as server:
        with server.open("cut off", stream=True, **loop(1900)) as stream:
            next_event(stream)
            server.process.send_signal(signal.SIGTERM)
            server.process.send_signal(signal.SIGINT)  # two of one kind could be one
            *chunks, last, done = rest_of(stream)
        code = server.ended()

    assert code == 0
    assert done == "[DONE]"
    assert json.loads(last)["error"]["code"] == "server_shutdown"
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert "at once" in server.log
    assert "Traceback" not in server.log


# ── why it does not start ────────────────────────────────────────────────────────────────────


def assert_one_clear_line(log: str, *words: str) -> None:
    errors = [line for line in log.splitlines() if "ERROR" in line or line.startswith("omlx: ")]
    assert len(errors) == 1, log
    assert "Traceback" not in log
    for word in words:
        assert word in errors[0]


def test_a_port_in_use_ends_it_before_anything_of_the_cache_is_touched(
    model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, log = failing(model, home, "--ssd-cache-dir", str(tmp_path / "named"), port=port)

    assert code == 3
    assert_one_clear_line(log, str(port), "in use")
    assert not (tmp_path / "named").exists()
    assert not (home / "cache").exists()


def test_a_cache_directory_that_was_named_and_cannot_be_used_ends_it(
    model: Path, tmp_path: Path
) -> None:
    """Below a file, which not even root can change."""
    (tmp_path / "file").write_text("")
    named = tmp_path / "file" / "cache"

    code, log = failing(model, tmp_path / "home", "--ssd-cache-dir", str(named))

    assert code == 2
    assert_one_clear_line(log, str(named))


def test_a_second_server_on_one_cache_directory_does_not_start(model: Path, tmp_path: Path) -> None:
    """B50: and the first goes on."""
    with serve(model, tmp_path) as first:
        before = sorted((tmp_path / "cache").rglob("*"))
        code, log = failing(model, tmp_path / "other", "--ssd-cache-dir", str(tmp_path / "cache"))
        answer = first.ask("still here")

    assert code == 4
    assert_one_clear_line(log, str(tmp_path / "cache"), str(first.process.pid))
    assert set(before) <= set((tmp_path / "cache").rglob("*"))
    assert said(answer) == TEXT


@pytest.mark.parametrize("name", ["no-such-model", "folder"])
def test_a_model_that_is_not_there_ends_it_with_one_clear_line(tmp_path: Path, name: str) -> None:
    """B106: also a folder that holds no model."""
    (tmp_path / "models" / "folder").mkdir(parents=True)
    (tmp_path / "models" / "folder" / "README.md").write_text("a placeholder")

    code, log = failing(name, tmp_path)

    assert code == 5
    assert_one_clear_line(log, name)
