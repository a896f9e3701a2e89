"""What an actor, and those who talk to it, may count on."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from omlx.kernel.mailbox import Ref
from omlx.kernel.message import ActorGone, MailboxFull, Message, Rejected
from omlx.kernel.supervisor import GaveUp
from tests.kernel.stage import Add, Adder, Break, Outcome, Sleep, Stage, Tick
from tests.sim.loop import simulate


def test_an_ask_is_answered() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder)
        async with stage:
            assert await adder.ask(Add(2)) == 2
            assert await adder.ask(Add(3)) == 5

    simulate(main())


def test_a_refusal_reaches_the_asker_and_leaves_the_actor_alive() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder)
        async with stage:
            await adder.ask(Add(2))
            with pytest.raises(Rejected):
                await adder.ask(Add(0))
            assert await adder.ask(Add(1)) == 3

    simulate(main())


def test_a_full_mailbox_refuses_at_once() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder, capacity=1)
        async with stage:
            await adder.tell(Sleep(9.0))
            await asyncio.sleep(0.1)
            assert adder.offer(Sleep(0.0))
            assert not adder.offer(Sleep(0.0))
            with pytest.raises(MailboxFull):
                await adder.ask(Add(1))

    simulate(main())


@pytest.mark.parametrize("seed", range(50))
def test_a_crash_answers_every_waiting_ask_and_loses_no_later_one(seed: int) -> None:
    async def main() -> None:
        stage = Stage(seed)
        adder = stage.spawn(Adder)
        async with stage:
            first = adder.ask(Add(1))
            assert adder.offer(Break())
            waiting = adder.ask(Add(1))
            results = await asyncio.gather(first, waiting, return_exceptions=True)
            assert results[0] == 1
            assert isinstance(results[1], ActorGone)
            await asyncio.sleep(1)
            assert await adder.ask(Add(7)) == 7, "a restarted actor starts afresh"

    simulate(main())


def test_the_ask_that_crashes_an_actor_is_answered_too() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder)
        async with stage:
            with pytest.raises(ActorGone):
                await adder.ask(Add(13))

    simulate(main())


def test_an_actor_waits_for_a_slow_one_without_blocking_its_own_mailbox() -> None:
    class Impatient(Adder):
        def __init__(self, slow: Ref[Any]) -> None:
            super().__init__()
            self.slow = slow

        async def receive(self, message: Message) -> object:
            match message:
                case Sleep():
                    self.pipe(self.slow.ask(Add(1)), wrap=Outcome)
                    return None
                case Outcome(value):
                    assert value == 1
                    self.total += 100
                    return None
            return await super().receive(message)

    async def main() -> None:
        stage = Stage()
        slow = stage.spawn(Adder, "slow")
        fast = stage.spawn(lambda: Impatient(slow), "fast", leans_on=("slow",))
        async with stage:
            await slow.tell(Sleep(60.0))
            await fast.tell(Sleep(0.0))
            async with asyncio.timeout(1.0):
                assert await fast.ask(Add(1)) == 1
            await asyncio.sleep(61.0)
            assert await fast.ask(Add(1)) == 102

    simulate(main())


def test_the_outcome_of_a_former_life_is_not_delivered() -> None:
    class Forgetful(Adder):
        async def receive(self, message: Message) -> object:
            match message:
                case Sleep(seconds):
                    self.pipe(asyncio.sleep(seconds), wrap=Outcome)
                    return None
                case Outcome():
                    raise AssertionError("heard from a former life")
            return await super().receive(message)

    async def main() -> None:
        stage = Stage(max_restarts=1)
        adder = stage.spawn(Forgetful)
        async with stage:
            await adder.tell(Sleep(5.0))
            await adder.tell(Break())
            await asyncio.sleep(10.0)
            assert await adder.ask(Add(1)) == 1

    simulate(main())


def test_a_tell_that_waits_for_room_learns_that_the_actor_stopped() -> None:
    async def main() -> None:
        stage = Stage(max_restarts=0)
        adder = stage.spawn(Adder, capacity=1)
        async with stage:
            await adder.tell(Sleep(9.0))
            await asyncio.sleep(0.1)
            await adder.tell(Break())
            waiting = [asyncio.create_task(adder.tell(Break())) for _ in range(3)]
            results = await asyncio.gather(*waiting, return_exceptions=True)
        assert ActorGone in [type(result) for result in results]
        assert all(result is None or isinstance(result, ActorGone) for result in results)

    simulate(main())


def test_the_work_of_a_former_life_has_ended_before_the_next_begins() -> None:
    events: list[str] = []

    class Careful(Adder):
        async def on_start(self) -> None:
            events.append("start")

        async def receive(self, message: Message) -> object:
            if isinstance(message, Tick):
                self.pipe(self.work(), wrap=Outcome)
                return None
            return await super().receive(message)

        async def work(self) -> None:
            try:
                await asyncio.sleep(99.0)
            finally:
                await asyncio.sleep(1.0)
                events.append("work ended")

        async def on_stop(self) -> None:
            events.append("stop")

    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Careful)
        async with stage:
            await adder.tell(Tick())
            await asyncio.sleep(1.0)
            await adder.tell(Break())
            await asyncio.sleep(2.0)
            assert events == ["start", "work ended", "stop", "start"]

    simulate(main())


def test_what_was_acquired_is_released_even_if_ending_is_cut_short() -> None:
    released: list[float] = []

    class Lingering(Adder):
        async def on_start(self) -> None:
            self.pipe(self.linger(), wrap=Outcome)

        async def linger(self) -> None:
            try:
                await asyncio.sleep(99.0)
            finally:
                await asyncio.sleep(99.0)

        async def on_stop(self) -> None:
            released.append(asyncio.get_running_loop().time())

    async def main() -> None:
        stage = Stage()
        stage.spawn(Lingering, drain_s=2.0)
        async with stage:
            await asyncio.sleep(1.0)
        assert released == [3.0]

    simulate(main())


def test_work_that_fails_comes_back_as_its_error() -> None:
    heard: list[object] = []

    class Listening(Adder):
        async def receive(self, message: Message) -> object:
            match message:
                case Sleep():
                    self.pipe(self.fail(), wrap=Outcome)
                case Tick():
                    cancelled = asyncio.get_running_loop().create_future()
                    self.pipe(cancelled, wrap=Outcome)
                    cancelled.cancel()
                case Outcome(value):
                    heard.append(value)
            return None

        async def fail(self) -> None:
            raise OSError("disk full")

    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Listening)
        async with stage:
            await adder.tell(Sleep(0.0))
            await asyncio.sleep(1.0)
            await adder.tell(Tick())
            await asyncio.sleep(1.0)
        assert [repr(value) for value in heard] == [
            "OSError('disk full')",
            "ActorGone('the work was cancelled')",
        ]

    simulate(main())


@pytest.mark.parametrize("error", [RuntimeError("a bug"), Rejected("refused, to nobody")])
def test_a_bug_in_wrapping_an_outcome_is_a_crash_not_a_silence(error: Exception) -> None:
    def wrap(_: object) -> Message:
        raise error

    class Wrapping(Adder):
        async def receive(self, message: Message) -> object:
            if isinstance(message, Tick):
                self.pipe(asyncio.sleep(1.0), wrap)
                return None
            return await super().receive(message)

    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Wrapping)
        async with stage:
            await adder.tell(Tick())
            await asyncio.sleep(2.0)
            assert stage.supervisor.restarts == 1

    simulate(main())


class Clock(Adder):
    """Ticks each second and remembers when."""

    def __init__(self, ticks: list[float]) -> None:
        super().__init__()
        self.ticks = ticks

    async def on_start(self) -> None:
        self.every(1.0, Tick)

    async def receive(self, message: Message) -> object:
        if isinstance(message, Tick):
            self.ticks.append(asyncio.get_running_loop().time())
            return None
        return await super().receive(message)


def test_a_timer_ticks_each_period_and_does_not_drift() -> None:
    ticks: list[float] = []

    class Slow(Clock):
        async def receive(self, message: Message) -> object:
            await super().receive(message)
            await asyncio.sleep(0.25)
            return None

    async def main() -> None:
        stage = Stage()
        stage.spawn(lambda: Slow(ticks))
        async with stage:
            await asyncio.sleep(4.5)
        assert ticks == [1.0, 2.0, 3.0, 4.0]

    simulate(main())


def test_a_busy_actor_has_one_tick_waiting_however_long_it_takes() -> None:
    ticks: list[float] = []

    async def main() -> None:
        stage = Stage()
        clock = stage.spawn(lambda: Clock(ticks))
        async with stage:
            await clock.tell(Sleep(5.5))
            await asyncio.sleep(7.75)
        assert ticks == [5.5, 5.5, 6.5, 7.5], "the one that waited, the one that was due, the next"

    simulate(main())


def test_a_timer_ends_with_its_life_and_begins_with_the_next() -> None:
    ticks: list[float] = []

    async def main() -> None:
        stage = Stage()
        clock = stage.spawn(lambda: Clock(ticks))
        async with stage:
            await asyncio.sleep(1.5)
            await clock.tell(Break())
            await asyncio.sleep(1.75)
        await asyncio.sleep(5.0)
        assert ticks == [1.0, 2.5]

    simulate(main())


def test_a_timer_outlives_a_refused_tick() -> None:
    ticks: list[float] = []

    class Refusing(Clock):
        async def receive(self, message: Message) -> object:
            await super().receive(message)
            raise Rejected("not now")

    async def main() -> None:
        stage = Stage()
        stage.spawn(lambda: Refusing(ticks))
        async with stage:
            await asyncio.sleep(2.5)
            assert stage.supervisor.restarts == 0
        assert ticks == [1.0, 2.0]

    simulate(main())


def test_a_timer_that_cannot_make_its_message_is_a_crash() -> None:
    def make() -> Message:
        raise RuntimeError("a bug")

    class Broken(Adder):
        async def on_start(self) -> None:
            self.every(4.0, make)

    async def main() -> None:
        stage = Stage(max_restarts=1)
        stage.spawn(Broken)
        async with stage:
            await asyncio.sleep(20.0)
            assert isinstance(stage.task.exception(), GaveUp)
            assert stage.supervisor.restarts == 1

    simulate(main())


def test_an_outcome_that_comes_after_a_crash_is_not_even_wrapped() -> None:
    wrapped: list[object] = []

    def wrap(value: object) -> Message:
        wrapped.append(value)
        return Outcome(value)

    class Piping(Adder):
        async def receive(self, message: Message) -> object:
            if isinstance(message, Tick):
                self.pipe(asyncio.sleep(5.0), wrap)
                return None
            return await super().receive(message)

    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Piping)
        async with stage:
            await adder.tell(Tick())
            await adder.tell(Break())
            await asyncio.sleep(9.0)
        assert wrapped == []

    simulate(main())


def test_work_that_came_back_is_forgotten() -> None:
    works: list[weakref.ref[asyncio.Future[None]]] = []

    class Piping(Adder):
        async def receive(self, message: Message) -> object:
            match message:
                case Tick():
                    work = asyncio.ensure_future(asyncio.sleep(1.0))
                    works.append(weakref.ref(work))
                    self.pipe(work, wrap=Outcome)
            return None

    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Piping)
        async with stage:
            await adder.tell(Tick())
            await asyncio.sleep(2.0)
            gc.collect()
            assert [work() for work in works] == [None]

    simulate(main())


def test_work_that_fails_while_it_is_cancelled_does_not_spoil_the_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Piping(Adder):
        async def on_start(self) -> None:
            self.pipe(self.work(), wrap=Outcome)

        async def work(self) -> None:
            try:
                await asyncio.sleep(99.0)
            finally:
                raise OSError("disk full")

    async def main() -> None:
        stage = Stage()
        stage.spawn(Piping)
        async with stage:
            await asyncio.sleep(1.0)

    simulate(main())
    assert not caplog.records


class Promiser(Adder):
    """Answers an Add of 5 one second later, and receives other messages meanwhile."""

    async def receive(self, message: Message) -> object:
        if message == Add(5):
            return asyncio.ensure_future(self._late())
        return await super().receive(message)

    async def _late(self) -> int:
        await asyncio.sleep(1.0)
        if self.total > 100:
            raise Rejected("too much")
        self.total += 5
        return self.total


def test_an_answer_may_come_later_and_others_are_answered_meanwhile() -> None:
    async def main() -> None:
        stage = Stage()
        promiser = stage.spawn(Promiser)
        async with stage:
            late = promiser.ask(Add(5))
            await asyncio.sleep(0.1)
            assert await promiser.ask(Add(2)) == 2
            assert not late.done()
            assert await late == 7

    simulate(main())


def test_a_refusal_may_come_later_too() -> None:
    async def main() -> None:
        stage = Stage()
        promiser = stage.spawn(Promiser)
        async with stage:
            late = promiser.ask(Add(5))
            await asyncio.sleep(0.1)
            await promiser.ask(Add(101))
            with pytest.raises(Rejected):
                await late

    simulate(main())


def test_an_answer_that_was_promised_by_a_former_life_is_not_waited_for() -> None:
    async def main() -> None:
        stage = Stage()
        promiser = stage.spawn(Promiser)
        async with stage:
            late = promiser.ask(Add(5))
            await asyncio.sleep(0.1)
            await promiser.tell(Break())
            with pytest.raises(ActorGone):
                await late

    simulate(main())
