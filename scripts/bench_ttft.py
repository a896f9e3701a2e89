"""Time to the first token of an exact repeat: cold, from RAM, and after a restart, over HTTP.

    python scripts/bench_ttft.py --model FOLDER [--tokens 1500] [--repeats 7] [--json FILE]

Starts a real server on an empty cache directory. The table shows where the milliseconds go, from
the server's own record; "client" is what the client saw, "edge" what is left between the two:
HTTP, template, tokenizer, the first event on the wire.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from mlx_lm.utils import load_tokenizer

from omlx import blas
from omlx.demo import _server
from omlx.settings import home_directory, load_settings

PARTS = ("queue_ms", "lookup_ms", "restore_ms", "prefill_ms")


async def first_token(session: aiohttp.ClientSession, url: str, text: str) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first = None
    last: dict[str, Any] = {}
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for raw in answer.content:
            line = raw.decode().strip()
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                first = first or time.perf_counter()
            if chunk.get("usage"):
                last = chunk
    record = last["omlx"]
    row = {part: record[part] for part in PARTS}
    row["server_ms"] = record["ttft_ms"]
    row["client_ms"] = 1000 * ((first or time.perf_counter()) - started)
    row["edge_ms"] = row["client_ms"] - row["server_ms"]
    row["prompt"] = last["usage"]["prompt_tokens"]
    row["cached"] = last["usage"]["prompt_tokens_details"]["cached_tokens"]
    return row


def median_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


async def run(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    loaded = load_settings({"model": str(arguments.model)}, {}, home_directory({}))
    words = " ".join(f"item {n * 7919 % 10007}" for n in range(arguments.tokens))
    text = fitted(arguments.model, words, arguments.tokens)
    timeout = aiohttp.ClientTimeout(total=None)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="omlx-bench-") as folder:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            async with _server(loaded, Path(folder)) as url:
                # A first, short request pays for what is done once in a process.
                await first_token(session, url, "Hello.")
                rows["cold"] = await first_token(session, url, text)
                warm = [await first_token(session, url, text) for _ in range(arguments.repeats)]
                rows["RAM"] = median_row(warm)
            restarted = []
            for _ in range(max(1, arguments.repeats // 2)):
                async with _server(loaded, Path(folder)) as url:
                    await first_token(session, url, "Hello.")
                    restarted.append(await first_token(session, url, text))
            rows["restart, SSD"] = median_row(restarted)
    return rows


def fitted(model: Path, words: str, tokens: int) -> str:
    """The beginning of ``words`` that makes a prompt of about ``tokens`` tokens."""
    tokenizer = load_tokenizer(model)
    room = tokens - len(tokenizer.apply_chat_template([{"role": "user", "content": ""}]))
    low, high = 0, len(words)
    while high - low > 1:
        middle = (low + high) // 2
        if len(tokenizer.encode(words[:middle], add_special_tokens=False)) <= room:
            low = middle
        else:
            high = middle
    return words[:low]


def main() -> None:
    blas.preload_fast_blas()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = asyncio.run(run(arguments))
    cold = rows["cold"]["client_ms"]
    print(
        "| | prompt | cached | queue | look-up | restore | prefill+step | edge | client | of cold |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for label, row in rows.items():
        row["of_cold"] = row["client_ms"] / cold
        parts = " | ".join(f"{row[part]:.1f}" for part in PARTS)
        print(
            f"| {label} | {row['prompt']:.0f} | {row['cached']:.0f} | {parts} | "
            f"{row['edge_ms']:.1f} | {row['client_ms']:.1f} | {row['of_cold']:.4f} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
