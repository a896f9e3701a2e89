"""Run async code on a clock that jumps and an interleaving that a seed chooses."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

LIMIT_S = 10_000.0
"""Virtual seconds a simulation may take; with a timer of 1 s, about a second of real time."""


class Stuck(AssertionError):
    """Every task waits and no timer is set: a deadlock, reported instead of hanging."""


class _Jump(selectors.DefaultSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("every task is waiting and no timer is set")
        self.loop.advance(timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Where the real loop would sleep, this one moves its clock forward instead.

    Raises Stuck in a deadlock, and when the clock passes ``limit_s``: a periodic timer keeps the
    clock going while everybody else waits.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.now_s = 0.0
        self._limit_s = limit_s
        selector = _Jump()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self.now_s += seconds
        if self.now_s > self._limit_s:
            limit_s, self._limit_s = self._limit_s, float("inf")  # said once; then clean up
            raise Stuck(f"not done after {limit_s:.0f} s of virtual time; do only timers run?")

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> NoReturn:
        """Refuse: a thread needs real time, and this clock would not wait for it."""
        raise RuntimeError(
            f"{func!r} would run in a thread, which the virtual clock cannot wait for; "
            "give the code under test a fake that answers on the loop"
        )


def simulate(main: Coroutine[Any, Any, T], *, limit_s: float = LIMIT_S) -> T:
    """Run ``main`` on a virtual clock that starts at 0 and may reach ``limit_s``."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(limit_s)) as runner:
        return runner.run(main)


def seeded_pause(seed: int, most: int = 3) -> Callable[[], Awaitable[None]]:
    """A pause of 0 to ``most`` scheduling turns, drawn from ``seed``."""
    rng = random.Random(seed)

    async def pause() -> None:
        for _ in range(rng.randint(0, most)):
            await asyncio.sleep(0)

    return pause
