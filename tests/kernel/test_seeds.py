"""Under any interleaving and any crash, every ask ends exactly once."""

from __future__ import annotations

import asyncio
import random

import pytest

from omlx.kernel.message import ActorGone, MailboxFull, Rejected
from tests.kernel.stage import Add, Adder, Break, Sleep, Stage
from tests.sim.loop import simulate


@pytest.mark.parametrize("seed", range(200))
def test_every_ask_ends(seed: int) -> None:
    rng = random.Random(seed)

    async def client(adder: object) -> str:
        await asyncio.sleep(rng.uniform(0, 5))
        try:
            await adder.ask(Add(rng.randint(0, 2)))  # type: ignore[attr-defined]
        except (ActorGone, MailboxFull, Rejected) as error:
            return type(error).__name__
        return "answered"

    async def main() -> list[str]:
        stage = Stage(seed, max_restarts=rng.randint(0, 3))
        adder = stage.spawn(Adder, capacity=rng.randint(1, 3))
        async with stage:
            clients = [asyncio.create_task(client(adder)) for _ in range(10)]
            for _ in range(3):
                await asyncio.sleep(rng.uniform(0, 2))
                adder.offer(rng.choice([Break(), Sleep(rng.uniform(0, 2))]))
            if rng.random() < 0.5:
                await asyncio.sleep(rng.uniform(0, 3))
                stage.stopping.set()
            outcomes = await asyncio.gather(*clients)
        return outcomes

    outcomes = simulate(main())
    assert len(outcomes) == 10


def test_the_same_seed_gives_the_same_run_and_others_differ() -> None:
    def trace(seed: int) -> list[str]:
        log: list[str] = []

        class Loud(Adder):
            async def receive(self, message: object) -> object:
                log.append(self.name)
                return await super().receive(message)  # type: ignore[arg-type]

        class A(Loud):
            name = "a"

        class B(Loud):
            name = "b"

        async def main() -> None:
            stage = Stage(seed)
            a, b = stage.spawn(A, "a", 8), stage.spawn(B, "b", 8)
            async with stage:
                await asyncio.gather(*(r.ask(Add(1)) for _ in range(6) for r in (a, b)))

        simulate(main())
        return log

    assert trace(7) == trace(7)
    assert len({tuple(trace(seed)) for seed in range(20)}) > 10
