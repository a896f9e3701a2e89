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

A row with a grammar may only be given tokens that the grammar allows now, and which these are
depends on the token before. So its tokens are read before the next ones are sampled, but not before
the pass is launched: the host finds out what is allowed while the device computes the logits. What
is lost ahead is that sampling waits for the host, and for that the whole batch waits; of the
device's time that is the sampling alone, unless finding out takes longer than the pass.

mlx-lm's batch caches do the hard part: rows of different length, joining and leaving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import TokenBuffer
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler

from omlx.cache.hybrid_cache import ModelCacheConfig
from omlx.core.plan import Sampling, Uid
from omlx.engine.grammar import GrammarFailed, Matcher
from omlx.engine.kv import numbers
from omlx.engine.sampler import processors_for, sampler_for
from omlx.engine.together import merge


@dataclass(slots=True)
class DecodingRow:
    uid: Uid
    sampling: Sampling
    sampler: Sampler
    processors: list[LogitsProcessor]
    context: TokenBuffer | None
    """Every token so far, for rows whose processors look at them."""
    matcher: Matcher | None = None
    """Its place in its grammar."""
    fault: str | None = None
    """Why it can't go on; None: it can."""


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


@dataclass(frozen=True, slots=True)
class Joining:
    """A row that is to decode, with its whole prompt."""

    uid: Uid
    sampling: Sampling
    prompt: Sequence[int]
    matcher: Matcher | None = None
    """At the beginning of its grammar."""


@dataclass(frozen=True, slots=True)
class Begun:
    rows: list[DecodingRow]
    caches: list[Any]
    fed: _Pass


@dataclass(slots=True)
class DecodeBatch:
    model: nn.Module
    config: ModelCacheConfig
    ahead: bool
    rows: list[DecodingRow] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    _next: _Pass | None = None
    """The tokens to be fed by the next pass, one a row."""

    def __len__(self) -> int:
        return len(self.rows)

    def caches_of(self, uid: Uid) -> tuple[list[Any], int]:
        """(the caches, the row's place in them). Raises ValueError for a row that is not here."""
        return self.caches, [row.uid for row in self.rows].index(uid)

    def begin(self, joining: Sequence[Joining], rows: Sequence[list[Any]]) -> list[Begun]:
        """Prepare what is to ``join``; rows: caches that hold each prompt but for its last token.

        Ahead, one pass gives all of them their first token. The batch is as before until they
        ``join`` it, so a pass that fails concerns nobody else.
        """
        caches = merge(self.config, rows)
        decoding = [_row_of(one) for one in joining]
        fed = _Pass(mx.array([one.prompt[-1] for one in joining]), None)
        if self.ahead:
            fed = self._forward(decoding, caches, fed)
            mx.async_eval(fed.tokens)
        return [Begun(decoding, caches, fed)]

    def join(self, begun: Sequence[Begun]) -> None:
        """Add rows, behind those that are here."""
        for one in begun:
            self._extend(one)

    def _extend(self, begun: Begun) -> None:
        if not self.rows or self._next is None:
            self.rows, self.caches, self._next = begun.rows, begun.caches, begun.fed
            return
        for cache, other in zip(self.caches, begun.caches, strict=True):
            cache.extend(other)
        mine, theirs = self._next.logprobs, begun.fed.logprobs
        # Rows that want none do not mind what stands in their place.
        if mine is None and theirs is not None:
            mine = mx.zeros((len(self.rows), theirs.shape[1]), theirs.dtype)
        if theirs is None and mine is not None:
            theirs = mx.zeros((len(begun.rows), mine.shape[1]), mine.dtype)
        self.rows += begun.rows
        self._next = _Pass(
            mx.concatenate([self._next.tokens, begun.fed.tokens]),
            None if mine is None or theirs is None else mx.concatenate([mine, theirs]),
        )

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
        """Give every row one token, but for those that have a ``fault`` now: they must leave."""
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
            if row.fault is None
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
        if any(row.matcher for row in rows):
            mx.async_eval(logits)
            logits = _allowed(rows, numbers(fed.tokens), logits)
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

    @staticmethod
    def _logprobs_of(emitted: _Pass, index: int, row: DecodingRow) -> mx.array | None:
        if row.sampling.top_logprobs is None or emitted.logprobs is None:
            return None
        return emitted.logprobs[index]


def _row_of(joining: Joining) -> DecodingRow:
    sampling = joining.sampling
    processors = processors_for(sampling)
    context = TokenBuffer(list(joining.prompt[:-1])) if processors else None
    sampler = sampler_for(sampling)
    # A copy, for a pass that fails is done again.
    matcher = joining.matcher and joining.matcher.copy()
    return DecodingRow(joining.uid, sampling, sampler, processors, context, matcher)


def _processed(row: DecodingRow, token: mx.array, logits: mx.array) -> mx.array:
    """(1, vocabulary) logits after the row's penalties and biases."""
    if row.context is None:
        return logits
    context = row.context.update_and_fetch(token)
    for processor in row.processors:
        logits = processor(context, logits)
    return logits


def _allowed(rows: list[DecodingRow], fed: list[int], logits: mx.array) -> mx.array:
    """(B, vocabulary) logits with those that a row's grammar forbids at minus infinity."""
    mask: np.ndarray[Any, Any] = np.ones(logits.shape, np.bool_)
    for index, row in enumerate(rows):
        if row.matcher is None or row.fault is not None:
            continue
        try:
            mask[index] = row.matcher.allowed(fed[index], logits.shape[1])
        except GrammarFailed as failed:
            row.fault = str(failed)
    return mx.where(mx.array(mask), logits, mx.array(-mx.inf, logits.dtype))


def _evaluate(result: _Pass, evaluate: Any) -> None:
    if result.logprobs is None:
        evaluate(result.tokens)
    else:
        evaluate(result.tokens, result.logprobs)
