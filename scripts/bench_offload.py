"""Does the SSD tier pay, and does it cost where it cannot? Four workloads, with it and without.

    python scripts/bench_offload.py [--model FOLDER] [--tokens 512] [--documents 4] [--rounds 3]
                                    [--only NAME ...] [--from-disk] [--quick] [--json FILE]

    no-reuse       each document is new                            control: no difference
    reuse-fits     a document again and again, RAM holds all       control: no difference
    spill-revisit  A to N, more than RAM holds, then A again       at most 0.1 of computing A
    restart        a document that another process was asked       at most 0.1 of computing it

Real server processes, one with the tier and one without it, are asked by turns, the one first and
then the other, so that whatever else the machine does hits both alike. Measured is the time to the
first piece of text as the client sees it. A ratio is the median of the ratios of all pairs. A pair
of a control is measured again if the machine did something else meanwhile.

If a control shows a difference, something else than the tier was measured: the run is suspect. A
workload is suspect as well if its answers did not come from where they should have. What was
written lies in the page cache of the system; ``--from-disk`` drops it there before it is read.
Exit code 0: every workload is as wanted; 1: one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from chats import (
    Documents,
    Message,
    Reading,
    Refused,
    ask,
    http_session,
)
from offload_verdict import Pair, Result, overall, table
from servers import (
    Calm,
    Server,
    facts,
    forget_pages,
    serving,
    statistics_of,
    until_sigterm,
    until_written,
)

RAM_DOCUMENTS = 1.5
"""What the RAM tier holds in spill-revisit."""

NEW = 4
"""Documents of a round of no-reuse, smaller ones: more pairs in the same time."""

REVISITS = 10
"""A round of reuse-fits: one is over at once, and the median of many is needed."""

ANSWER = 2
WITHOUT = ("--ssd-cache-max-size", "0")


class Bench:
    """The servers' common options, and the documents, none of which is used twice."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self._folder = folder
        self.documents = Documents(options.seed)
        self.calm = Calm(options.patience)
        self.document_bytes = 0
        self.announced: list[str] = []
        self._turn = 0

    def serve(self, name: str, *settings: str) -> Any:
        model = ("--paged-cache-block-size", str(self.options.block_size))
        ssd = () if "--ssd-cache-max-size" in settings else self._with
        home, fields = self._folder / name, self.options.fields
        return serving(self.options.model, home, *model, *ssd, *settings, fields=fields)

    @property
    def _with(self) -> tuple[str, str]:
        return "--ssd-cache-max-size", self.options.ssd

    def draw(self) -> list[Message]:
        return self.documents.draw(self.options.tokens)

    async def scout(self) -> None:
        """Learn what a document weighs: in tokens, and in the RAM tier."""
        async with self.serve("scout") as server, http_session() as session:
            known = await self.documents.calibrate(session, server.endpoint)
            reading = await ask(session, server.endpoint, self.draw(), ANSWER)
            num_tokens = reading.prompt_tokens or self.options.tokens
            kept = (await until_written(session, server))["hot_bytes"] / (known + num_tokens)
            self.document_bytes = int(kept * num_tokens)
            self.announced = server.announced

    async def warm_up(self, session: aiohttp.ClientSession, *servers: Server) -> None:
        """A short request pays for what is done once in a process.

        It is salted, for all chats share the few tokens that a template begins with, and a file
        would be read for these: the one that is to be measured.
        """
        messages = self.documents.draw(48)
        for server in servers:
            await ask(session, server.endpoint, messages, ANSWER, cache_salt="warm-up")

    async def pair(
        self,
        off: Callable[[], Awaitable[Reading]],
        on: Callable[[], Awaitable[Reading]],
    ) -> Pair:
        """Ask both; who is first changes from pair to pair."""
        self._turn += 1
        if self._turn % 2:
            first = await off()
            return Pair(first, await on())
        second = await on()
        return Pair(await off(), second)


# ── the workloads ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class TwoServers:
    """One without the tier and one with it, otherwise alike, both running."""

    bench: Bench
    session: aiohttp.ClientSession
    off: Server
    on: Server

    async def visit(self, messages: list[Message]) -> Pair:
        async def one(server: Server) -> Reading:
            reading = await ask(self.session, server.endpoint, messages, ANSWER)
            # The end of a turn is written after it has been told. That belongs to the one who
            # wrote it, not to whoever is asked next.
            await asyncio.sleep(self.bench.options.pause)
            return reading

        return await self.bench.pair(lambda: one(self.off), lambda: one(self.on))

    async def calm_visit(self, draw: Callable[[], list[Message]]) -> Pair:
        pair, others = await self.bench.calm.measure(lambda _: self.visit(draw()))
        return replace(pair, others=others)

    async def result(self, workload: str, pairs: Sequence[Pair]) -> Result:
        return Result(workload, pairs, await limits_of(self.session, self.on))


@asynccontextmanager
async def two_servers(bench: Bench, name: str, *settings: str) -> AsyncIterator[TwoServers]:
    async with (
        http_session() as session,
        bench.serve(f"{name}-off", *settings, *WITHOUT) as off,
        bench.serve(f"{name}-on", *settings) as on,
    ):
        await bench.warm_up(session, off, on)
        yield TwoServers(bench, session, off, on)


async def limits_of(session: aiohttp.ClientSession, server: Server) -> dict[str, int]:
    cache = (await statistics_of(session, server))["cache"]
    names = ("hot_limit_bytes", "ssd_limit_bytes", "ssd_written_bytes", "ssd_restored_bytes")
    return {name: cache[name] for name in names}


async def no_reuse(bench: Bench) -> Result:
    async with two_servers(bench, "no-reuse") as two:
        size = bench.options.tokens // 2
        pairs = [
            await two.calm_visit(lambda: bench.documents.draw(size))
            for _ in range(NEW * bench.options.rounds)
        ]
        await until_written(two.session, two.on)
        return await two.result("no-reuse", pairs)


async def reuse_fits(bench: Bench) -> Result:
    async with two_servers(bench, "reuse-fits") as two:
        pairs: list[Pair] = []
        for _ in range(bench.options.rounds):
            messages = bench.draw()
            await two.visit(messages)
            await until_written(two.session, two.on)
            pairs += [await two.calm_visit(lambda m=messages: m) for _ in range(REVISITS)]
        await until_written(two.session, two.on)
        return await two.result("reuse-fits", pairs)


async def spill_revisit(bench: Bench) -> Result:
    hot = str(int(RAM_DOCUMENTS * bench.document_bytes))
    async with two_servers(bench, "spill", "--hot-cache-max-size", f"{hot}B") as two:
        pairs: list[Pair] = []
        for _ in range(bench.options.rounds):
            documents = [bench.draw() for _ in range(bench.options.documents)]
            for messages in documents:
                await two.visit(messages)
            await until_written(two.session, two.on)
            if bench.options.from_disk:
                forget_pages(two.on.home)
            pairs.append(await two.visit(documents[0]))
        await until_written(two.session, two.on)
        return await two.result("spill-revisit", pairs)


async def restart(bench: Bench) -> Result:
    """Each process is asked one document, for a second one would find it warmed up."""
    documents = [bench.draw() for _ in range(bench.options.rounds)]
    limits: dict[str, int] = {}
    async with http_session() as session, bench.serve("restart") as server:
        for messages in documents:
            await ask(session, server.endpoint, messages, ANSWER)

    async def one(messages: list[Message], name: str, *settings: str) -> Reading:
        async with http_session() as session, bench.serve(name, *settings) as server:
            await bench.warm_up(session, server)
            if bench.options.from_disk:
                forget_pages(server.home)
            reading = await ask(session, server.endpoint, messages, ANSWER)
            if not settings:
                await until_written(session, server)
                limits.update(await limits_of(session, server))
            return reading

    pairs = [
        await bench.pair(
            lambda m=messages: one(m, "restart-fresh", *WITHOUT),
            lambda m=messages: one(m, "restart"),
        )
        for messages in documents
    ]
    return Result("restart", pairs, limits)


WORKLOADS: dict[str, Callable[[Bench], Awaitable[Result]]] = {
    "no-reuse": no_reuse,
    "reuse-fits": reuse_fits,
    "spill-revisit": spill_revisit,
    "restart": restart,
}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="omlx-bench-", dir=options.folder) as folder:
        bench = Bench(options, Path(folder))
        await bench.scout()
        results = [await WORKLOADS[name](bench) for name in options.only]
    return {
        "facts": facts(),
        "server": bench.announced,
        "sizes": {
            "model": options.model,
            "tokens": options.tokens,
            "documents": options.documents,
            "document_bytes": bench.document_bytes,
            "rounds": options.rounds,
            "block_size": options.block_size,
            "ssd": options.ssd,
            "from_disk": options.from_disk,
        },
        "workloads": [result.as_json() for result in results],
        "verdict": overall(results),
    }


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo", help="folder or name (default: demo)")
    parser.add_argument("--tokens", type=int, help="tokens of a document (default: 512)")
    parser.add_argument("--documents", type=int, help="of spill-revisit (default: 4)")
    parser.add_argument("--rounds", type=int, help="(default: 3)")
    parser.add_argument("--patience", type=float, help="seconds to wait for calm (default: 60)")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--ssd", default="4GB", help="limit of the tier (default: 4GB)")
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--pause", type=float, help="seconds after a request (default: 0.1)")
    parser.add_argument("--fields", type=json.loads, default={}, help="JSON for each request")
    parser.add_argument("--from-disk", action="store_true", help="drop the page cache first")
    parser.add_argument("--folder", type=Path, help="where the files go (default: the system's)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small: does it run at all?")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    sizes = (
        ("tokens", 512, 160),
        ("documents", 4, 3),
        ("rounds", 3, 1),
        ("patience", 60.0, 0.0),
        ("pause", 0.1, 0.02),
    )
    for name, whole, quick in sizes:
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else whole)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    try:
        report = asyncio.run(until_sigterm(measure(options)))
    except Refused as error:
        raise SystemExit(f"bench_offload: {error}") from None
    print(*report["server"], "", sep="\n")
    print(table(report["workloads"]), "", f"This run is {report['verdict']}.", sep="\n")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1), "utf-8")
    return 0 if report["verdict"] == "as wanted" else 1


if __name__ == "__main__":
    sys.exit(main())
