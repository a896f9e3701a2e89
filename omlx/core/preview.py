"""What the engine is asked to do to show what a codec costs: one prompt, beside everything else.

    Begin     a prompt, and the tokens that follow it
    Compute   a chunk of the prompt -> whether more is left
    Export    the recurrent states after the prompt, as they are
    Score     continue from given states -> log-probabilities of what comes after each token
    End       forget it

Each is one short call, so that steps of requests come in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omlx.cache.block_file import HostTensor
from omlx.core.plan import HostBlock


@dataclass(frozen=True, slots=True)
class Begin:
    """Neither is empty. What was begun before is forgotten."""

    prompt: tuple[int, ...]
    follow: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """Once the answer is False the prompt is computed."""


@dataclass(frozen=True, slots=True)
class Export:
    """Answered with every state, in the order of ``ModelCacheConfig.states``."""


@dataclass(frozen=True, slots=True)
class Score:
    """Answered with a float32 tensor (tokens that follow, vocabulary)."""

    states: HostBlock | None = field(repr=False)
    """None: those that were computed."""


@dataclass(frozen=True, slots=True)
class End:
    """Harmless when nothing was begun."""


PreviewWork = Begin | Compute | Export | Score | End
PreviewResult = bool | HostBlock | HostTensor | None
