"""What the scheduler gets of a client's request: tokens and numbers, all of them checked."""

from __future__ import annotations

from dataclasses import dataclass

from omlx.core.diagnosis import Change
from omlx.core.markup import PLAIN, Markup
from omlx.core.plan import GREEDY, Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be generated, validated. ``max_tokens`` is at least 1."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    stops: tuple[str, ...] = ()
    salt: str = ""
    n: int = 1
    """Choices: continuations of the prompt, which is computed once."""
    num_system: int = 0
    """Tokens of the prompt that belong to its system part, which other prompts may share."""
    model: str = ""
    client: str = ""
    route: str = ""
    attribution_stripped: bool = False
    """Whether a client's attribution was left out of the prompt."""
    markup: Markup = PLAIN
    """How its answer is read."""
    only_fills: bool = False
    """It is to fill the cache: one token is sampled, because something must be, and not told."""
    internal: bool = False
    """The server asks itself, as in a self-test: it is in no list and in no count of requests."""
    hints: tuple[int, ...] = ()
    """Positions at which a client wants a recurrent state kept."""
    caching: bool = True
    """False: nothing of it is looked up or stored."""
    conversation: str = ""
    """What the client calls the conversation; it groups requests and changes nothing."""
    change: Change | None = None
    """What differs from an earlier request."""
