"""One actor: a mailbox, a receive method, one message at a time.

Work that takes longer than a message may (an ask to a slower actor, a thread, a timer) runs beside
``receive`` and comes back as a message to self. It belongs to one life of the actor: when that
life ends, the work is cancelled and awaited, and nothing of it reaches the next life.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

from omlx.kernel.mailbox import Envelope, Mailbox
from omlx.kernel.message import ActorGone, Fault, Message, Rejected, Stop

T = TypeVar("T")


class Actor:
    """Subclass and implement ``receive``. State set up in ``__init__`` dies with the actor.

    ``receive`` returns the answer to an Ask, or None to a plain message. Raise Rejected for a
    refusal the asker should see. Any other exception is a bug here: it ends this actor, and the
    supervisor decides what follows.

    An answer that is a Future is given when it has an outcome, and other messages are received
    meanwhile. When this life ends first, it is cancelled and the asker gets ActorGone.
    """

    name: ClassVar[str]
    capacity: ClassVar[int]
    _mailbox: Mailbox
    _pending: set[asyncio.Future[Any]]

    async def on_start(self) -> None:
        """Acquire what the actor owns. Runs before the first message."""

    # Any, not Message: a subclass names the union that it handles, and only that.
    async def receive(self, message: Any) -> object:
        raise NotImplementedError

    async def on_stopping(self) -> None:
        """A Stop was received: begin what is to be done before the end, and be ``idle`` then."""

    async def on_stop(self) -> None:
        """Release what ``on_start`` acquired. Runs after a Stop and after a crash."""

    @property
    def idle(self) -> bool:
        """False while accepted work is unfinished; a Stop waits for it."""
        return True

    def pipe(self, work: Awaitable[T], wrap: Callable[[T | Exception], Message]) -> None:
        """Wait for ``work`` outside ``receive`` and get its outcome as a message to self.

        This is how an actor asks a slower one without making its own mailbox wait. The outcome
        does not count against ``capacity``: there is one per call, and the caller bounds those.
        Work that somebody else cancelled comes back as ActorGone. Not before ``on_start``.
        """

        def come_back(done: asyncio.Future[T]) -> None:
            if done not in self._pending:
                return  # of a former life
            self._pending.discard(done)
            try:
                message = wrap(_outcome(done))
            except Exception as bug:
                message = Fault(bug)
            self._mailbox.put_beyond_capacity(Envelope(message, takes_slot=False))

        future = asyncio.ensure_future(work)
        self._pending.add(future)
        future.add_done_callback(come_back)

    def every(self, period_s: float, make_message: Callable[[], Message]) -> None:
        """Send ``make_message()`` to self each ``period_s`` seconds, until this life ends.

        The first comes after one period. At most one waits or is being received: a later one that
        finds it so comes right after it, and those between are skipped, so a busy actor gets
        fewer. Takes no slot of ``capacity``. Not before ``on_start``.
        """
        assert period_s > 0, "a timer without a period never lets go"

        async def beat() -> None:
            loop = asyncio.get_running_loop()
            due_s = loop.time()
            while True:
                due_s = max(due_s + period_s, loop.time())
                await asyncio.sleep(due_s - loop.time())
                received: asyncio.Future[object] = loop.create_future()
                self._mailbox.put_beyond_capacity(Envelope(make_message(), received, False))
                with suppress(Rejected):  # a refusal, and nobody who asked
                    await received

        def ended(error: object) -> Message:
            assert isinstance(error, Exception), "a timer ends with its actor or with a bug"
            return Fault(error)

        self.pipe(beat(), ended)


def _outcome(done: asyncio.Future[T]) -> T | Exception:
    if done.cancelled():
        return ActorGone("the work was cancelled")
    error = done.exception()
    return error if isinstance(error, Exception) else done.result()


async def run(actor: Actor, mailbox: Mailbox) -> None:
    """Drive ``actor`` until Stop (returns) or a bug (raises)."""
    actor._mailbox = mailbox
    actor._pending = set()
    stopping = False
    try:
        await actor.on_start()
        while not (stopping and actor.idle):
            envelope = await mailbox.get()
            if isinstance(envelope.message, Stop):
                stopping = True
                await actor.on_stopping()
            elif isinstance(envelope.message, Fault):
                raise envelope.message.error
            else:
                await _deliver(actor, envelope)
                mailbox.handled += 1
    finally:
        try:
            await _end_pending(actor)
        finally:
            await actor.on_stop()


async def _deliver(actor: Actor, envelope: Envelope) -> None:
    try:
        answer = await actor.receive(envelope.message)
        if isinstance(answer, asyncio.Future):
            _answer_later(actor, envelope, answer)
        else:
            envelope.answer(answer)
    except Rejected as refusal:
        envelope.fail(refusal)
    except asyncio.CancelledError:
        envelope.fail(ActorGone(f"{actor.name} was stopped while it worked on this"))
        raise
    except BaseException as bug:
        envelope.fail(ActorGone(f"{actor.name} crashed: {bug!r}"))
        raise


def _answer_later(actor: Actor, envelope: Envelope, promise: asyncio.Future[Any]) -> None:
    def settle(done: asyncio.Future[Any]) -> None:
        actor._pending.discard(done)
        outcome = _outcome(done)
        if isinstance(outcome, Exception):
            envelope.fail(outcome)
        else:
            envelope.answer(outcome)

    actor._pending.add(promise)
    promise.add_done_callback(settle)


async def _end_pending(actor: Actor) -> None:
    pending, actor._pending = actor._pending, set()
    for work in pending:
        work.cancel()
    # How it ends concerns nobody any more; that it has ended does.
    await asyncio.gather(*pending, return_exceptions=True)
