"""Who falls with whom, when to give up, and how to end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from omlx.kernel.mailbox import Ref
from omlx.kernel.message import ActorGone, Message
from omlx.kernel.restart import RestartBudget
from omlx.kernel.supervisor import GaveUp, Supervisor
from tests.kernel.stage import Add, Adder, Break, Outcome, Sleep, Stage, Tick
from tests.sim.loop import simulate


def test_repeated_crashes_give_up() -> None:
    async def main() -> None:
        stage = Stage(max_restarts=2)
        adder = stage.spawn(Adder)
        async with stage:
            for _ in range(3):
                await adder.tell(Break())
                await asyncio.sleep(1)
            assert isinstance(stage.task.exception(), GaveUp)
            assert "stopping" not in {task.get_name() for task in asyncio.all_tasks()}
            with pytest.raises(ActorGone):
                await adder.ask(Add(1))

    simulate(main())


def test_crashes_far_apart_are_forgiven() -> None:
    async def main() -> None:
        stage = Stage(max_restarts=2)
        adder = stage.spawn(Adder)
        async with stage:
            for _ in range(20):
                await adder.tell(Break())
                await asyncio.sleep(6)
            assert await adder.ask(Add(1)) == 1

    simulate(main())


def test_a_crash_restarts_those_that_lean_on_it_and_no_other() -> None:
    lives: Counter[str] = Counter()

    def build(name: str) -> Callable[[], Adder]:
        def born() -> Adder:
            lives[name] += 1
            return Adder()

        return born

    async def main() -> None:
        stage = Stage()
        leaf = stage.spawn(build("leaf"), "leaf")
        middle = stage.spawn(build("middle"), "middle", leans_on=("leaf",))
        stage.spawn(build("other"), "other", leans_on=("leaf",))
        stage.spawn(build("top"), "top", leans_on=("middle",))
        async with stage:
            await middle.tell(Break())
            await asyncio.sleep(1)
            assert lives == {"leaf": 1, "middle": 2, "other": 1, "top": 2}
            await leaf.tell(Break())
            await asyncio.sleep(1)
            assert lives == {"leaf": 2, "middle": 3, "other": 2, "top": 3}, "at any remove"
            readers = Counter(task.get_name() for task in asyncio.all_tasks())
            assert all(readers[name] == 1 for name in lives), "one reader a mailbox"

    simulate(main())


def test_an_actor_stops_before_those_it_leans_on() -> None:
    stopped: list[str] = []

    def build(name: str) -> Callable[[], Adder]:
        class Named(Adder):
            async def on_stop(self) -> None:
                stopped.append(name)

        return Named

    async def main() -> None:
        stage = Stage()
        leaf = stage.spawn(build("leaf"), "leaf")
        stage.spawn(build("middle"), "middle", leans_on=("leaf",))
        stage.spawn(build("top"), "top", leans_on=("middle",))
        async with stage:
            await leaf.tell(Break())
            await asyncio.sleep(1.0)
            assert stopped == ["leaf", "top", "middle"], "the crashed one has stopped already"
            stopped.clear()
        assert stopped == ["top", "middle", "leaf"]

    simulate(main())


def test_stopping_waits_until_the_actor_is_idle() -> None:
    done: list[float] = []

    class Busy(Adder):
        busy = 0

        @property
        def idle(self) -> bool:
            return self.busy == 0

        async def receive(self, message: Message) -> object:
            match message:
                case Sleep(seconds):
                    self.busy += 1
                    self.pipe(asyncio.sleep(seconds), wrap=Outcome)
                case Outcome():
                    self.busy -= 1
                    done.append(asyncio.get_running_loop().time())
            return None

    async def main() -> None:
        stage = Stage()
        busy = stage.spawn(Busy, "busy")
        async with stage:
            await busy.tell(Sleep(2.0))
            await asyncio.sleep(0.1)
        assert done == [2.0]

    simulate(main())


def test_stopping_drains_what_is_queued() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder)
        async with stage:
            asks = [adder.ask(Add(1)) for _ in range(4)]
            await asyncio.sleep(0)
        assert [await ask for ask in asks] == [1, 2, 3, 4]

    simulate(main())


def test_restarts_are_counted_by_crash() -> None:
    async def main() -> None:
        stage = Stage(max_restarts=2)
        leaf = stage.spawn(Adder, "leaf")
        stage.spawn(Adder, "top", leans_on=("leaf",))
        async with stage:
            assert stage.supervisor.restarts == 0
            for restarts in (1, 2):
                await leaf.tell(Break())
                await asyncio.sleep(1.0)
                assert stage.supervisor.restarts == restarts
            await leaf.tell(Break())
            await asyncio.sleep(1.0)
            assert stage.supervisor.restarts == 2, "giving up is not a restart"

    simulate(main())


def test_an_error_in_building_an_actor_is_a_crash_like_any_other() -> None:
    births = 0

    def build() -> Adder:
        nonlocal births
        births += 1
        if births == 2:
            raise RuntimeError("a bug")
        return Adder()

    async def main() -> None:
        stage = Stage(max_restarts=2)
        adder = stage.spawn(build)
        async with stage:
            await adder.tell(Break())
            await asyncio.sleep(1.0)
            assert await adder.ask(Add(1)) == 1
        assert births == 3

    simulate(main())


def test_an_actor_that_dies_of_a_cancelled_wait_is_restarted() -> None:
    class Cancelled(Adder):
        async def receive(self, message: Message) -> object:
            if message == Add(2):
                gone = asyncio.get_running_loop().create_future()
                gone.cancel()
                await gone
            return await super().receive(message)

    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Cancelled)
        async with stage:
            with pytest.raises(ActorGone, match="stopped while it worked"):
                await adder.ask(Add(2))
            await asyncio.sleep(1.0)
            assert await adder.ask(Add(1)) == 1

    simulate(main())


class Immortal(Adder):
    """Ignores that it is cancelled, for 60 s."""

    async def receive(self, message: Message) -> object:
        until_s = asyncio.get_running_loop().time() + 60.0
        while (left_s := until_s - asyncio.get_running_loop().time()) > 0:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(left_s)
        raise asyncio.CancelledError


def test_a_child_that_does_not_end_is_never_given_a_second_reader() -> None:
    async def main() -> None:
        stage = Stage()
        leaf = stage.spawn(Adder, "leaf")
        top = stage.spawn(Immortal, "top", leans_on=("leaf",), drain_s=3.0)
        async with stage:
            await top.tell(Tick())
            await asyncio.sleep(1.0)
            await leaf.tell(Break())
            await asyncio.wait({stage.task})
            assert asyncio.get_running_loop().time() == 10.0, "killed, asked to stop, killed again"
            assert not top.offer(Tick())
            with pytest.raises(GaveUp, match=r"top did not end in 3\.0 s"):
                stage.task.result()
            assert [t.get_name() for t in asyncio.all_tasks()].count("top") == 1
            await asyncio.sleep(60.0)

    simulate(main())


def test_each_child_has_its_own_time_to_drain() -> None:
    stopped: list[tuple[str, float]] = []

    def build(name: str) -> Callable[[], Adder]:
        class Named(Adder):
            async def on_stop(self) -> None:
                stopped.append((name, asyncio.get_running_loop().time()))

        return Named

    async def main() -> None:
        stage = Stage()
        usual = stage.spawn(build("usual"), "usual")
        patient = stage.spawn(build("patient"), "patient", drain_s=30.0)
        hasty = stage.spawn(build("hasty"), "hasty", drain_s=0.5)
        async with stage:
            await usual.tell(Sleep(1_000.0))
            await patient.tell(Sleep(20.0))
            await hasty.tell(Sleep(1_000.0))
            await asyncio.sleep(1.0)
        assert stopped == [("hasty", 1.5), ("patient", 20.0), ("usual", 25.0)]

    simulate(main())


def test_a_child_can_be_given_more_time_while_it_runs() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder, "adder", drain_s=0.5)
        async with stage:
            stage.supervisor.allow("adder", 30.0)
            await adder.tell(Sleep(20.0))
            await adder.tell(Add(1))
        assert asyncio.get_running_loop().time() == 20.0

    simulate(main())


@pytest.mark.parametrize("drained_s", [0.0, 1.0])
def test_a_drain_that_is_cut_short_still_lets_each_actor_end(drained_s: float) -> None:
    """Also when it is cut short before it has begun."""
    ended: list[tuple[str, str, float]] = []

    def build(name: str) -> Callable[[], Adder]:
        class Named(Adder):
            async def on_stopping(self) -> None:
                ended.append((name, "is to stop", asyncio.get_running_loop().time()))

            async def on_stop(self) -> None:
                ended.append((name, "stops", asyncio.get_running_loop().time()))

            @property
            def idle(self) -> bool:
                return False

        return Named

    async def main() -> None:
        stage = Stage()
        low = stage.spawn(build("low"), "low", drain_s=60.0)
        high = stage.spawn(build("high"), "high", leans_on=("low",), drain_s=60.0)
        async with stage:
            stage.stopping.set()
            if drained_s:
                await asyncio.sleep(drained_s)
            stage.task.cancel()
        for name in ("low", "high"):
            assert (name, "is to stop") in {entry[:2] for entry in ended}
            assert (name, "stops", pytest.approx(drained_s + 0.1)) in ended
        assert {"low", "high"}.isdisjoint(task.get_name() for task in asyncio.all_tasks())
        for ref in (low, high):
            with pytest.raises(ActorGone):
                await ref.ask(Add(1))

    simulate(main())


def test_draining_does_not_wait_for_room() -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder, capacity=1, drain_s=9.0)
        async with stage:
            await adder.tell(Sleep(2.0))
            await adder.tell(Sleep(2.0))
            waiting = asyncio.create_task(adder.tell(Sleep(100.0)))
            await asyncio.sleep(1.0)
        assert asyncio.get_running_loop().time() == 4.0
        await waiting

    simulate(main())


def test_a_crash_while_draining_is_logged_and_not_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        stage = Stage()
        adder = stage.spawn(Adder)
        async with stage:
            await adder.tell(Sleep(1.0))
            await adder.tell(Break())
        assert stage.task.exception() is None
        assert stage.supervisor.restarts == 0

    simulate(main())
    assert "adder crashed while draining" in caplog.text
    assert "cannot handle Break" in caplog.text


def test_those_who_ask_a_child_that_crashed_while_draining_learn_at_once() -> None:
    answers: list[object] = []

    class Asking(Adder):
        def __init__(self, leaf: Ref[Any]) -> None:
            super().__init__()
            self.leaf = leaf

        async def receive(self, message: Message) -> object:
            await asyncio.sleep(2.0)
            try:
                await self.leaf.ask(Add(1))
            except ActorGone as gone:
                answers.append(asyncio.get_running_loop().time())
                answers.append(str(gone))
            return None

    async def main() -> None:
        stage = Stage()
        leaf = stage.spawn(Adder, "leaf")
        top = stage.spawn(lambda: Asking(leaf), "top", leans_on=("leaf",))
        async with stage:
            await top.tell(Tick())
            await leaf.tell(Sleep(1.0))
            await leaf.tell(Break())
        assert answers == [2.0, "leaf stopped"]

    simulate(main())


def test_a_second_crash_during_a_restart_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Clumsy(Adder):
        async def on_stop(self) -> None:
            if self.total:
                raise RuntimeError("broke while letting go")

    async def main() -> None:
        stage = Stage()
        leaf = stage.spawn(Adder, "leaf")
        top = stage.spawn(Clumsy, "top", leans_on=("leaf",))
        async with stage:
            await top.ask(Add(1))
            await leaf.tell(Break())
            await asyncio.sleep(1.0)
            assert await top.ask(Add(2)) == 2

    simulate(main())
    assert "top crashed while it was stopped for a restart" in caplog.text
    assert "leaf crashed while" not in caplog.text, "the first crash is logged once"


def test_children_are_added_leaves_first_and_once() -> None:
    supervisor = Supervisor(RestartBudget(3, 60.0))
    supervisor.add("leaf", 1, Adder)

    with pytest.raises(AssertionError, match="leaves first"):
        supervisor.add("top", 1, Adder, "root")
    with pytest.raises(AssertionError, match="two children called leaf"):
        supervisor.add("leaf", 1, Adder)
