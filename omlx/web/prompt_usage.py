"""Where the tokens of a prompt come from and go to, for the dialects that tell."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from omlx.actors.messages import ProbeCache
from omlx.cache.blocks import pack_tokens
from omlx.cache.tickets import Reason
from omlx.core.sequence import Request
from omlx.core.usage import RequestRecord
from omlx.kernel.message import ActorGone, MailboxFull
from omlx.web.edge import Edge

PROBE_S = 1.0
"""A stream begins with what is known by then."""


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """Three parts that add up to the prompt."""

    read: int
    """From the cache."""
    written: int
    """Computed, and stored as full blocks."""
    rest: int
    """Computed, at the end. At least 1: the last token is fed to sample from."""


def split_prompt(edge: Edge, record: RequestRecord) -> PromptSplit:
    caching = record.reuse_reason != Reason.DISABLED
    return _split(edge, record.prompt_tokens, record.cached_tokens, caching=caching)


async def expected_cached(edge: Edge, *requests: Request) -> int | None:
    """Tokens that look-ups find now, in all; what they find when their turn comes is in the
    records. None: the cache is busy or restarting, and nobody waits for a number."""
    asked = [ProbeCache(pack_tokens(one.prompt), one.salt) for one in requests if one.caching]
    if edge.cache is None or not asked:
        return 0
    try:
        async with asyncio.timeout(PROBE_S):
            found = [await edge.cache.ask(probe) for probe in asked]
    except (ActorGone, MailboxFull, TimeoutError):
        return None
    return sum(probed.cached_ram + probed.cached_ssd for probed in found)


def expected_split(edge: Edge, request: Request, cached: int | None) -> PromptSplit:
    """Of a prompt of which ``cached`` tokens are found, or nobody knows how many."""
    caching = edge.loaded.settings.cache_enabled and request.caching
    return _split(edge, len(request.prompt), cached or 0, caching=caching)


def _split(edge: Edge, prompt: int, cached: int, *, caching: bool) -> PromptSplit:
    size = edge.model.block_size
    stored = (prompt - 1) // size * size if caching and size else 0
    written = max(0, stored - cached)
    return PromptSplit(cached, written, prompt - cached - written)
