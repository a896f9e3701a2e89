"""The one thread that owns MLX. Lazy arrays and streams must not leave it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

TURN_S = 0.0005
"""Building a pass for a GPU takes milliseconds of Python, and the event loop, which waits for the
interpreter after each write to a socket, got it back after Python's 5 ms only: 16 streams of an 8B
model on an H200 took 19.2 ms a step, and 14.5 ms with this."""


def take_short_turns() -> None:
    """Of the whole process: its threads hand the interpreter over after TURN_S if another waits."""
    sys.setswitchinterval(TURN_S)


class EngineThread:
    """Runs calls one after another. Only host values and evaluated arrays cross it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="mlx")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` there. Cancelling the wait does not stop a call that has begun."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Wait for the running call and end the thread; not joining it aborts at exit."""
        self._executor.shutdown(wait=True, cancel_futures=True)
