"""What a grammar costs: steps of rows that keep to one against steps of rows that are free.

    python scripts/bench_structured.py --model SMOLLM2
    python scripts/bench_structured.py --model SMOLLM2 --rows 1 4 --steps 96 --rounds 5

The schema is a long list of objects, so no answer ends. Free and constrained rounds take turns;
both sample at temperature 1. "half" has a grammar in every other row. A mask is the matcher's work
for one row and step, on the host; the rest of the difference is applying it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from omlx.blas import preload_fast_blas

if __name__ == "__main__":
    preload_fast_blas()  # before mlx loads the slow one

from omlx.core.grammar import Grammar, json_schema
from omlx.core.plan import Admit, Prefill, Sampling, StepPlan, Uid
from omlx.engine.grammar import Grammars, Matcher
from omlx.engine.load import LoadedModel, load
from omlx.engine.step import Engine

WORD = {"type": "string", "maxLength": 30}
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": WORD, "country": WORD, "people": {"type": "integer"}},
        "required": ["name", "country", "people"],
        "additionalProperties": False,
    },
}
QUESTION = "List the largest cities of Europe, with their countries and how many people live there."


class Bench:
    def __init__(self, model: LoadedModel, ahead: bool) -> None:
        self.grammars = Grammars(model.tokenizer)
        self.engine = Engine(model.model, model.cache, ahead=ahead, grammars=self.grammars)
        self.prompt = tuple(model.tokenizer.encode(QUESTION))
        self._uids = map(Uid, count())
        self.mask_s: list[float] = []

    def compile_s(self, grammar: Grammar) -> float:
        started = time.perf_counter()
        self.grammars.check(grammar)
        return time.perf_counter() - started

    def step_s(self, grammars: Sequence[Grammar | None], steps: int) -> float:
        """Seconds of a step of as many rows, after some to warm up."""
        uids = [next(self._uids) for _ in grammars]
        sampling = Sampling(temperature=1.0)
        admits = tuple(
            Admit(uid, self.prompt, replace(sampling, grammar=grammar), ())
            for uid, grammar in zip(uids, grammars, strict=True)
        )
        prefills = tuple(Prefill(uid, len(self.prompt) - 1) for uid in uids)
        self._run(StepPlan(admits=admits, prefills=prefills, starts=tuple(uids), decode=True))
        for _ in range(4):
            self._run(StepPlan(decode=True))
        started = time.perf_counter()
        for _ in range(steps):
            self._run(StepPlan(decode=True))
        taken = time.perf_counter() - started
        self._run(StepPlan(removes=tuple(uids)))
        return taken / steps

    def _run(self, plan: StepPlan) -> None:
        faults = self.engine.run(plan).result.faults
        assert not faults, faults

    def time_masks(self) -> None:
        """Keep how long each mask takes, from now on."""
        allowed, times = Matcher.allowed, self.mask_s

        def timed(self: Matcher, fed: int, vocab_size: int) -> Any:
            started = time.perf_counter()
            mask = allowed(self, fed, vocab_size)
            times.append(time.perf_counter() - started)
            return mask

        Matcher.allowed = timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    model = load(asked.model, 1 << 40)
    bench = Bench(model, ahead=model.backend != "cpu")
    grammar = json_schema(json.dumps(SCHEMA))
    first, again = bench.compile_s(grammar), bench.compile_s(json_schema(json.dumps(SCHEMA) + " "))
    print(f"compiled in {1000 * again:.1f} ms, the first with the tokenizer {1000 * first:.0f} ms")
    bench.time_masks()
    print("rows  grammar     ms a step   tok/s   of free")
    for rows in asked.rows:
        kinds: dict[str, list[Grammar | None]] = {"free": [None] * rows}
        if rows > 1:
            kinds["half"] = [grammar if row % 2 else None for row in range(rows)]
        kinds["all"] = [grammar] * rows
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(asked.rounds):
            for kind, grammars in kinds.items():
                found[kind].append(bench.step_s(grammars, asked.steps))
        free = median(found["free"])
        for kind, times in found.items():
            step = median(times)
            print(f"{rows:4}  {kind:10} {1000 * step:8.1f} {rows / step:9.1f} {free / step:8.3f}")
    masks = sorted(bench.mask_s)
    print(
        f"a mask: median {1000 * median(masks):.2f} ms, "
        f"p99 {1000 * masks[len(masks) * 99 // 100]:.2f} ms"
    )


if __name__ == "__main__":
    main()
