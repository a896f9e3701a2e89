"""Start actors in order, stop them in reverse, restart the crashed and all that lean on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from omlx.kernel.actor import Actor, run
from omlx.kernel.mailbox import Envelope, Mailbox, MailboxStats, Pause, Ref, no_pause
from omlx.kernel.message import ActorGone, Stop
from omlx.kernel.restart import RestartBudget

log = logging.getLogger(__name__)

LAST_WORDS_S = 0.1
"""To hear that it is to stop, for an actor that is about to be killed."""
KILL_S = 1.0
"""For all actors to end, when they are killed at once."""


class GaveUp(Exception):
    """Actors kept crashing; the process should exit and let its own supervisor act."""


@dataclass(slots=True, eq=False)
class Child:
    """What the supervisor knows of one actor. Ref and mailbox outlive each of its lives."""

    ref: Ref[Any]
    mailbox: Mailbox
    build: Callable[[], Actor]
    leans_on: frozenset[str]
    drain_s: float
    task: asyncio.Task[None] | None = None

    async def live(self) -> None:
        """One life, birth included: an error of ``build`` is a crash like any other."""
        await run(self.build(), self.mailbox)


class Supervisor:
    """Children are added leaves first. Each names those whose state its own state depends on.

    When a child crashes, it and every child that leans on it, at any remove, are stopped (last
    first) and built anew (first first). The others never notice.
    """

    def __init__(
        self, budget: RestartBudget, *, drain_s: float = 5.0, pause: Pause = no_pause
    ) -> None:
        self._budget = budget
        self._drain_s = drain_s
        self._pause = pause
        self._children: dict[str, Child] = {}
        self.restarts = 0
        """Crashes that were answered by a restart, however many children it took."""

    def add(
        self,
        name: str,
        capacity: int,
        build: Callable[[], Actor],
        *leans_on: str,
        drain_s: float | None = None,
    ) -> Ref[Any]:
        """Add a child, to be started by ``run``. Its ref is good at once and for ever.

        ``drain_s``: how long it may take to end when stopped or killed; else the supervisor's.
        """
        assert name not in self._children, f"two children called {name}"
        assert set(leans_on) <= self._children.keys(), "leaves first"
        mailbox = Mailbox(capacity, self._pause)
        ref: Ref[Any] = Ref(name, mailbox)
        limit_s = self._drain_s if drain_s is None else drain_s
        self._children[name] = Child(ref, mailbox, build, frozenset(leans_on), limit_s)
        return ref

    def allow(self, name: str, drain_s: float) -> None:
        """How long a child may take to end, from now on."""
        self._children[name].drain_s = drain_s

    def mailboxes(self) -> dict[str, MailboxStats]:
        """The counters of every mailbox, in start order."""
        return {name: child.mailbox.stats(name) for name, child in self._children.items()}

    def affected_by(self, name: str) -> list[str]:
        """``name`` and everything that leans on it, in start order."""
        affected = {name}
        for other, child in self._children.items():
            if child.leans_on & affected:
                affected.add(other)
        return [other for other in self._children if other in affected]

    async def run(self, stopping: asyncio.Event) -> None:
        """Run until ``stopping`` is set (then drain and return) or the budget is spent (GaveUp).

        Cancelled, it lets nobody finish: each is asked to stop, and soon after it is killed.
        """
        self._start(list(self._children))
        stop = asyncio.create_task(stopping.wait(), name="stopping")
        try:
            try:
                await self._watch(stop)
            except Exception:
                await self._drain()
                raise
            await self._drain()
        except asyncio.CancelledError:
            await self._kill_all()
            raise
        finally:
            stop.cancel()

    async def _watch(self, stop: asyncio.Task[Any]) -> None:
        while True:
            tasks = {c.task for c in self._children.values() if c.task is not None}
            await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                return
            await self._restart(self._crashed())

    def _crashed(self) -> Child:
        return next(c for c in self._children.values() if c.task is not None and c.task.done())

    def _start(self, names: list[str]) -> None:
        for name in names:
            child = self._children[name]
            child.task = asyncio.create_task(child.live(), name=name)

    async def _restart(self, crashed: Child) -> None:
        assert crashed.task is not None
        name, error = crashed.ref.name, _error(crashed.task)
        affected = self.affected_by(name)
        log.error("%s crashed; restarting %s", name, ", ".join(affected), exc_info=error)
        for other in reversed(affected):
            child = self._children[other]
            if not await self._kill(child):
                # A second reader of the mailbox would be worse than no server.
                raise GaveUp(f"{other} did not end in {child.drain_s:.1f} s") from error
            if child is not crashed:
                _log_crash(child, "while it was stopped for a restart")
            child.mailbox.empty(ActorGone(f"{name} crashed"))
        if not self._budget.spend(asyncio.get_running_loop().time()):
            raise GaveUp(f"{name} crashed too often") from error
        self.restarts += 1
        self._start(affected)

    async def _kill(self, child: Child) -> bool:
        """Cancel, and wait until it has ended. False when it has not after ``drain_s``."""
        if child.task is None:
            return True
        child.task.cancel()
        _, alive = await asyncio.wait({child.task}, timeout=child.drain_s)
        return not alive

    async def _drain(self) -> None:
        """Stop in reverse order, so that no child outlives one it leans on.

        A child that crashes meanwhile is not restarted, and those that ask it learn at once.
        """
        for child in self._children.values():
            if child.task is not None:
                child.task.add_done_callback(partial(_ended_in_drain, child))
        for child in reversed(self._children.values()):
            if child.task is not None and not child.task.done():
                child.mailbox.put_beyond_capacity(Envelope(Stop(), takes_slot=False))
                _, alive = await asyncio.wait({child.task}, timeout=child.drain_s)
                if alive:
                    log.warning("%s did not drain in %.1f s", child.ref.name, child.drain_s)
                    if not await self._kill(child):
                        log.error("%s did not end when killed; left behind", child.ref.name)
            child.mailbox.close(_stopped(child))

    async def _kill_all(self) -> None:
        children = self._children.values()
        tasks = [child.task for child in children if child.task is not None]
        for child in children:
            child.mailbox.put_beyond_capacity(Envelope(Stop(), takes_slot=False))
        await asyncio.wait(tasks, timeout=LAST_WORDS_S)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=KILL_S)
        for child in children:
            child.mailbox.close(_stopped(child))


def _error(task: asyncio.Task[None]) -> BaseException | None:
    """What ``task`` ended with. None when it returned or was cancelled."""
    return None if task.cancelled() else task.exception()


def _log_crash(child: Child, when: str) -> None:
    assert child.task is not None
    error = _error(child.task)
    if error is not None:
        log.error("%s crashed %s", child.ref.name, when, exc_info=error)


def _stopped(child: Child) -> ActorGone:
    return ActorGone(f"{child.ref.name} stopped")


def _ended_in_drain(child: Child, _: asyncio.Task[None]) -> None:
    child.mailbox.close(_stopped(child))
    _log_crash(child, "while draining")
