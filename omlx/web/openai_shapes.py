"""What the answers of OpenAI's dialects have in common: usage, log-probabilities, who answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from omlx import __version__
from omlx.core.plan import Sampled
from omlx.core.usage import RequestRecord
from omlx.web import sse
from omlx.web.edge import Edge
from omlx.web.errors import ApiError
from omlx.web.prompt_usage import split_prompt

NEVER = -9999.0
"""JSON has no infinity; this is OpenAI's own answer for it."""


class CompletionFrames:
    """What the streams of chat and of text completions have in common."""

    def heartbeat(self) -> bytes:
        return sse.COMMENT

    def failed(self, error: ApiError) -> bytes:
        return sse.data(error.body())

    def end(self) -> bytes:
        return sse.DONE


def fingerprint_of(edge: Edge) -> str:
    return f"omlx-{__version__}-{edge.model.namespace}"


def usage_of(records: Sequence[RequestRecord], edge: Edge) -> dict[str, Any]:
    prompt = sum(record.prompt_tokens for record in records)
    completion = sum(record.generated_tokens for record in records)
    splits = [split_prompt(edge, record) for record in records]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(split.read for split in splits),
            "cache_write_tokens": sum(split.written for split in splits),
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(record.reasoning_tokens for record in records)
        },
    }


def finite(logprob: float | None) -> float:
    return max(min(logprob or 0.0, 0.0), NEVER)


def logprob_entries(
    sampled: Iterable[Sampled], decode: Callable[[int], str]
) -> list[dict[str, Any]]:
    """One entry a token, with its alternatives."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = decode(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}

    return [
        {
            **entry(one.token, one.logprob),
            "top_logprobs": [entry(other.token, other.logprob) for other in one.top],
        }
        for one in sampled
    ]
