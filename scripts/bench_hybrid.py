"""What a model with recurrent layers reuses: chats, shared parts, shared beginnings, repeats.

    python scripts/bench_hybrid.py --model FOLDER [--codecs fp32,int8] [--rounds 5] [--json FILE]
    python scripts/bench_hybrid.py --model FOLDER --all     every storage with every codec

Counted are the prompt tokens that a request had to compute, at least 1. Between two requests
nothing happens (RAM), or RAM is emptied (files), or all but the files is forgotten (restart). RAM
holds states as they are, so there the codec plays no part.

    chat      five turns; each prompt is the one before, its answer, and ``--turn`` new tokens
    users     six prompts that share a system part of ``--system`` tokens, which is announced
    branch    five prompts that share ``--shared`` tokens of which nobody said that they are shared
    repeat    time to the first token of a prompt seen before, as a share of the time when it is new

Medians; the machine should be otherwise idle. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omlx import blas
from omlx.cache.codecs import CODECS

if TYPE_CHECKING:
    from in_process import InProcess

TURNS, USERS, BRANCHES = 5, 6, 5
OWN = 16
"""Tokens that each user of a shared part adds."""

Between = Callable[["InProcess"], None]
BETWEEN: dict[str, Between] = {
    "RAM": lambda bench: None,
    "files": lambda bench: bench.forget_payloads(),
    "restart": lambda bench: bench.forget_ram(),
}


class Words:
    """Tokens to make prompts of; equal seeds give equal prompts."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(5)
        self._stop = min(vocab_size, 30_000)

    def draw(self, count: int) -> list[int]:
        return [self._random.randrange(100, self._stop) for _ in range(count)]


def chat(bench: InProcess, between: Between, new: int, answer: int) -> tuple[list[int], list[int]]:
    """(computed, new tokens) of each turn; the answer is new in the prompt after it, but known."""
    words, prompt = Words(bench.vocab_size), list[int]()
    computed: list[int] = []
    unknown: list[int] = []
    for _ in range(TURNS):
        fresh = words.draw(new)
        prompt += fresh
        run = bench.run(prompt, answer)
        computed.append(len(prompt) - run.cached)
        unknown.append(new)
        prompt += run.tokens
        between(bench)
    return computed, unknown


def shared(
    bench: InProcess, between: Between, common: int, users: int, answer: int, *, announced: bool
) -> list[int]:
    """Computed tokens of each of the prompts that begin alike."""
    words = Words(bench.vocab_size)
    beginning = words.draw(common)
    computed: list[int] = []
    for _ in range(users):
        prompt = beginning + words.draw(OWN)
        run = bench.run(prompt, answer, num_system=common if announced else 0)
        computed.append(len(prompt) - run.cached)
        between(bench)
    return computed


def repeats(bench: InProcess, length: int, rounds: int) -> dict[str, float]:
    """Milliseconds to the first token: new, from RAM, after a restart."""
    prompt = Words(bench.vocab_size).draw(length)
    bench.run(prompt[: length // 4], 1, caching=False)
    cold = [bench.run(prompt, 1, caching=False).ttft_ms for _ in range(max(3, rounds // 2))]
    bench.run(prompt, 1)
    times: dict[str, list[float]] = {"RAM": [], "restart": []}
    for _ in range(rounds):
        for where, found in times.items():
            BETWEEN[where](bench)
            run = bench.run(prompt, 1, keep=False)
            assert run.cached == length - 1, "an exact repeat computes one token"
            found.append(run.ttft_ms)
        bench.run(prompt, 1)
    return {"new": statistics.median(cold)} | {
        where: statistics.median(found) for where, found in times.items()
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from in_process import InProcess

    rows: list[dict[str, Any]] = []
    storages = (False, True) if arguments.all else (bool(arguments.embedded),)
    codecs = arguments.codecs.split(",")
    for embedded, codec in [(embedded, codec) for embedded in storages for codec in codecs]:
        bench = InProcess(arguments.model, codec=codec, embedded=embedded)
        assert bench.loaded.cache.is_recurrent, (
            "a model without recurrent layers has no checkpoints"
        )
        storage = "embedded" if embedded else "ssd_sidecar"
        row: dict[str, Any] = {"codec": f"{storage} {codec}" if arguments.all else codec}
        for where, between in BETWEEN.items():
            bench.clear()
            computed, new = chat(bench, between, arguments.turn, arguments.answer)
            row[f"chat {where}"], row["new"] = computed, new
            bench.clear()
            row[f"users {where}"] = shared(
                bench, between, arguments.system, USERS, arguments.answer, announced=True
            )
            bench.clear()
            row[f"branch {where}"] = shared(
                bench, between, arguments.shared, BRANCHES, arguments.answer, announced=False
            )
        bench.clear()
        row["repeat"] = repeats(bench, arguments.repeat, arguments.rounds)
        rows.append(row)
    return rows


def markdown(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> str:
    def counts(title: str, what: str) -> list[str]:
        lines = [title, "", "| codec | RAM | files | restart |", "|---|---|---|---|"]
        for row in rows:
            cells = " | ".join(", ".join(map(str, row[f"{what} {where}"])) for where in BETWEEN)
            lines.append(f"| {row['codec']} | {cells} |")
        return [*lines, ""]

    lines = [
        *counts(f"Computed tokens of five turns, {arguments.turn} new ones each:", "chat"),
        *counts(
            f"Computed tokens of six users, {arguments.system} shared and {OWN} of their own:",
            "users",
        ),
        *counts(
            f"Computed tokens of five prompts, {arguments.shared} shared and {OWN} of their own:",
            "branch",
        ),
        f"Time to the first token of a prompt of {arguments.repeat} tokens:",
        "",
        "| codec | new, ms | RAM, ms | restart, ms | RAM / new | restart / new |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        new, ram, restart = (row["repeat"][where] for where in ("new", "RAM", "restart"))
        lines.append(
            f"| {row['codec']} | {new:.0f} | {ram:.1f} | {restart:.1f} "
            f"| {ram / new:.4f} | {restart / new:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    blas.preload_fast_blas()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--codecs", default=",".join(CODECS))
    parser.add_argument("--embedded", action="store_true", help="states in the files of blocks")
    parser.add_argument("--all", action="store_true", help="both storages, one after the other")
    parser.add_argument("--turn", type=int, default=120)
    parser.add_argument("--answer", type=int, default=24)
    parser.add_argument("--system", type=int, default=1200)
    parser.add_argument("--shared", type=int, default=700)
    parser.add_argument("--repeat", type=int, default=1487)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments)
    print(markdown(rows, arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
