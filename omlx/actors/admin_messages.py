"""What a person at the admin pages asks of an actor, beyond its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from omlx.kernel.message import Ask


@dataclass(frozen=True, slots=True)
class CancelRequest(Ask[bool]):
    """Stop a request, to the scheduler. Its client gets an error that says so.

    False: there is none of that name, or it has ended.
    """

    request_id: str
