"""Whose prompt is computed in the next step, when the running streams must have their turn first,
and which rows can decode after it.

A step computes chunks of prompts, together no longer than one whole chunk, or than some of them
while many prompts wait that came together (see ``wave``). Every other chunk goes
to the oldest prompt, the ones between to the one with least left: a short prompt that arrives
during a long one waits for about as many chunks as it has itself, and the long one always gets on.

A chunk takes longer than a decoding step, and for its time the streams stand still. They are owed
for it: until they have had ``decode_share`` of the time, steps only decode. Chunks themselves stay
as long as they are, because where a prompt is cut must not depend on who else is served.

Short prompts that arrived before a stream had its first token are of one wave with it, and nothing
is owed for them: a batch that decodes half full while the other half waits to be computed is slower
for everybody. Measured with 8 prompts of 128 tokens at once on CPU: paced, 0.75 of mlx-lm's rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from omlx.core.limits import SchedulerLimits
from omlx.core.plan import Fork, Prefill, StepResult, Uid
from omlx.core.sequence import Sequence, State
from omlx.core.wave import WAVE_CHUNKS, most_chunks

MOST_SHARE = 0.99
"""Even who gives everything to the streams lets prompts get on a little."""
SLOWER_BETWEEN = 1.08
"""How much longer a decoding step takes between chunks, which leave it nothing in the processor's
caches while blocks are written, than alone. Without it a stream beside a prompt of 3,000 tokens had
0.48 of its rate where it was to have half (SmolLM2 on two cores)."""
ROUNDING_S = 1e-6
"""For less nobody waits a step."""


class Prefills:
    def __init__(self, limits: SchedulerLimits) -> None:
        self.set_limits(limits)
        self._owed_s = 0.0
        """Of decoding, that the running streams have not had yet."""
        self._oldest_next = True
        self._owing = True
        """Whether the streams are owed for the step that is being computed."""

    def set_limits(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        share = min(limits.decode_share, MOST_SHARE)
        self._debt_rate = SLOWER_BETWEEN * share / (1.0 - share)

    def ran(self, result: StepResult, *, decoding: bool) -> None:
        """Account for a step; ``decoding``: whether streams ran beside its prompts."""
        if not decoding:
            self._owed_s = 0.0
            return
        lent_s = result.prefill_s if self._owing else 0.0
        # What a step gives beyond what was owed is not taken back: it is a share at least.
        self._owed_s = max(0.0, self._owed_s + self._debt_rate * lent_s - result.decode_s)

    def next(
        self, running: Mapping[Uid, Sequence], *, decoding: bool
    ) -> tuple[list[Prefill], list[Fork], list[Uid]]:
        """Chunks of prompts to compute, and every row that then can decode."""
        waits = decoding and self._owed_s > ROUNDING_S
        wave = self._wave(running)
        stops = {} if waits else dict(self._chunks(running, wave))
        self._owing = not stops.keys() <= wave
        starts: list[Uid] = []
        for sequence in running.values():
            if sequence.state is State.PREFILL:
                stop = stops.get(sequence.uid, sequence.num_computed)
                done = stop == sequence.last_prompt_position
                if done and not (sequence.uid in stops and self.limits.cut_before_decode):
                    starts.append(sequence.uid)
        forks: list[Fork] = []
        for leader in [running[uid] for uid in starts]:
            forks += [follower.fork(leader) for follower in followers(leader, running)]
        prefills = [Prefill(uid, stop) for uid, stop in stops.items()]
        return prefills, forks, [*starts, *(fork.uid for fork in forks)]

    def _wave(self, running: Mapping[Uid, Sequence]) -> set[Uid]:
        """Whose prompts are computed, are short, and came before any stream ran."""
        short = WAVE_CHUNKS * self.limits.chunk_tokens
        begun = [s.times.first_token for s in running.values() if s.state is State.DECODE]
        first = min((at for at in begun if at is not None), default=math.inf)
        return {
            s.uid
            for s in running.values()
            if s.state is State.PREFILL
            and s.last_prompt_position - s.num_restored <= short
            and s.times.submitted <= first
        }

    def _chunks(self, running: Mapping[Uid, Sequence], wave: set[Uid]) -> Iterator[tuple[Uid, int]]:
        """(sequence, where its chunk ends) of those that fit into a step."""
        limits = self.limits
        oldest_first = [
            s
            for s in running.values()
            if s.state is State.PREFILL and s.num_computed < s.last_prompt_position
        ]
        if not oldest_first:
            return
        order = sorted(oldest_first, key=lambda s: s.last_prompt_position - s.num_computed)
        if self._oldest_next:
            order = [oldest_first[0], *(s for s in order if s is not oldest_first[0])]
        self._oldest_next = order[0] is not oldest_first[0]
        together = [s for s in order if s.uid in wave]
        chunks = most_chunks(len(together)) if order[0].uid in wave else 1
        if chunks > 1:
            order = together
        room = chunks * limits.chunk_tokens
        for sequence in order:
            stop = sequence.next_stop(limits.chunk_tokens)
            length = stop - sequence.num_computed
            if length > room:
                return
            room -= length
            yield sequence.uid, stop


def followers(leader: Sequence, running: Mapping[Uid, Sequence]) -> list[Sequence]:
    """The other choices of its request that wait for its prompt."""
    choices = range(leader.uid, leader.uid - leader.index + leader.request.n)
    found = [running[Uid(uid)] for uid in choices if uid in running]
    return [sequence for sequence in found if sequence.state is State.FORKING]
