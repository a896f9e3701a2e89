"""How each row chooses its next token: mlx-lm's samplers, one object for equal parameters.

Rows that share a sampler object are sampled in one batched call. A seeded row has a sampler of
its own, with its own key, so that its tokens are the same alone and in any batch.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
from mlx_lm.sample_utils import (
    LogitsProcessor,
    Sampler,
    apply_min_p,
    apply_top_k,
    apply_top_p,
    greedy_sampler,
    make_logits_processors,
    make_sampler,
)

from omlx.core.plan import Sampling

WHOLE_CONTEXT = 1 << 30
"""Penalties look at the whole context; mlx-lm's own default is 20 tokens."""


COLDEST = 1e-5
"""Below this temperature sampling is greedy: its inverse would overflow the logits."""


def sampler_for(sampling: Sampling) -> Sampler:
    if sampling.temperature < COLDEST:
        return greedy_sampler
    if sampling.seed is not None:
        return _seeded(sampling)
    return _shared(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)


@lru_cache(maxsize=64)
def _shared(temperature: float, top_p: float, top_k: int, min_p: float) -> Sampler:
    return make_sampler(temperature, top_p=top_p, min_p=min_p, top_k=top_k)


def _seeded(sampling: Sampling) -> Sampler:
    assert sampling.seed is not None
    key = mx.random.key(sampling.seed % (1 << 64))
    for _ in range(sampling.drawn):
        key = mx.random.split(key)[0]

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal key
        key, use = mx.random.split(key)
        if 0 < sampling.top_p < 1:
            logprobs = apply_top_p(logprobs, sampling.top_p)
        if sampling.min_p > 0:
            logprobs = apply_min_p(logprobs, sampling.min_p)
        if sampling.top_k > 0:
            logprobs = apply_top_k(logprobs, sampling.top_k)
        return mx.random.categorical(logprobs * (1 / sampling.temperature), key=use)

    return sample


def processors_for(sampling: Sampling) -> list[LogitsProcessor]:
    repetition = sampling.repetition_penalty
    return make_logits_processors(
        dict(sampling.logit_bias),
        repetition_penalty=None if repetition == 1 else repetition,
        repetition_context_size=WHOLE_CONTEXT,
        presence_penalty=sampling.presence_penalty or None,
        presence_context_size=WHOLE_CONTEXT,
        frequency_penalty=sampling.frequency_penalty or None,
        frequency_context_size=WHOLE_CONTEXT,
    )
