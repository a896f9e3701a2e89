"""Random prompts that share random prefixes, random cancels, and a hot tier of a few blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from omlx.core.plan import Uid
from omlx.engine.load import LoadedModel
from tests.engine.rig import BLOCK, Answer, Rig, greatest_difference

NEAR = 1e-3
MAX_PROMPT = 150
MAX_RUNNING = 4
VOCABULARY = (20, 200)
"""Token ids to draw from."""


@dataclass
class Soak:
    """One server's life, driven step by step. Everything is drawn from ``seed``."""

    model: LoadedModel
    seed: int
    files: Path | None = None
    hot_blocks: int = 4
    ahead: bool = False
    steps: int = 0
    checked: int = 0
    cancelled: int = 0
    reused_tokens: int = 0
    asked: dict[Uid, tuple[int, ...]] = field(default_factory=dict)
    """Prompts of the answers that were not checked yet."""
    said: list[tuple[int, ...]] = field(default_factory=list)
    """Prompts and turns so far, for the next ones to begin with."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._alone = Rig(self.model, caching=False)
        self.begin_life()

    def begin_life(self) -> None:
        """A new server on the same files."""
        self.rig = Rig(self.model, files=self.files, max_running=MAX_RUNNING, ahead=self.ahead)
        self.rig.cache.pool.set_limit(self.hot_blocks * BLOCK * self.model.cache.bytes_per_token)

    def run(self, requests: int) -> None:
        """Serve as many requests, then check that nothing is left of them."""
        while requests or self.asked:
            if requests and len(self.asked) < 2 * MAX_RUNNING and self.rng.random() < 0.3:
                self._submit()
                requests -= 1
            if self.asked and self.rng.random() < 0.06:
                self.rig.core.cancel(self.rng.choice(list(self.asked)), 0.0)
            self.rig.step()
            self.steps += 1
            self._check_bytes()
            self._check_answers()
        self.rig.run()  # rows and held blocks are back at none
        self._check_bytes()
        pool = self.rig.cache.pool
        assert len(self.rig.engine.store) == pool.num_cached, "an array is stored for nobody"

    def _submit(self) -> None:
        rng = self.rng
        head = rng.choice(self.said)[: rng.randint(0, MAX_PROMPT)] if self.said else ()
        fresh = [rng.randrange(*VOCABULARY) for _ in range(rng.randint(1, 40))]
        prompt = (*head, *fresh)[:MAX_PROMPT]
        if self.said and rng.random() < 0.2:
            prompt = rng.choice(self.said)
        choices = rng.choice([1, 1, 1, 2, 3])
        uid = self.rig.submit(prompt, rng.randint(1, 10), n=choices)
        self.asked |= {Uid(uid + index): prompt for index in range(choices)}
        self.said = [*self.said[-30:], prompt]

    def _check_bytes(self) -> None:
        """What is stored is what the books say, array for array, and within the limit."""
        pool, store = self.rig.cache.pool, self.rig.engine.store
        assert pool.hot_bytes == store.nbytes
        assert pool.hot_bytes <= pool.limit_bytes
        self.rig.cache.check()

    def _check_answers(self) -> None:
        for uid, prompt in list(self.asked.items()):
            answer = self.rig.answers[uid]
            if answer.closed is not None:
                del self.asked[uid], self.rig.answers[uid]
                self._check(prompt, answer)

    def _check(self, prompt: tuple[int, ...], answer: Answer) -> None:
        assert answer.closed is not None
        assert answer.closed.error is None
        self.checked += 1
        self.cancelled += answer.closed.finish_reason == "cancelled"
        self.reused_tokens += answer.cached
        if not answer.tokens:
            assert answer.closed.finish_reason == "cancelled"
            return
        wanted = self._alone.ask(prompt, len(answer.tokens))
        self._alone.answers.clear()
        assert answer.tokens == wanted.tokens
        assert greatest_difference(answer, wanted) <= NEAR
        self.said.append((*prompt, *answer.tokens)[:MAX_PROMPT])
