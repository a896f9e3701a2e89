"""The rows that decode together: one forward pass gives each of them its next token.

Two ways to order the same work, told apart by ``ahead``:

    ahead      the pass over this step's tokens is launched before they are read, so the device
               computes the next step while the host deals with this one. After a step the caches
               hold the prompt and every emitted token. Right for GPUs.
    not ahead  tokens are read as soon as they are sampled and fed with the next step. The caches
               hold all but the last emitted token. Right for MLX on CPU, where launching blocks
               for most of the pass (81 of 93 ms for SmolLM2-135M): nothing would overlap, the
               first token would come a whole pass later, and each sequence would end with a
               pass for nobody.

mlx-lm's batch caches do the hard part: rows of different length, joining and leaving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import TokenBuffer
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler

from omlx.core.plan import Sampling, Uid
from omlx.engine.kv import numbers
from omlx.engine.sampler import processors_for, sampler_for


@dataclass(slots=True)
class DecodingRow:
    uid: Uid
    sampling: Sampling
    sampler: Sampler
    processors: list[LogitsProcessor]
    context: TokenBuffer | None
    """Every token so far, for rows whose processors look at them."""


@dataclass(frozen=True, slots=True)
class Emitted:
    row: DecodingRow
    token: int
    logprobs: mx.array | None
    """(vocabulary,), evaluated; None unless the row asked for log-probabilities."""


@dataclass(slots=True)
class _Pass:
    """What one forward pass gave: (B,) tokens, and (B, vocabulary) if any row wants them."""

    tokens: mx.array
    logprobs: mx.array | None


@dataclass(slots=True)
class DecodeBatch:
    model: nn.Module
    ahead: bool
    rows: list[DecodingRow] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    _next: _Pass | None = None
    """The tokens to be fed by the next pass, one a row."""

    def __len__(self) -> int:
        return len(self.rows)

    def index(self, uid: Uid) -> int:
        """Raises ValueError for a row that is not here."""
        return [row.uid for row in self.rows].index(uid)

    def join(self, uid: Uid, sampling: Sampling, prompt: Sequence[int], caches: list[Any]) -> None:
        """Add a row whose caches hold its prompt but for the last token."""
        processors = processors_for(sampling)
        context = TokenBuffer(list(prompt[:-1])) if processors else None
        row = DecodingRow(uid, sampling, sampler_for(sampling), processors, context)
        fed = _Pass(mx.array([prompt[-1]]), None)
        if self.ahead:
            fed = self._forward([row], caches, fed)
            mx.async_eval(fed.tokens)
        self._extend(row, caches, fed)

    def leave(self, uids: set[Uid]) -> None:
        keep = [index for index, row in enumerate(self.rows) if row.uid not in uids]
        if len(keep) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in keep]
        if not keep:
            self.caches, self._next = [], None
            return
        for cache in self.caches:
            cache.filter(keep)
        assert self._next is not None, "rows have tokens to feed"
        logprobs = self._next.logprobs
        self._next = _Pass(
            self._next.tokens[mx.array(keep)],
            None if logprobs is None else logprobs[mx.array(keep)],
        )

    def step(self) -> list[Emitted]:
        """Give every row one token."""
        if not self.rows:
            return []
        assert self._next is not None, "rows have tokens to feed"
        before, self._next = self._next, self._forward(self.rows, self.caches, self._next)
        if self.ahead:
            _evaluate(self._next, mx.async_eval)
            emitted = before
        else:
            emitted = self._next
        _evaluate(emitted, mx.eval)
        return [
            Emitted(row, token, self._logprobs_of(emitted, index, row))
            for index, (row, token) in enumerate(
                zip(self.rows, numbers(emitted.tokens), strict=True)
            )
        ]

    def _forward(self, rows: list[DecodingRow], caches: list[Any], fed: _Pass) -> _Pass:
        logits = self.model(fed.tokens[:, None], cache=caches)[:, -1, :]  # (B, vocabulary)
        if any(row.processors for row in rows):
            logits = mx.concatenate(
                [
                    _processed(row, fed.tokens[index : index + 1], logits[index : index + 1])
                    for index, row in enumerate(rows)
                ]
            )
        wanted = any(row.sampling.top_logprobs is not None for row in rows)
        samplers = [row.sampler for row in rows]
        shared = all(sampler is samplers[0] for sampler in samplers)
        if shared and samplers[0] is greedy_sampler and not wanted:
            # The largest logit is the largest log-probability; normalising 49,152 of them on CPU
            # costs 1.0 ms, finding the largest 0.1 ms.
            return _Pass(greedy_sampler(logits), None)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if shared:
            tokens = samplers[0](logprobs)
        else:
            tokens = mx.concatenate(
                [sampler(logprobs[i : i + 1]) for i, sampler in enumerate(samplers)]
            )
        return _Pass(tokens, logprobs if wanted else None)

    def _extend(self, row: DecodingRow, caches: list[Any], fed: _Pass) -> None:
        if not self.rows or self._next is None:
            self.rows, self.caches, self._next = [row], caches, fed
            return
        for cache, other in zip(self.caches, caches, strict=True):
            cache.extend(other)
        self.rows.append(row)
        mine, theirs = self._next.logprobs, fed.logprobs
        # Rows that want none do not mind what stands in their place.
        if mine is None and theirs is not None:
            mine = mx.zeros((len(self.rows) - 1, theirs.shape[1]), theirs.dtype)
        if theirs is None and mine is not None:
            theirs = mx.zeros((1, mine.shape[1]), mine.dtype)
        self._next = _Pass(
            mx.concatenate([self._next.tokens, fed.tokens]),
            None if mine is None or theirs is None else mx.concatenate([mine, theirs]),
        )

    @staticmethod
    def _logprobs_of(emitted: _Pass, index: int, row: DecodingRow) -> mx.array | None:
        if row.sampling.top_logprobs is None or emitted.logprobs is None:
            return None
        return emitted.logprobs[index]


def _processed(row: DecodingRow, token: mx.array, logits: mx.array) -> mx.array:
    """(1, vocabulary) logits after the row's penalties and biases."""
    if row.context is None:
        return logits
    context = row.context.update_and_fetch(token)
    for processor in row.processors:
        logits = processor(context, logits)
    return logits


def _evaluate(result: _Pass, evaluate: Any) -> None:
    if result.logprobs is None:
        evaluate(result.tokens)
    else:
        evaluate(result.tokens, result.logprobs)
