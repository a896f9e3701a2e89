"""Where to keep recurrent states: bytes kept against tokens recomputed, for several policies.

    python scripts/simulate_checkpoints.py [--seed 1] [--checkpoint-mib 75] [--json FILE]

Nothing is computed: a prompt is a path of named pieces of text, and two prompts share what their
paths share. KV is never given up, so what is recomputed is the policy's doing alone.

    ours      ``cuts`` and ``thin`` of omlx/cache/checkpoints.py
    unaged    the same, and nothing is ever let go
    dense     a state at the end of every block of 256 tokens
    lattice   a state every 2,048 tokens
    last      before the last prompt token and at the end of the turn

    chat      conversations side by side; some turns are asked again, some are edited and go on
    branches  users of one announced system part, questions about documents that nobody announced
    agents    long announced instructions, many small steps, and helpers that fork from the middle

Needed is what no earlier request had computed, at least the last token; more than that is waste.
The default size of a checkpoint is about Qwen3-Next-80B-A3B's in float32. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from omlx.cache.checkpoints import Mark, Place, cuts, thin

BLOCK, INTERVAL = 256, 2048


class Piece(NamedTuple):
    name: int
    length: int


Pieces = tuple[Piece, ...]


class Request(NamedTuple):
    prompt: Pieces
    answer: Piece
    num_system: int = 0


def length_of(text: Pieces) -> int:
    return sum(piece.length for piece in text)


# ── policies ─────────────────────────────────────────────────────────────────────────────────


class Job(NamedTuple):
    """What a policy is asked: where to keep a state of one request."""

    num_prompt: int
    num_cached: int
    num_all: int
    num_system: int
    branch: int | None


Policy = Callable[[Job], dict[int, Place]]


def ours(job: Job) -> dict[int, Place]:
    found = cuts(
        job.num_prompt,
        job.num_cached,
        interval=INTERVAL,
        num_system=job.num_system,
        branch=job.branch,
    )
    return found | {job.num_all: Place.TURN}


def every(step: int) -> Policy:
    def policy(job: Job) -> dict[int, Place]:
        start = (job.num_cached // step + 1) * step
        return dict.fromkeys(range(start, job.num_all + 1, step), Place.LATTICE)

    return policy


def last(job: Job) -> dict[int, Place]:
    return {job.num_prompt - 1: Place.LAST, job.num_all: Place.TURN}


POLICIES: dict[str, tuple[Policy, bool]] = {
    "ours": (ours, True),
    "unaged": (ours, False),
    "dense": (every(BLOCK), False),
    "lattice": (every(INTERVAL), False),
    "last": (last, False),
}


# ── the books ────────────────────────────────────────────────────────────────────────────────


@dataclass
class Branch:
    """A piece behind a path: how much of it is known, and its states by position within it."""

    known: int = 0
    states: dict[int, Place] = field(default_factory=dict)


class Books:
    def __init__(self) -> None:
        self._branches: dict[tuple[int, ...], Branch] = {}
        self.count = self.most = 0

    def _along(self, text: Pieces) -> Iterator[tuple[int, Piece, Branch]]:
        """(position of its first token, piece, what is known of it)"""
        path: tuple[int, ...] = ()
        start = 0
        for piece in text:
            path = (*path, piece.name)
            yield start, piece, self._branches.setdefault(path, Branch())
            start += piece.length

    def find(self, prompt: Pieces) -> tuple[int, int]:
        """(tokens that are known, the deepest state within them)"""
        usable, known, deepest = length_of(prompt) - 1, 0, 0
        for start, piece, branch in self._along(prompt):
            known = min(usable, start + branch.known)
            within = [start + at for at in branch.states if start + at <= known]
            deepest = max([deepest, *within])
            if branch.known < piece.length:
                break
        return known, deepest

    def add(self, text: Pieces, num_known: int, states: dict[int, Place]) -> None:
        for start, piece, branch in self._along(text):
            branch.known = max(branch.known, min(piece.length, num_known - start))
            for position, place in states.items():
                if start < position <= start + piece.length:
                    before = branch.states.get(position - start)
                    self.count += before is None
                    branch.states[position - start] = max(place, before or place)
        self.most = max(self.most, self.count)

    def age(self, text: Pieces) -> None:
        marks = {
            Mark(start + at, place): (branch, at)
            for start, _, branch in self._along(text)
            for at, place in branch.states.items()
        }
        for mark in thin(list(marks)):
            branch, at = marks[mark]
            del branch.states[at]
            self.count -= 1


def replay(trace: list[Request], policy: Policy, *, ages: bool) -> dict[str, int]:
    books = Books()
    computed = needed = 0
    for request in trace:
        text = (*request.prompt, request.answer)
        num_prompt, num_all = length_of(request.prompt), length_of(text) - 1
        known, cached = books.find(request.prompt)
        computed += num_prompt - cached
        needed += num_prompt - known
        branch = known if known > cached else None
        job = Job(num_prompt, cached, num_all, request.num_system, branch)
        states = policy(job)
        books.add(text, num_all, {at: place for at, place in states.items() if at > cached})
        if ages:
            books.age(text)
    return {"computed": computed, "needed": needed, "kept": books.count, "most": books.most}


# ── traces ───────────────────────────────────────────────────────────────────────────────────


class Writer:
    """Makes traces; each piece of text has a name of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._names = 0

    def piece(self, low: int, high: int) -> Piece:
        self._names += 1
        return Piece(self._names, self.random.randint(low, high))

    def mixed(self, threads: list[list[Request]]) -> list[Request]:
        """Several conversations at once, each in its own order."""
        waiting = [iter(thread) for thread in threads]
        mixed: list[Request] = []
        while waiting:
            thread = self.random.choice(waiting)
            request = next(thread, None)
            if request is None:
                waiting.remove(thread)
            else:
                mixed.append(request)
        return mixed

    def chat(self) -> list[Request]:
        def conversation() -> list[Request]:
            requests: list[Request] = []
            turns: list[tuple[Piece, Piece]] = []
            for _ in range(self.random.randint(4, 24)):
                if len(turns) > 2 and self.random.random() < 0.08:  # an earlier turn is edited
                    turns = turns[: self.random.randrange(len(turns))]
                question, answer = self.piece(20, 500), self.piece(50, 800)
                before = tuple(piece for turn in turns for piece in turn)
                requests.append(Request((*before, question), answer))
                if self.random.random() < 0.1:  # regenerate
                    answer = self.piece(50, 800)
                    requests.append(Request((*before, question), answer))
                turns.append((question, answer))
            return requests

        return self.mixed([conversation() for _ in range(30)])

    def branches(self) -> list[Request]:
        system = self.piece(1200, 1200)

        def thread(beginning: Pieces, num_system: int, turns: int) -> list[Request]:
            prompt, requests = beginning, list[Request]()
            for _ in range(turns):
                prompt = (*prompt, self.piece(20, 300))
                requests.append(Request(prompt, self.piece(50, 500), num_system))
                prompt = (*prompt, requests[-1].answer)
            return requests

        threads = [thread((system,), system.length, self.random.randint(1, 4)) for _ in range(40)]
        for _ in range(12):
            document = self.piece(1500, 9000)
            threads += [
                thread((system, document), system.length, self.random.randint(1, 2))
                for _ in range(self.random.randint(2, 6))
            ]
        return self.mixed(threads)

    def agents(self) -> list[Request]:
        instructions = self.piece(6000, 6000)

        def agent() -> list[Request]:
            prompt: Pieces = (instructions, self.piece(50, 400))
            requests: list[Request] = []
            for _ in range(self.random.randint(15, 60)):
                answer = self.piece(40, 250)
                requests.append(Request(prompt, answer, instructions.length))
                if self.random.random() < 0.06:  # a helper goes on from here, or from before
                    cut = self.random.randrange(2, len(prompt) + 1)
                    helper = (*prompt[:cut], self.piece(50, 300))
                    for _ in range(3):
                        requests.append(Request(helper, self.piece(40, 250), instructions.length))
                        helper = (*helper, requests[-1].answer, self.piece(100, 1500))
                prompt = (*prompt, answer, self.piece(50, 2500))
            return requests

        return self.mixed([agent() for _ in range(8)])


# ── report ───────────────────────────────────────────────────────────────────────────────────


def measure(seed: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in ("chat", "branches", "agents"):
        trace = getattr(Writer(seed), name)()
        for policy_name, (policy, ages) in POLICIES.items():
            found = replay(trace, policy, ages=ages)
            rows.append({"trace": name, "policy": policy_name, "requests": len(trace), **found})
    return rows


def markdown(rows: list[dict[str, Any]], checkpoint_bytes: int) -> str:
    lines = [
        "| trace | policy | requests | needed | computed | waste | states kept | GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        waste = row["computed"] / row["needed"] - 1
        lines.append(
            f"| {row['trace']} | {row['policy']} | {row['requests']} | {row['needed']:,} "
            f"| {row['computed']:,} | {100 * waste:.1f} % | {row['kept']:,} "
            f"| {row['kept'] * checkpoint_bytes / (1 << 30):.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint-mib", type=float, default=75)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.seed)
    print(markdown(rows, int(arguments.checkpoint_mib * (1 << 20))))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
