"""Models whose KV can't be batched are served all the same, several requests at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from omlx.core.plan import Sampling, Uid
from omlx.engine.kv import numbers, probe
from omlx.engine.load import LoadedModel, backend_name
from tests import tiny
from tests.engine.rig import Rig

Loaded = Callable[[str], LoadedModel]

KINDS: dict[str, Callable[[], Any]] = {
    "quantised": lambda: QuantizedKVCache(group_size=32, bits=8),
    "chunked": lambda: ChunkedKVCache(1 << 20),
    "concatenating": ConcatenateKVCache,
    "keeps the first": lambda: RotatingKVCache(1 << 10, keep=4),
}


class WithCaches:
    """A model whose layers keep their tokens in another way."""

    def __init__(self, model: Any, make: Callable[[], Any]) -> None:
        self._model, self._make = model, make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None) -> mx.array:
        return self._model(tokens, cache=cache)

    def make_cache(self) -> list[Any]:
        return [self._make() for _ in self._model.layers]


def plain(model: Any, make: Callable[[], Any], prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy tokens of one request by nothing but the model."""
    caches = [make() for _ in model.layers]
    fed, tokens = mx.array([prompt]), list[int]()
    for _ in range(count):
        token: int = numbers(mx.argmax(model(fed, cache=caches)[:, -1], axis=-1))[0]
        tokens.append(token)
        fed = mx.array([[token]])
    return tokens


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    if request.param == "quantised" and backend_name() == "cuda":
        pytest.skip("MLX has no quantised matrix product of so few columns on CUDA")
    return KINDS[request.param]


@pytest.fixture(scope="module")
def llama(loaded: Loaded) -> LoadedModel:
    """With heads that are wide enough to be quantised in groups."""
    small = loaded("llama")
    return replace(
        small,
        model=tiny.make({**tiny.llama_config(), "vocab_size": small.vocab_size, "head_dim": 32}),
    )


@pytest.fixture
def model(llama: LoadedModel, make: Callable[[], Any]) -> LoadedModel:
    other: Any = WithCaches(llama.model, make)
    return replace(llama, model=other, cache=probe(other))


AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])


@AHEAD
def test_requests_at_once_are_answered_as_by_the_model_alone(
    llama: LoadedModel, model: LoadedModel, make: Callable[[], Any], ahead: bool
) -> None:
    prompts = [tiny.tokens(length, seed=length) for length in (1, 5, 23, 6)]
    rig = Rig(model, caching=False, ahead=ahead, chunk=64)

    uids: list[Uid] = [rig.submit(prompt, 9) for prompt in prompts]
    rig.run()

    assert not model.cache.batches
    for uid, prompt in zip(uids, prompts, strict=True):
        assert rig.answers[uid].tokens == plain(llama.model, make, prompt, 9)


@AHEAD
def test_rows_come_and_go_and_choices_are_forked(model: LoadedModel, ahead: bool) -> None:
    prompt = tiny.tokens(20)
    alone = Rig(model, caching=False, ahead=ahead).ask(prompt, 12)
    rig = Rig(model, caching=False, ahead=ahead)

    left, first = rig.submit(tiny.tokens(9, seed=3), 40), rig.submit(prompt, 12, n=2)
    for _ in range(20):
        rig.step()
    assert 0 < len(rig.answers[left].tokens) < 40
    rig.core.cancel(left, 0.0)
    seeded = rig.submit(prompt, 12, Sampling(temperature=1.0, seed=7))
    rig.run()

    for choice in (first, Uid(first + 1)):
        assert rig.answers[choice].tokens == alone.tokens
    again = Rig(model, caching=False, ahead=ahead).ask(
        prompt, 12, Sampling(temperature=1.0, seed=7)
    )
    assert rig.answers[seeded].tokens == again.tokens
    assert rig.engine.num_rows == 0


def test_ordinary_caches_are_batched(llama: LoadedModel) -> None:
    other: Any = WithCaches(llama.model, KVCache)

    assert probe(other).batches
