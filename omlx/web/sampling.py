"""The fields that say how to generate: the same ones, checked the same way, in every dialect."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import Field

from omlx.core.plan import Sampling
from omlx.web.body import Count, Loose
from omlx.web.cache_hints import CacheFields
from omlx.web.errors import invalid
from omlx.web.structured import GuidedFields, grammar_of

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_SEED = 1 << 63
MAX_TOKEN_DIGITS = 10

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

RENDERING = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "tokenize",
        "tools",
    }
)
"""Not the template's variables but our way to call it: a client may set none of them, least of all
the template itself."""


class SamplingFields(GuidedFields, CacheFields):
    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Count | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[str, float] | None = None
    seed: Count | None = Field(None, ge=-MAX_SEED, lt=MAX_SEED)
    n: Count | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    cache_salt: str | None = None


class StreamOptions(Loose):
    include_usage: bool | None = None


def sampling_of(
    request: SamplingFields, vocab_size: int, top_logprobs: int | None = None
) -> Sampling:
    """Absent fields have OpenAI's defaults.

    Raises ApiError for a bias on what is no token, and as ``grammar_of`` does.
    """

    def either(value: float | None, default: float) -> float:
        return default if value is None else float(value)

    return Sampling(
        temperature=either(request.temperature, 1.0),
        top_p=either(request.top_p, 1.0),
        top_k=min(request.top_k or 0, vocab_size - 1),
        min_p=either(request.min_p, 0.0),
        repetition_penalty=either(request.repetition_penalty, 1.0),
        presence_penalty=either(request.presence_penalty, 0.0),
        frequency_penalty=either(request.frequency_penalty, 0.0),
        logit_bias=logit_bias_of(request, vocab_size),
        seed=request.seed,
        top_logprobs=top_logprobs,
        grammar=grammar_of(request),
    )


def choices_of(request: SamplingFields, most: int) -> int:
    """Raises ApiError for more choices than can be given."""
    choices = request.n or 1
    if choices > most:
        raise invalid(
            f"n is {choices}; at most {most} choices can be given here.", "n", "unsupported_value"
        )
    return choices


def stops_of(stop: str | list[str] | None, field: str = "stop") -> tuple[str, ...]:
    """Raises ApiError for an empty one, and for too many. None and [] stop nothing."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for index, one in enumerate(stops):
        if not one:
            raise invalid("An empty stop string is not valid.", f"{field}[{index}]")
    if len(stops) > MAX_STOPS:
        raise invalid(f"At most {MAX_STOPS} stop strings are supported.", field)
    return stops


def logit_bias_of(request: SamplingFields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Raises ApiError for a key that is no token id. Zeros are dropped unseen."""
    pairs: list[tuple[int, float]] = []
    for key, bias in (request.logit_bias or {}).items():
        if bias == 0:
            continue
        digits = key.isascii() and key.isdigit() and len(key) <= MAX_TOKEN_DIGITS
        if not digits or int(key) >= vocab_size:
            raise invalid(f"logit_bias has {key[:20]!r}, which is no token id.", "logit_bias")
        if not -100 <= bias <= 100:
            raise invalid("A logit_bias must be between -100 and 100.", "logit_bias")
        pairs.append((int(key), bias))
    return tuple(pairs)


def effort_options(effort: str | None, field: str) -> dict[str, Any]:
    """Variables that templates of thinking models know. Raises ApiError for an unknown effort."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise invalid(f"{field} must be one of {', '.join(EFFORTS)}.", field)
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def template_options_of(given: dict[str, Any] | None, **ours: Any) -> str | None:
    """JSON of the variables for the template, the client's own over those that follow from other
    fields. Raises ApiError for what is none."""
    reserved = sorted(RENDERING & (given or {}).keys())
    if reserved:
        name = f"chat_template_kwargs.{reserved[0]}"
        raise invalid(f"{name} is not the client's to choose.", name, "unsupported_value")
    options = {**ours, **(given or {})}
    if not options:
        return None
    try:
        return orjson.dumps(options).decode()
    except orjson.JSONEncodeError:
        raise invalid(
            "chat_template_kwargs is nested too deeply.", "chat_template_kwargs"
        ) from None
