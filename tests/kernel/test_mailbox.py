"""Everything a mailbox sheds, refuses, drops or delivers is counted, once and apart."""

from __future__ import annotations

import asyncio

import pytest

from omlx.kernel.mailbox import MailboxStats
from omlx.kernel.message import ActorGone, MailboxFull, Rejected
from tests.kernel.stage import Add, Adder, Break, Outcome, Sleep, Stage, Tick
from tests.sim.loop import simulate


def test_each_fate_of_a_message_has_its_own_counter() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder, capacity=2)
        async with stage:
            await adder.ask(Add(1))
            with pytest.raises(Rejected):
                await adder.ask(Add(0))
            await adder.tell(Sleep(9.0))
            await asyncio.sleep(0.1)
            assert adder.offer(Break())
            assert adder.offer(Tick())
            assert not adder.offer(Tick())
            assert not adder.offer(Tick())
            with pytest.raises(MailboxFull, match="adder has 2 messages waiting"):
                await adder.ask(Add(1))

            assert stage.supervisor.mailboxes() == {
                "adder": MailboxStats(
                    name="adder",
                    capacity=2,
                    queued=2,
                    shed=2,
                    dropped=0,
                    handled=2,
                    refused=1,
                    peak=2,
                )
            }

            await asyncio.sleep(20.0)
            after = stage.supervisor.mailboxes()["adder"]
            assert (after.queued, after.dropped, after.handled) == (0, 1, 3), (
                "the crash dropped the tick; the message that crashed it was not handled"
            )

    simulate(main())


def test_an_ask_that_a_crash_answers_is_not_counted_as_dropped() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder)
        async with stage:
            await adder.tell(Sleep(1.0))
            await adder.tell(Break())
            with pytest.raises(ActorGone, match="adder crashed"):
                await adder.ask(Add(1))
            assert stage.supervisor.mailboxes()["adder"].dropped == 0

    simulate(main())


def test_a_mailbox_reports_the_most_that_ever_waited() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder, capacity=8)
        async with stage:
            await asyncio.gather(*(adder.ask(Add(1)) for _ in range(5)))
            await adder.ask(Add(1))
            stats = stage.supervisor.mailboxes()["adder"]
        assert (stats.peak, stats.queued, stats.handled) == (5, 0, 6)

    simulate(main())


def test_a_closed_mailbox_sheds_refuses_and_raises() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder)
        async with stage:
            pass
        assert not adder.offer(Tick())
        with pytest.raises(ActorGone, match="adder stopped"):
            await adder.ask(Add(1))
        with pytest.raises(ActorGone, match="adder stopped"):
            await adder.tell(Tick())
        stats = stage.supervisor.mailboxes()["adder"]
        assert (stats.shed, stats.refused, stats.queued) == (1, 1, 0)

    simulate(main())


def test_an_asker_that_gave_up_waiting_harms_nobody() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder)
        async with stage:
            await adder.tell(Sleep(5.0))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await adder.ask(Add(2))
            assert await adder.ask(Add(1)) == 3, "it was in the mailbox, so it was done"

    simulate(main())


def test_a_tell_that_waits_gets_the_first_room_there_is() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder, capacity=1)
        async with stage:
            await adder.tell(Sleep(5.0))
            await adder.tell(Sleep(5.0))
            await adder.tell(Sleep(0.0))
            assert asyncio.get_running_loop().time() == 5.0
            assert stage.supervisor.mailboxes()["adder"].queued == 1

    simulate(main())


def test_outcomes_and_ticks_take_no_room_from_others() -> None:
    class Piping(Adder):
        async def on_start(self) -> None:
            self.every(1.0, Tick)

        async def receive(self, message: object) -> object:
            match message:
                case Sleep(seconds=0.0):
                    self.pipe(asyncio.sleep(1.0), wrap=Outcome)
                    return None
                case Outcome() | Tick():
                    return None
                case Sleep() | Add():
                    return await super().receive(message)
            raise AssertionError(f"unknown {message!r}")

    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Piping, capacity=1)
        async with stage:
            await adder.tell(Sleep(0.0))
            await adder.tell(Sleep(3.0))
            await asyncio.sleep(2.0)
            assert stage.supervisor.mailboxes()["adder"].queued == 0
            assert adder.offer(Add(1))
            assert repr(adder) == "<ref adder 1/1>"

    simulate(main())


def test_an_ask_still_waiting_when_a_drain_overruns_is_answered() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder, drain_s=2.0)
        async with stage:
            await adder.tell(Sleep(99.0))
            waiting = adder.ask(Add(1))
            await asyncio.sleep(0.1)
        with pytest.raises(ActorGone, match="adder stopped"):
            await waiting

    simulate(main())


def test_a_crash_after_the_asker_gave_up_harms_nobody() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder)
        async with stage:
            await adder.tell(Sleep(5.0))
            await adder.tell(Break())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await adder.ask(Add(2))
            await asyncio.sleep(9.0)
            assert await adder.ask(Add(1)) == 1

    simulate(main())
