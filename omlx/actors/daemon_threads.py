"""Threads that the end of the process does not wait for: a read may hang in the kernel for ever."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

_PRIO_DARWIN_THREAD, _PRIO_DARWIN_BG = 3, 0x1000
"""Of <sys/resource.h>; Python has names for them from 3.12 on."""

Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


class DaemonThreads:
    """``await threads(function, *args)`` calls it in the first thread that is free.

    The pool of the standard library is joined when the interpreter ends, hung or not.
    """

    def __init__(self, count: int, name: str, *, background: bool = False) -> None:
        """``background``: they yield to whatever else the machine has to do."""
        self._background = background
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def __call__(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((loop, future, function, args))
        return future

    def close(self, wait_s: float) -> bool:
        """Let each thread end after its call. False: some of them hang in theirs.

        One that is left when the interpreter ends may take the process down with it.
        """
        for _ in self._threads:
            self._jobs.put(None)
        until = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        if self._background:
            with suppress(OSError):
                _lower_priority()
        while (job := self._jobs.get()) is not None:
            loop, future, function, args = job
            if future.cancelled():
                continue
            result = error = None
            try:
                result = function(*args)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_settle, future, result, error)
            del job, future, function, args, result, error  # or an idle thread keeps a block alive


def _lower_priority() -> None:
    """Of this thread alone. Raises OSError."""
    if sys.platform == "darwin":
        os.setpriority(_PRIO_DARWIN_THREAD, 0, _PRIO_DARWIN_BG)  # its disk traffic as well
    elif sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
