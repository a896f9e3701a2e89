"""An actor that adds, the messages it takes, and a supervisor to run it under."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Self

from omlx.kernel.actor import Actor
from omlx.kernel.mailbox import Ref
from omlx.kernel.message import Ask, Message, Rejected
from omlx.kernel.restart import RestartBudget
from omlx.kernel.supervisor import Supervisor
from tests.sim.loop import seeded_pause


@dataclass(frozen=True, slots=True)
class Add(Ask[int]):
    amount: int


@dataclass(frozen=True, slots=True)
class Break(Message):
    pass


@dataclass(frozen=True, slots=True)
class Sleep(Message):
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome(Message):
    value: Any


@dataclass(frozen=True, slots=True)
class Tick(Message):
    pass


class Adder(Actor):
    """Adds. Refuses 0, has a bug for 13 and for every message that it does not know."""

    name = "adder"
    capacity = 4

    def __init__(self) -> None:
        self.total = 0

    async def receive(self, message: Message) -> object:
        match message:
            case Add(amount=0):
                raise Rejected("nothing to add")
            case Add(amount=13):
                raise RuntimeError("a bug")
            case Add(amount):
                self.total += amount
                return self.total
            case Sleep(seconds):
                await asyncio.sleep(seconds)
                return None
        raise AssertionError(f"{self.name} cannot handle {message!r}")


class Stage:
    """A supervisor whose interleaving ``seed`` chooses; runs inside ``async with``, then drains."""

    def __init__(self, seed: int = 0, max_restarts: int = 2) -> None:
        self.supervisor = Supervisor(RestartBudget(max_restarts, 10.0), pause=seeded_pause(seed))
        self.stopping = asyncio.Event()

    def spawn(
        self,
        build: Any,
        name: str = "adder",
        capacity: int = 4,
        leans_on: tuple[str, ...] = (),
        drain_s: float | None = None,
    ) -> Ref[Any]:
        return self.supervisor.add(name, capacity, build, *leans_on, drain_s=drain_s)

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self.supervisor.run(self.stopping))
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.stopping.set()
        await asyncio.wait({self.task})
