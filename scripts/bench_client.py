"""One client for any OpenAI-compatible server: first tokens, rates, and what is reused.

    python scripts/bench_client.py --server ours=http://127.0.0.1:8000 --server other=http://...
        [--start NAME=COMMAND] [--model NAME=ID] [--key NAME=VARIABLE] [--only WORKLOAD ...]
        [--rounds 3] [--tokens 512] [--streams 4] [--json FILE] [--markdown FILE] [--svg FILE]

    cold           a new document
    repeat         the same again
    extend         its second and third turn
    branch         the same system prompt, other users
    evict-revisit  a document, ``--between`` others, the first again
    no-reuse       new documents, short answers: tokens a second, both together
    concurrent     ``--streams`` answers at once: tokens a second, time between two tokens
    mixed          a long and a short prompt while an answer runs: its rate until the long one has
                   its first token, as a share of what the same tokens have alone; first token of
                   the short prompt
    restart        a document, the process restarted, the same again

Where nothing is said, the time to the first token. All servers are asked the same, by turns; who
is first changes from round to round. Nothing is needed but streamed chats: tokens are counted by
pieces of text, of which most servers send one for each; reuse is told if the server does
(``usage.prompt_tokens_details.cached_tokens``). ``--fields`` is JSON that is added to each request,
such as ``{"ignore_eos": true}`` where a server knows it. ``--start`` gives the command that starts
a server at its URL; it is then started and ended here, and only then restarted. ``--key`` names
the environment variable that holds its key. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from bars import bars_svg
from chats import (
    Documents,
    Endpoint,
    Message,
    Reading,
    Refused,
    TooShort,
    ask,
    http_session,
    rate_together,
    throughput,
)
from servers import (
    ended,
    facts,
    until_ready,
    until_sigterm,
)

ANSWER = 8
TURN = "Go on with the next three lines."
SOLO_PIECES = 16
"""Of the running answer, before others disturb it."""


class Value(NamedTuple):
    """What a workload found at one server."""

    metric: str
    unit: str
    value: float
    cached: int | None = None
    """Tokens that the server says it reused."""


class Failed(NamedTuple):
    """Why a workload found nothing."""

    reason: str


class Target:
    """A server that is measured; with ``command``, one that is started and ended here."""

    def __init__(self, name: str, endpoint: Endpoint, command: str | None, log: Path) -> None:
        self.name, self.endpoint, self.command = name, endpoint, command
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        if self.command is None:
            return
        with self._log.open("ab") as written:
            self._process = await asyncio.create_subprocess_exec(
                *shlex.split(self.command), stdout=written, stderr=written
            )
        await until_ready(f"{self.endpoint.url}/v1/models", self._process, self._log)

    async def stop(self) -> None:
        if self._process is not None:
            await ended(self._process)


class Client:
    """Asks one server."""

    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self.session, self.target = session, target

    async def ask(
        self,
        chat: Sequence[Message],
        max_tokens: int,
        on_piece: Callable[[int], object] | None = None,
    ) -> Reading:
        return await ask(self.session, self.target.endpoint, chat, max_tokens, on_piece)


# ── the workloads: what is asked, drawn once a round, and what one server makes of it ────────

Chats = list[list[Message]]
Measure = Callable[[Client, Chats, argparse.Namespace], Awaitable[list[Value]]]


def first(reading: Reading) -> Value:
    return Value("first token", "ms", reading.ttft_ms, reading.cached_tokens)


async def cold(client: Client, chats: Chats, options: argparse.Namespace) -> list[Value]:
    return [first(await client.ask(chats[0], ANSWER))]


async def repeat(client: Client, chats: Chats, options: argparse.Namespace) -> list[Value]:
    await client.ask(chats[0], ANSWER)
    return [first(await client.ask(chats[0], ANSWER))]


async def extend(client: Client, chats: Chats, options: argparse.Namespace) -> list[Value]:
    chat, found = list(chats[0]), list[Value]()
    for _ in range(3):
        reading = await client.ask(chat, 4 * ANSWER)
        found.append(first(reading))
        chat += [said("assistant", reading.text), said("user", TURN)]
    return found[1:]


async def branch(client: Client, chats: Chats, options: argparse.Namespace) -> list[Value]:
    users = ("What comes first?", "Who is named here?", "Sum it up, please.", "How many are there?")
    asked = [[chats[0][0], said("user", text)] for text in users]
    return [first(await client.ask(chat, ANSWER)) for chat in asked][1:]


async def evict_revisit(client: Client, chats: Chats, options: argparse.Namespace) -> list[Value]:
    for chat in chats:
        await client.ask(chat, ANSWER)
    return [first(await client.ask(chats[0], ANSWER))]


async def no_reuse(client: Client, chats: Chats, options: argparse.Namespace) -> list[Value]:
    rate = await throughput(
        client.session, client.target.endpoint, chats[: options.streams], 1, 2 * ANSWER
    )
    return [Value("one stream", "tok/s", rate)]


async def concurrent(client: Client, chats: Chats, options: argparse.Namespace) -> list[Value]:
    readings = await asyncio.gather(*(client.ask(chat, options.answer) for chat in chats))
    gaps = [1000 * (b - a) for r in readings for a, b in pairwise(r.arrivals)]
    return [
        Value(f"{len(chats)} streams", "tok/s", rate_together(readings)),
        Value("between two tokens, median", "ms", statistics.median(gaps)),
        Value("between two tokens, p99", "ms", statistics.quantiles(gaps, n=100)[98]),
    ]


async def mixed(client: Client, chats: Chats, options: argparse.Namespace) -> list[Value]:
    """The long prompt is sent, and at once the short one, when the answer has run for a while."""
    stream, long, short = chats
    under_way = asyncio.Event()
    running = asyncio.create_task(
        client.ask(
            stream,
            3 * options.answer,
            lambda count: count == SOLO_PIECES and under_way.set(),
        )
    )
    running.add_done_callback(lambda _: under_way.set())  # however it ends
    await under_way.wait()
    disturbed = (client.ask(long, 1), client.ask(short, 1))
    waited, brief = await asyncio.gather(*disturbed)
    disturbed_arrivals = (await running).arrivals
    alone = (await client.ask(stream, 3 * options.answer)).arrivals
    share = share_meanwhile(disturbed_arrivals, alone, waited.sent, waited.arrivals[0])
    return [
        Value("running answer, share of its rate", "of 1", share),
        Value("first token of the short prompt", "ms", brief.ttft_ms, brief.cached_tokens),
        Value("first token of the long prompt", "ms", waited.ttft_ms, waited.cached_tokens),
    ]


def share_meanwhile(
    arrivals: Sequence[float], alone: Sequence[float], start: float, stop: float
) -> float:
    """Of ``start`` to ``stop``, the part that the tokens of that time take ``alone``.

    Compared token by token, because each takes longer than the one before it. Raises TooShort.
    """
    before = sum(arrival <= start for arrival in arrivals)
    last = sum(arrival <= stop for arrival in arrivals) - 1
    stop = min(stop, arrivals[-1])
    if before < SOLO_PIECES or stop <= start:
        raise TooShort("the running answer ended before it was disturbed")
    if len(alone) <= last:
        raise TooShort("the running answer was shorter when it was asked alone")
    return (alone[last] - alone[before - 1]) / (stop - start)


async def restart(client: Client, chats: Chats, options: argparse.Namespace) -> list[Value]:
    """What is done once in a process is paid for by another prompt."""
    await client.ask(chats[0], ANSWER)
    await client.target.stop()
    await client.target.start()
    await client.ask(chats[1], 1)
    return [first(await client.ask(chats[0], ANSWER))]


WORKLOADS: dict[str, tuple[Measure, Callable[[argparse.Namespace], list[int]]]] = {
    "cold": (cold, lambda o: [o.tokens]),
    "repeat": (repeat, lambda o: [o.tokens]),
    "extend": (extend, lambda o: [o.tokens]),
    "branch": (branch, lambda o: [o.tokens]),
    "evict-revisit": (evict_revisit, lambda o: [o.tokens] * (1 + o.between)),
    "no-reuse": (no_reuse, lambda o: [o.tokens // 2] * o.streams),
    "concurrent": (concurrent, lambda o: [64] * o.streams),
    "mixed": (mixed, lambda o: [64, 2 * o.tokens, 48]),
    "restart": (restart, lambda o: [o.tokens, 48]),
}
"""Each with the tokens of the chats that it is given."""


def said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


# ── the run ──────────────────────────────────────────────────────────────────────────────────


async def measure(options: argparse.Namespace, targets: Sequence[Target]) -> dict[str, Any]:
    documents = Documents(options.seed)
    found: dict[tuple[str, str, str, str], list[Value]] = {}
    failures: dict[tuple[str, str], Failed] = {}
    async with http_session() as session:
        for target in targets:
            await target.start()
            await documents.calibrate(session, target.endpoint)
        for number in range(options.rounds):
            for name in options.only:
                run, sizes = WORKLOADS[name]
                chats = [documents.draw(tokens) for tokens in sizes(options)]
                # The first of one round is the last of the next.
                for target in (
                    *targets[number % len(targets) :],
                    *targets[: number % len(targets)],
                ):
                    if name == "restart" and target.command is None:
                        failures[name, target.name] = Failed("not started here")
                        continue
                    try:
                        values = await run(Client(session, target), chats, options)
                    except (Refused, TooShort, aiohttp.ClientError) as error:
                        failures[name, target.name] = Failed(str(error))
                        continue
                    for value in values:
                        key = (name, value.metric, value.unit, target.name)
                        found.setdefault(key, []).append(value)
    return {
        "facts": facts(),
        "servers": {t.name: t.command or t.endpoint.url for t in targets},
        "sizes": {
            name: getattr(options, name)
            for name in ("tokens", "answer", "streams", "between", "rounds", "seed")
        },
        "results": [result(*key, values) for key, values in found.items()],
        "failures": [
            {"workload": name, "server": server, "reason": failed.reason}
            for (name, server), failed in failures.items()
        ],
    }


def result(workload: str, metric: str, unit: str, server: str, values: list[Value]) -> dict:
    measured = [value.value for value in values]
    told = [value.cached for value in values if value.cached is not None]
    return {
        "workload": workload,
        "metric": metric,
        "unit": unit,
        "server": server,
        "median": statistics.median(measured),
        "min": min(measured),
        "max": max(measured),
        "cached": statistics.median(told) if told else None,
        "values": measured,
    }


def table(report: dict[str, Any]) -> str:
    """Markdown: a line for each metric, a column for each server, reused tokens in brackets."""
    servers = list(report["servers"])
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in report["results"]:
        line = cells.setdefault((row["workload"], row["metric"], row["unit"]), {})
        reused = "" if row["cached"] is None else f" ({row['cached']:.0f})"
        line[row["server"]] = f"{row['median']:,.{2 if row['median'] < 10 else 1}f}{reused}"
    failed = {(f["workload"], f["server"]): f["reason"] for f in report["failures"]}
    lines = [
        f"| workload | metric (reused tokens) | unit | {' | '.join(servers)} |",
        "|---" * (3 + len(servers)) + "|",
    ]
    for (workload, metric, unit), line in cells.items():
        values = (line.get(s) or f"none: {failed.get((workload, s), '?')}" for s in servers)
        lines.append(f"| {workload} | {metric} | {unit} | {' | '.join(values)} |")
    measured = {workload for workload, _, _ in cells}
    nothing = {f["workload"]: f["reason"] for f in report["failures"]}
    lines += [
        f"| {workload} | none: {reason} |{' |' * (1 + len(servers))}"
        for workload, reason in nothing.items()
        if workload not in measured
    ]
    return "\n".join(lines)


def named(given: Sequence[str]) -> dict[str, str]:
    """Raises SystemExit for what is not NAME=VALUE."""
    if wrong := [text for text in given if not all(text.partition("="))]:
        raise SystemExit(f"bench_client: {wrong[0]!r} is not NAME=VALUE")
    return {name: value for name, _, value in (text.partition("=") for text in given)}


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--server", action="append", required=True, metavar="NAME=URL")
    for name in ("start", "model", "key"):
        parser.add_argument(f"--{name}", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--tokens", type=int, default=512, help="of a document")
    parser.add_argument("--answer", type=int, default=64, help="tokens of a long answer")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--between", type=int, default=4, help="documents before the revisit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fields", type=json.loads, default={}, help="JSON for each request")
    parser.add_argument("--seed", type=int, default=1)
    for name in ("json", "markdown", "svg"):
        parser.add_argument(f"--{name}", type=Path)
    return parser.parse_args(argv)


def targets_of(options: argparse.Namespace, logs: Path) -> list[Target]:
    starts, models, keys = (named(given) for given in (options.start, options.model, options.key))
    servers = named(options.server)
    if unknown := {*starts, *models, *keys} - set(servers):
        raise SystemExit(f"bench_client: no --server is called {', '.join(sorted(unknown))}")
    if unset := [variable for variable in keys.values() if variable not in os.environ]:
        raise SystemExit(f"bench_client: the variable {unset[0]} is not set")
    return [
        Target(
            name,
            Endpoint(
                url.rstrip("/"),
                models.get(name),
                os.environ[keys[name]] if name in keys else None,
                options.fields,
            ),
            starts.get(name),
            logs / f"{number}.log",
        )
        for number, (name, url) in enumerate(servers.items())
    ]


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="omlx-bench-") as logs:
        targets = targets_of(options, Path(logs))
        try:
            return await measure(options, targets)
        finally:
            for target in targets:
                await target.stop()


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    report = asyncio.run(until_sigterm(run(options)))
    markdown = table(report)
    print(markdown)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1), "utf-8")
    if options.markdown:
        options.markdown.write_text(markdown + "\n", "utf-8")
    if options.svg:
        options.svg.write_text(bars_svg(report["results"], list(report["servers"])), "utf-8")
    return 0 if report["results"] else 1


if __name__ == "__main__":
    sys.exit(main())
