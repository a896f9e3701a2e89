"""``omlx demo``: the same long chat cold, again, and after a restart, measured as a client sees it.

It starts a real server in a process of its own, on an empty cache directory, and talks to it over
HTTP; the restart is a real one.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from omlx.settings import Loaded

START_S = 900.0
"""Fetching the model is part of the first start."""

REPLY_TOKENS = 24

_WINDS = ("north", "north-east", "east", "south-east", "south", "south-west", "west")
_EVENTS = (
    "the lamp was trimmed and the glass cleaned",
    "a brig passed at dawn and dipped her colours",
    "the supply boat brought flour, oil and letters",
    "two whales were seen off the western ledge",
    "fog all day; the bell was rung each quarter hour",
    "the boat shed lost four slates in a squall",
    "the tide gauge was read and its chain greased",
    "a keeper from the mainland came to inspect the stores",
    "nets were mended and the gulls driven from the roof",
)
DAYS = 42


def document() -> str:
    """A lighthouse log of about a thousand tokens; every line differs."""
    lines = [
        f"Day {day}: wind {_WINDS[day * 3 % 7]}, {4 + day * 5 % 23} knots; {_EVENTS[day * 4 % 9]}."
        for day in range(1, DAYS + 1)
    ]
    return "\n".join(lines)


QUESTION = "In one sentence: what does the keeper write about in this log?"


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer as the client saw it."""

    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    text: str


async def run_demo(loaded: Loaded, url: str | None) -> int:
    """Measure and print; 0 when the warm answers came from the cache and say the same."""
    console = Console()
    if url is not None:
        readings = await _against(url.rstrip("/"), console)
    else:
        readings = await _with_own_server(loaded, console)
    _print(readings, console)
    texts = {reading.text for _, reading in readings}
    reused = all(reading.cached_tokens > 0 for _, reading in readings[1:])
    if len(texts) > 1:
        console.print("[red]The answers differ.[/red]")
    return 0 if reused and len(texts) == 1 else 1


async def _against(url: str, console: Console) -> list[tuple[str, Reading]]:
    console.print(f"Asking {url} twice; its cache may know the prompt already.")
    return [("first", await ask(url)), ("again", await ask(url))]


async def _with_own_server(loaded: Loaded, console: Console) -> list[tuple[str, Reading]]:
    with tempfile.TemporaryDirectory(prefix="omlx-demo-") as folder:
        console.print("Starting a server on an empty cache ...")
        async with _server(loaded, Path(folder)) as url:
            console.print("Sending a chat of about 1,000 tokens, then the same again ...")
            cold, warm = await ask(url), await ask(url)
        console.print("Restarting the server ...")
        async with _server(loaded, Path(folder)) as url:
            restarted = await ask(url)
    return [
        ("cold", cold),
        ("again, from RAM", warm),
        ("after a restart, from SSD", restarted),
    ]


@asynccontextmanager
async def _server(loaded: Loaded, cache: Path) -> AsyncIterator[str]:
    """A server process on a free port; ended with SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = loaded.settings
    arguments = (
        *("-m", "omlx", "serve", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", settings.model, "--model-dir", str(settings.model_dir)),
        *("--ssd-cache-dir", str(cache), "--log-level", "warning"),
    )
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    url = f"http://127.0.0.1:{port}"
    try:
        await _until_ready(url, process)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _until_ready(url: str, process: asyncio.subprocess.Process) -> None:
    deadline = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            if process.returncode is not None:
                raise SystemExit(process.returncode)
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise SystemExit(f"omlx: the server was not ready after {START_S:.0f} s")


async def ask(url: str) -> Reading:
    """One streamed chat completion; time to the first piece of text."""
    body = {
        "messages": [
            {"role": "system", "content": "You answer questions about documents, briefly."},
            {"role": "user", "content": f"{document()}\n\n{QUESTION}"},
        ],
        "temperature": 0,
        "max_tokens": REPLY_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        started = time.perf_counter()
        first: float | None = None
        text: list[str] = []
        usage: dict[str, dict[str, int]] = {}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise SystemExit(f"omlx: the server answered {answer.status}")
            async for raw in answer.content:
                line = raw.decode().strip()
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise SystemExit(f"omlx: {chunk['error']['message']}")
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    piece = choice["delta"].get("content")
                    if piece:
                        first = first or time.perf_counter()
                        text.append(piece)
    prompt_tokens = usage["prompt_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Reading(
        1000 * ((first or time.perf_counter()) - started),
        int(prompt_tokens),  # pyright: ignore[reportArgumentType]
        int(cached),
        "".join(text),
    )


def _print(readings: list[tuple[str, Reading]], console: Console) -> None:
    cold = readings[0][1]
    table = Table(title=f"One chat of {cold.prompt_tokens} tokens, {len(readings)} times")
    table.add_column("")
    for heading in ("first token", "of cold", "cached tokens"):
        table.add_column(heading, justify="right")
    table.add_column("answer")
    for label, reading in readings:
        table.add_row(
            label,
            f"{reading.ttft_ms:,.0f} ms",
            f"{reading.ttft_ms / cold.ttft_ms:.4f}",
            f"{reading.cached_tokens} of {reading.prompt_tokens}",
            reading.text,
        )
    console.print(table)
