"""What clients say about caching: where a shared part ends, what belongs together, what to forget.

Every prefix is cached anyway, so a breakpoint only says where a recurrent state is worth keeping.
Nothing of it reaches the prompt, and nothing of it says what may be reused. How long something
is to be kept (``ttl``, ``prompt_cache_retention``) is not the client's to say: it is ignored, and
the answer says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from omlx.web.body import Loose

BREAKS = ("cache_control", "prompt_cache_breakpoint")
"""One mark by the names that two makers gave it."""


class CacheOptions(Loose):
    mode: str | None = None
    """explicit: cache what has a breakpoint."""
    prewarm: bool | None = None
    comparison_response_id: str | None = None
    ttl: str | None = None


class CacheFields(Loose):
    """The same in every dialect."""

    cache_prompt: bool | None = None
    """False: nothing of this request is looked up or stored."""
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None

    @property
    def caching(self) -> bool:
        """With breakpoints asked for and none set, nothing is to be cached: that is OpenAI's way
        to say so."""
        options = self.prompt_cache_options
        explicit = options is not None and options.mode == "explicit"
        return self.cache_prompt is not False and not (explicit and not any(_breaks(self)))

    @property
    def lifetimes(self) -> tuple[str, ...]:
        """Names of fields that say how long to keep something."""
        names = [
            f"{name}.ttl"
            for name in BREAKS
            if any(isinstance(one, dict) and one.get("ttl") for one in _breaks(self, (name,)))
        ]
        if self.prompt_cache_options and self.prompt_cache_options.ttl:
            names.append("prompt_cache_options.ttl")
        return tuple(names)


def is_break(block: Loose) -> bool:
    """Whether a breakpoint stands at its end."""
    return any((block.model_extra or {}).get(name) is not None for name in BREAKS)


def breaks_of(blocks: Sequence[Loose]) -> tuple[int, ...]:
    """After how many of them breakpoints stand."""
    return tuple(count for count, block in enumerate(blocks, 1) if is_break(block))


def _breaks(value: object, names: Sequence[str] = BREAKS) -> Iterator[Any]:
    """Every breakpoint in a request, as it was sent."""
    if isinstance(value, list):
        for one in value:
            yield from _breaks(one, names)
    elif isinstance(value, BaseModel):
        yield from (one for name in names if (one := getattr(value, name, None)) is not None)
        for name in type(value).model_fields:
            yield from _breaks(getattr(value, name), names)
