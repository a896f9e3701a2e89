"""Between a checked request and its generation nothing is left running for nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from omlx.actors.messages import Accepted, Cancel, Submit, TextDelta
from omlx.actors.scheduler import TooManyRequests
from omlx.actors.stats_messages import RequestRejected
from omlx.core.pieces import Text
from omlx.core.plan import Uid
from omlx.core.sequence import Request
from omlx.kernel.mailbox import Mailbox, Ref
from omlx.settings import load_settings
from omlx.web.edge import Edge
from omlx.web.generation import Actors, Prepared, running

REQUEST = Request("r", (1, 2), max_tokens=4)


class Desk:
    """Where a request arrives; the test plays the scheduler."""

    def __init__(self, home: Path) -> None:
        self.scheduler, self.stats = Mailbox(4), Mailbox(4)
        self.edge = Edge(load_settings({}, {}, home), Ref("stats", self.stats))
        self.actors = Actors(Ref("tokenizer", Mailbox(1)), Ref("scheduler", self.scheduler))
        self.entered = asyncio.Event()

    async def wait_inside(self) -> None:
        async with running(self.edge, self.actors, Prepared(REQUEST)) as stream:
            self.entered.set()
            async for _ in stream:
                pass

    async def submitted(self) -> tuple[Submit, Any]:
        envelope = await self.scheduler.get()
        assert isinstance(envelope.message, Submit)
        return envelope.message, envelope


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


async def test_a_client_that_goes_before_it_is_accepted_leaves_a_cancelled_stream(
    desk: Desk,
) -> None:
    """B35: the scheduler sees that nobody listens, although nobody knows the sequence's id."""
    task = asyncio.create_task(desk.wait_inside())
    submit, _ = await desk.submitted()

    task.cancel()
    await asyncio.wait({task})

    assert submit.stream.cancelled


async def test_a_client_that_goes_later_cancels_its_sequence(desk: Desk) -> None:
    """B35."""
    task = asyncio.create_task(desk.wait_inside())
    submit, envelope = await desk.submitted()
    envelope.answer(Accepted(Uid(7)))
    await desk.entered.wait()

    task.cancel()
    await asyncio.wait({task})

    assert submit.stream.cancelled
    assert (await desk.scheduler.get()).message == Cancel(Uid(7))


async def test_a_stream_that_was_read_to_its_end_cancels_nothing(desk: Desk) -> None:
    task = asyncio.create_task(desk.wait_inside())
    submit, envelope = await desk.submitted()
    envelope.answer(Accepted(Uid(7)))
    submit.stream.write(TextDelta((Text("a"),)))
    submit.stream.end()

    await task

    assert not submit.stream.cancelled
    assert len(desk.scheduler) == 0


async def test_a_refusal_is_counted_once(desk: Desk) -> None:
    """B89."""
    task = asyncio.create_task(desk.wait_inside())
    _, envelope = await desk.submitted()
    envelope.fail(TooManyRequests("full"))

    with pytest.raises(TooManyRequests):
        await task

    assert (await desk.stats.get()).message == RequestRejected()
    assert len(desk.stats) == 0
    assert len(desk.scheduler) == 0
