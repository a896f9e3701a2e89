"""Whose prompt is computed in the next step, and which rows can decode after it."""

from __future__ import annotations

from collections.abc import Mapping

from omlx.core.limits import SchedulerLimits
from omlx.core.plan import Fork, Prefill, Uid
from omlx.core.sequence import Sequence, State


def next_prefills(
    running: Mapping[Uid, Sequence], limits: SchedulerLimits
) -> tuple[list[Prefill], list[Fork], list[Uid]]:
    """One chunk of the oldest unfinished prompt, and every row that then can decode."""
    prefills: list[Prefill] = []
    forks: list[Fork] = []
    starts: list[Uid] = []
    for sequence in running.values():
        if sequence.state is not State.PREFILL:
            continue
        position = sequence.num_computed
        if not prefills:
            position = sequence.next_stop(limits.chunk_tokens)
        computed_now = position > sequence.num_computed
        if computed_now:
            prefills.append(Prefill(sequence.uid, position))
        done = position == sequence.last_prompt_position
        if done and not (computed_now and limits.cut_before_decode):
            starts.append(sequence.uid)
    for leader in [running[uid] for uid in starts]:
        forks += [follower.fork(leader) for follower in followers(leader, running)]
    return prefills, forks, [*starts, *(fork.uid for fork in forks)]


def followers(leader: Sequence, running: Mapping[Uid, Sequence]) -> list[Sequence]:
    """The other choices of its request that wait for its prompt."""
    choices = range(leader.uid, leader.uid - leader.index + leader.request.n)
    found = [running[Uid(uid)] for uid in choices if uid in running]
    return [sequence for sequence in found if sequence.state is State.FORKING]
