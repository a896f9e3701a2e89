"""A simulated hour is free, and a hang is a failure."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from tests.sim.loop import Stuck, seeded_pause, simulate


def test_an_hour_of_waiting_costs_no_time() -> None:
    started = time.perf_counter()
    simulate(asyncio.sleep(3600))
    assert time.perf_counter() - started < 1.0


def test_a_deadlock_is_reported_not_hung() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck):
        simulate(main())


def test_a_deadlock_behind_a_running_timer_is_reported_too() -> None:
    async def main() -> None:
        async def timer() -> None:
            for _ in itertools.count():
                await asyncio.sleep(1.0)

        ticking = asyncio.create_task(timer())
        await asyncio.get_running_loop().create_future()
        ticking.cancel()

    with pytest.raises(Stuck, match="100 s of virtual time"):
        simulate(main(), limit_s=100.0)


def test_a_thread_is_refused_with_the_reason() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.sleep, 0)

    with pytest.raises(RuntimeError, match="virtual clock cannot wait"):
        simulate(main())


def test_timers_fire_in_the_order_of_their_times() -> None:
    fired: list[tuple[str, float]] = []

    async def main() -> None:
        async def after(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            fired.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(after("late", 7.5), after("early", 2.0))

    simulate(main())
    assert fired == [("early", 2.0), ("late", 7.5)]


def test_a_seed_is_one_sequence_of_pauses() -> None:
    def turns(seed: int) -> list[int]:
        pause = seeded_pause(seed, most=3)
        counts: list[int] = []

        async def main() -> None:
            for _ in range(20):
                turns_taken = 0

                async def others() -> None:
                    nonlocal turns_taken
                    while True:
                        turns_taken += 1
                        await asyncio.sleep(0)

                task = asyncio.create_task(others())
                await pause()
                counts.append(turns_taken)
                task.cancel()

        simulate(main())
        return counts

    assert turns(1) == turns(1)
    assert turns(1) != turns(2)
    assert set(turns(1)) == {0, 1, 2, 3}
