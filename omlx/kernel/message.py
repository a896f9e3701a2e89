"""What actors say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R")


class Message:
    """Base of every message. Subclasses are frozen dataclasses that hold plain host values.

    A message never holds an array, a callback or a mutable container, so the sender can forget it
    the moment it is sent.
    """

    __slots__ = ()


class Ask(Message, Generic[R]):
    """A message that is answered exactly once, with an ``R`` or with an error."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Stop(Message):
    """Finish what is already in the mailbox, and what is not ``idle`` yet, then end."""


@dataclass(frozen=True, slots=True)
class Tick(Message):
    """To self, as often as it was asked for with ``every``."""


@dataclass(frozen=True, slots=True)
class Fault(Message):
    """A bug in the actor's own work outside ``receive``: the actor ends with it."""

    error: Exception


class Rejected(Exception):
    """An expected refusal. The asker sees it; the actor that raised it lives on."""


class MailboxFull(Rejected):
    """The receiver's mailbox is at capacity; nothing was queued."""


class ActorGone(Exception):
    """The receiver crashed or stopped before it answered. Whether it acted is unknown."""
