"""Thousands of mixed requests to one server: every answer right, nothing left behind.

    python scripts/soak_server.py [--requests 2000] [--clients 8] [--seed 1] [--model NAME]

Chats with answers known from a server without a cache, random lengths and choices, prompts that
are too long, wrong bodies, and clients that go away; little RAM, little room on disk, a short
queue. After each fifth of the requests, with nothing running, the server is asked what it holds.
From the second fifth to the last nothing may grow: Python objects, MLX's arrays and bytes, threads,
open files, and but for what the allocators keep the memory of the process. Exit code 1: something
was wrong, was stuck or grew.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

GROWTH = {"objects": 1.05, "arrays": 1.2, "mlx_bytes": 1.2, "threads": 1.0, "files": 1.2}
"""Of the second fifth, at the end. What is remembered of requests is bounded and has filled up by
then; which blocks are in RAM changes."""
RSS_GROWTH = 1.1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="qwen3_5", help="a tiny model of the tests")
    options = parser.parse_args()

    from tests import tiny
    from tests.crashing import make_chats
    from tests.mixing import Mix

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="omlx-soak-") as folder:
        home = Path(folder)
        model = tiny.build(options.model, home / "models")
        chats = make_chats(model, home / "oracle", options.seed, topics=4)
        mix = Mix(model, home / "served", chats, options.seed)
        with mix.server.wait_ready():
            held = []
            for number in range(5):
                asyncio.run(mix.run(options.requests // 5, options.clients))
                held.append(mix.held())
                print(f"{(number + 1) * options.requests // 5} requests: {held[-1]}", flush=True)
            mix.server.stop()
    tally = mix.tally
    for kind, count in tally.ended.items():
        print(f"{count:6} {kind.value}")
    print(f"{tally.turned_away:6} times 429; {tally.cached_tokens} tokens of checked chats reused")
    first, last = held[1], held[-1]
    grown = [
        f"{name} grew from {first[name]} to {last[name]}"
        for name, most in {**GROWTH, "rss_bytes": RSS_GROWTH}.items()
        if last[name] > most * first[name]
    ]
    for fault in [*tally.faults[:20], *grown]:
        print(f"WRONG: {fault}")
    print(f"{time.monotonic() - began:.0f} s; {len(tally.faults)} faults")
    return 1 if tally.faults or grown else 0


if __name__ == "__main__":
    sys.exit(main())
