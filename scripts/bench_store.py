"""What storing costs those who get nothing from it: rates with the SSD tier over rates without.

    python scripts/bench_store.py [--model FOLDER] [--streams 1 4] [--rounds 3] [--tokens 96]
                                  [--prompt 192] [--only NAME ...] [--quick] [--json FILE]

    decode    answers of ``--tokens`` tokens; what the streams compute is written meanwhile:
              tokens a second of all streams, from the last one's first token to the first one's end
    no-reuse  new prompts of ``--prompt`` tokens, short answers, each stream sends the next when it
              has an answer: tokens a second, prompts and answers together

Three real servers are asked by turns, the first one changes from round to round: without the tier,
with it, and once more without it. The third shows what two servers differ by that are alike. A
ratio is the median over the rounds of "on" against the mean of its two neighbours; at least 0.97
is wanted. A run is suspect if nothing was written, if the two alike differ by more than that, or if
the machine did something else meanwhile ("others", in cores); then a server is asked again first.
Blocks are small here: the bytes written for a token are the same, but there are files in every
window, however short. Exit code 0: all as wanted; 1: not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import aiohttp
from chats import (
    Documents,
    Message,
    Refused,
    TooShort,
    ask,
    http_session,
    rate_together,
    throughput,
)
from servers import (
    CALM,
    Calm,
    Server,
    facts,
    serving,
    until_sigterm,
    until_written,
)

Verdict = Literal["as wanted", "missed", "suspect"]

RATIO_MIN = 0.97
ANSWER = 4
"""Tokens of an answer in no-reuse."""

REQUESTS = 3
"""That each stream sends one after another in no-reuse."""

SIDES = ("off", "on", "off again")


@dataclass(frozen=True)
class Round:
    """Tokens a second of the same prompts at the three servers."""

    off: float
    on: float
    again: float
    written_bytes: int
    others: float = 0.0
    """Cores that others took meanwhile."""

    @property
    def ratio(self) -> float:
        return 2 * self.on / (self.off + self.again)

    @property
    def noise(self) -> float:
        return self.again / self.off


@dataclass(frozen=True)
class Result:
    workload: str
    streams: int
    rounds: Sequence[Round]

    @property
    def ratio(self) -> float:
        return statistics.median(one.ratio for one in self.rounds)

    @property
    def noise(self) -> float:
        """Off again over off; 1 on a machine that does nothing else."""
        return statistics.median(one.noise for one in self.rounds)

    @property
    def others(self) -> float:
        return statistics.median(one.others for one in self.rounds)

    @property
    def verdict(self) -> Verdict:
        if self.others > CALM:
            return "suspect"
        if not all(one.written_bytes for one in self.rounds):
            return "suspect"
        if not RATIO_MIN <= self.noise <= 1 / RATIO_MIN:
            return "suspect"
        return "as wanted" if self.ratio >= RATIO_MIN else "missed"

    def as_json(self) -> dict[str, Any]:
        ratios, noises = ([getattr(r, n) for r in self.rounds] for n in ("ratio", "noise"))
        return {
            "workload": self.workload,
            "streams": self.streams,
            "off": statistics.median((one.off + one.again) / 2 for one in self.rounds),
            "on": statistics.median(one.on for one in self.rounds),
            "ratio": self.ratio,
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "noise": self.noise,
            "noise_min": min(noises),
            "noise_max": max(noises),
            "written_bytes": statistics.median(one.written_bytes for one in self.rounds),
            "others": self.others,
            "wanted": RATIO_MIN,
            "verdict": self.verdict,
            "rounds": [vars(one) for one in self.rounds],
        }


# ── the workloads: tokens a second of one server ─────────────────────────────────────────────

Rate = Callable[[aiohttp.ClientSession, Server, list[list[Message]]], Awaitable[float]]


async def decode(
    session: aiohttp.ClientSession, server: Server, chats: list[list[Message]], tokens: int
) -> float:
    asked = (ask(session, server.endpoint, chat, tokens) for chat in chats)
    return rate_together(await asyncio.gather(*asked))


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.documents = Documents(options.seed)
        self.calm = Calm(options.patience)
        self.written = 0
        """Bytes so far, of the server with the tier."""

    def workload(self, name: str, streams: int) -> tuple[list[list[Message]], Rate]:
        """New chats, and what to do with them."""
        tokens = self.options.tokens
        if name == "decode":
            chats = [self.documents.draw(64) for _ in range(streams)]
            return chats, lambda session, server, chats: decode(session, server, chats, tokens)
        chats = [self.documents.draw(self.options.prompt) for _ in range(REQUESTS * streams)]
        return chats, lambda session, server, chats: throughput(
            session, server.endpoint, chats, streams, ANSWER
        )

    async def round(
        self,
        session: aiohttp.ClientSession,
        servers: Sequence[Server],
        name: str,
        streams: int,
        number: int,
    ) -> Round:
        first_chats, rate = self.workload(name, streams)
        rates: dict[int, float] = {}
        taken: list[float] = []
        on = servers[SIDES.index("on")]
        written = self.written

        async def run(server: Server, again: int) -> float:
            # A server knows what it was asked before.
            chats = self.workload(name, streams)[0] if again else first_chats
            return await rate(session, server, chats)

        for index in (0, 1, 2) if number % 2 else (2, 1, 0):
            rates[index], others = await self.calm.measure(partial(run, servers[index]))
            taken.append(others)
            if servers[index] is on:  # what it still writes is not to disturb the next one
                written = (await until_written(session, on))["ssd_written_bytes"]
        new, self.written = written - self.written, written
        return Round(rates[0], rates[1], rates[2], new, max(taken))


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(options)
    block = ("--paged-cache-block-size", str(options.block_size))
    results: list[Result] = []
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="omlx-", dir=options.folder))
        )
        session = await enter(http_session())
        servers: list[Server] = []
        for side in SIDES:
            limit = options.ssd if side == "on" else "0"
            ssd = ("--ssd-cache-max-size", limit)
            home = folder / side.replace(" ", "-")
            fields = options.fields
            servers.append(await enter(serving(options.model, home, *block, *ssd, fields=fields)))
        for server in servers:
            await bench.documents.calibrate(session, server.endpoint)
        bench.written = (await until_written(session, servers[1]))["ssd_written_bytes"]
        for name in options.only:
            for streams in options.streams:
                rounds = [
                    await bench.round(session, servers, name, streams, number)
                    for number in range(options.rounds)
                ]
                results.append(Result(name, streams, rounds))
        announced = servers[1].announced
    return {
        "facts": facts(),
        "server": announced,
        "sizes": {
            name: getattr(options, name)
            for name in ("model", "rounds", "tokens", "prompt", "block_size", "ssd")
        },
        "results": [result.as_json() for result in results],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, a line for each workload and number of streams."""
    lines = [
        "| workload | streams | off, tok/s | on, tok/s | on / off | min to max "
        "| off again / off | min to max | written, MB | others | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['workload']} | {row['streams']} | {row['off']:.2f} | {row['on']:.2f} "
        f"| {row['ratio']:.4f} | {row['ratio_min']:.4f} to {row['ratio_max']:.4f} "
        f"| {row['noise']:.4f} | {row['noise_min']:.4f} to {row['noise_max']:.4f} "
        f"| {row['written_bytes'] / 1e6:.1f} | {row['others']:.2f} | {row['verdict']} |"
        for row in rows
    ]
    return "\n".join(lines)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo", help="folder or name (default: demo)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, help="(default: 3)")
    parser.add_argument("--tokens", type=int, help="of an answer in decode (default: 96)")
    parser.add_argument("--prompt", type=int, help="tokens in no-reuse (default: 192)")
    parser.add_argument("--patience", type=float, help="seconds to wait for calm (default: 60)")
    names = ["decode", "no-reuse"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--ssd", default="4GB", help="limit of the tier (default: 4GB)")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="where the files go (default: the system's)")
    parser.add_argument("--fields", type=json.loads, default={}, help="JSON for each request")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small: does it run at all?")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    sizes = (("rounds", 3, 1), ("tokens", 96, 36), ("prompt", 192, 80), ("patience", 60.0, 0.0))
    for name, whole, quick in sizes:
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else whole)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    try:
        report = asyncio.run(until_sigterm(measure(options)))
    except (Refused, TooShort) as error:
        raise SystemExit(f"bench_store: {error}") from None
    print(*report["server"], "", table(report["results"]), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1), "utf-8")
    return 0 if all(row["verdict"] == "as wanted" for row in report["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
