"""Where recurrent states are worth keeping, and which of them to let go.

A recurrent state is the fold of all tokens before it: it can be continued only from exactly the
position it was taken at, and it weighs as much as thousands of tokens of KV. So it is kept at few
positions, those that the next request is likely to begin with:

    LAST      before the prompt's final token     a repeat, a regenerate
    TURN      the end of a finished turn          the next turn
    SYSTEM    the end of the system part          another conversation
    BRANCH    where a second prompt left a first  the third one that shares that beginning
    LATTICE   every ``interval`` tokens           whatever diverges elsewhere

and where a client says that something shared ends (a hint). Within the system part a hint counts as
SYSTEM, behind it as LAST, for clients move those on with each turn. A prompt is cut exactly there.

With age a chain's checkpoints are thinned: SYSTEM and BRANCH ones, which others share, go last; of
the rest the newest stay, and behind them ever fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise


class Place(IntEnum):
    """Why a checkpoint is where it is. The higher, the longer it is kept."""

    LATTICE = 1
    LAST = 2
    TURN = 3
    BRANCH = 4
    SYSTEM = 5


SHARED = (Place.BRANCH, Place.SYSTEM)

HINT_GAIN = 16
"""Tokens between a hint and any other checkpoint, or the beginning: for fewer it is not worth its
bytes."""

NEWEST_KEPT = 4
"""Of a chain, whatever their place: two turns back each has its TURN and its LAST."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A checkpoint of a chain, for the decision whether to keep it."""

    position: int
    place: Place


def cuts(
    num_prompt: int,
    num_cached: int,
    *,
    interval: int,
    num_system: int = 0,
    branch: int | None = None,
    hints: Iterable[int] = (),
) -> dict[int, Place]:
    """Positions of a prompt at which to stop and keep the state, behind what is restored.

    The last is always one before the prompt's end. Where two reasons meet the stronger counts.
    """
    last = num_prompt - 1
    wanted = [(position, Place.LATTICE) for position in range(interval, last, interval)]
    wanted.append((last, Place.LAST))
    if branch is not None:
        wanted.append((branch, Place.BRANCH))
    if num_system:
        wanted.append((num_system, Place.SYSTEM))
    chosen: dict[int, Place] = {}
    for position, place in wanted:
        if num_cached < position <= last and position > 0:
            chosen[position] = max(place, chosen.get(position, place))
    for position in hints:
        near = min(abs(position - other) for other in (0, num_cached, last, *chosen))
        if num_cached < position < last and near >= HINT_GAIN:
            chosen[position] = Place.SYSTEM if position < num_system else Place.LAST
    return dict(sorted(chosen.items()))


def next_cut(positions: Iterable[int], position: int, limit: int) -> int:
    """The first cut behind ``position``, at most ``limit``."""
    return min((cut for cut in positions if position < cut < limit), default=limit)


def thin(marks: Sequence[Mark]) -> list[Mark]:
    """Which checkpoints of one chain to let go, when its newest was just added.

    Kept: shared ones and the newest few. Of the others one goes if the stretch that it divides is
    no longer than what lies behind the stretch. So a prompt that leaves the chain d tokens before
    its end recomputes at most d tokens of it, and a chain of n tokens keeps about 2 log n.
    """
    ordered = sorted(marks, key=lambda mark: mark.position)
    drop: list[Mark] = []
    before = 0
    for mark, after in pairwise(ordered[: 1 - NEWEST_KEPT]):
        behind = ordered[-1].position - after.position
        if mark.place not in SHARED and after.position - before <= behind:
            drop.append(mark)
        else:
            before = mark.position
    return drop
