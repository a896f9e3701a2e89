"""A bounded queue with one reader, the references that write to it, and its counters.

What happens at the bound is the sender's choice: ``offer`` is shed, ``ask`` is refused, ``tell``
waits. Each of the first two has a counter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from omlx.kernel.message import ActorGone, Ask, MailboxFull, Message

M = TypeVar("M", bound=Message)
R = TypeVar("R")
Pause = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class MailboxStats:
    """One mailbox at one moment. Counts are since the start and survive restarts of its actor."""

    name: str
    capacity: int
    queued: int  # messages of others that wait now
    shed: int  # offers that found it full or closed
    dropped: int  # tells that a crash or the end threw away
    handled: int  # messages received to the end, the actor's own included
    refused: int  # asks that found it full or closed
    peak: int  # most that ever waited at once


@dataclass(frozen=True, slots=True, eq=False)
class Envelope:
    """A message on its way, with the place where its answer goes."""

    message: Message
    reply: asyncio.Future[Any] | None = None
    takes_slot: bool = True

    def answer(self, value: object) -> None:
        """Answer, unless that has happened or the asker is gone."""
        if self.reply is not None and not self.reply.done():
            self.reply.set_result(value)

    def fail(self, error: Exception) -> None:
        """Answer with an error, unless that has happened or the asker is gone."""
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(error)


async def no_pause() -> None:
    """The production pause: none."""


class Mailbox:
    """Bounded, single reader. Outlives the actor that reads it, so references stay valid.

    ``pause`` runs before each delivery. Production passes none; the simulator passes a seeded one,
    which is how a seed chooses an interleaving.
    """

    def __init__(self, capacity: int, pause: Pause = no_pause) -> None:
        assert capacity > 0, "an actor without room cannot be told anything"
        self.capacity = capacity
        self.shed = 0
        self.refused = 0
        self.dropped = 0
        self.handled = 0
        self.peak = 0
        self.closed: ActorGone | None = None
        self._queue: asyncio.Queue[Envelope] = asyncio.Queue()
        # One item for each queued envelope that takes a slot. A bounded queue is the one asyncio
        # primitive that can be taken both with and without waiting.
        self._slots: asyncio.Queue[None] = asyncio.Queue(maxsize=capacity)
        self._pause = pause

    def __len__(self) -> int:
        return self._slots.qsize()

    def stats(self, name: str) -> MailboxStats:
        return MailboxStats(
            name=name,
            capacity=self.capacity,
            queued=len(self),
            shed=self.shed,
            dropped=self.dropped,
            handled=self.handled,
            refused=self.refused,
            peak=self.peak,
        )

    def offer(self, envelope: Envelope) -> bool:
        """Queue without waiting. False when full or closed."""
        if self.closed is not None or self._slots.full():
            return False
        self._slots.put_nowait(None)
        self._enter(envelope)
        return True

    async def put(self, envelope: Envelope) -> None:
        """Queue, waiting for room. Raises ActorGone when the mailbox is or becomes closed."""
        await self._slots.put(None)
        if self.closed is not None:
            self._slots.get_nowait()  # let the next waiter learn that it is closed
            # A new exception each time: one that is raised twice keeps both tracebacks.
            raise ActorGone(str(self.closed))
        self._enter(envelope)

    def put_beyond_capacity(self, envelope: Envelope) -> None:
        """Queue at once, taking no slot.

        For what is bounded elsewhere: one outcome for each pipe, one tick for each timer, one Stop.
        """
        assert not envelope.takes_slot
        self._queue.put_nowait(envelope)

    def _enter(self, envelope: Envelope) -> None:
        self._queue.put_nowait(envelope)
        self.peak = max(self.peak, len(self))

    async def get(self) -> Envelope:
        """Take the oldest envelope, waiting for one."""
        await self._pause()
        envelope = await self._queue.get()
        if envelope.takes_slot:
            self._slots.get_nowait()
        return envelope

    def empty(self, reason: ActorGone) -> None:
        """Fail every waiting ask; count every waiting tell as dropped."""
        while not self._queue.empty():
            envelope = self._queue.get_nowait()
            if envelope.takes_slot:
                self._slots.get_nowait()
                self.dropped += envelope.reply is None
            envelope.fail(ActorGone(str(reason)))

    def close(self, reason: ActorGone) -> None:
        """Let nobody in from now on, and empty."""
        self.closed = reason
        self.empty(reason)


class Ref(Generic[M]):
    """The only handle one actor has on another."""

    __slots__ = ("_mailbox", "name")

    def __init__(self, name: str, mailbox: Mailbox) -> None:
        self.name = name
        self._mailbox = mailbox

    def __repr__(self) -> str:
        return f"<ref {self.name} {len(self._mailbox)}/{self._mailbox.capacity}>"

    def offer(self, message: M) -> bool:
        """Tell without waiting; False means it was shed. For traffic that may be lost."""
        queued = self._mailbox.offer(Envelope(message))
        self._mailbox.shed += not queued
        return queued

    async def tell(self, message: M) -> None:
        """Tell, waiting for room. Only to an actor this one leans on; else two can wait forever.

        Raises ActorGone when the receiver has stopped for good.
        """
        await self._mailbox.put(Envelope(message))

    def ask(self, message: Ask[R]) -> asyncio.Future[R]:
        """Send, and return the answer to come. It may be MailboxFull, ActorGone or the receiver's
        Rejected; awaiting raises these.

        The message is queued when this returns: who is asked before others are told runs before
        them. Bound the wait with ``asyncio.timeout``; the mailbox itself never times out.
        """
        reply: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        if not self._mailbox.offer(Envelope(message, reply)):
            self._mailbox.refused += 1
            if self._mailbox.closed is not None:
                reply.set_exception(ActorGone(str(self._mailbox.closed)))
            else:
                waiting = f"{self.name} has {self._mailbox.capacity} messages waiting; ask later"
                reply.set_exception(MailboxFull(waiting))
        return reply
