"""A preview continues from the states it is given, and touches nothing else."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from omlx.cache.block_file import HostTensor
from omlx.core.plan import HostBlock
from omlx.core.preview import Begin, Compute, End, Export, Score
from omlx.engine.kv import BlockStore
from omlx.engine.load import LoadedModel
from omlx.engine.state_preview import CHUNK_TOKENS, StatePreview
from tests import tiny

PROMPT = tiny.tokens(2 * CHUNK_TOKENS + 9)
FOLLOW = tiny.tokens(7, seed=1)


@pytest.fixture(params=["qwen3_5", "qwen3_next"])
def model(request: pytest.FixtureRequest, loaded: Callable[[str], LoadedModel]) -> LoadedModel:
    return loaded(request.param)


def begun(model: LoadedModel) -> StatePreview:
    preview = StatePreview(model.model, model.cache, BlockStore(model.cache, host_copies=True))
    preview.run(Begin(PROMPT, FOLLOW))
    chunks = 1
    while preview.run(Compute()):
        chunks += 1
    assert chunks == 3, "a running stream waits for a chunk, not for the prompt"
    return preview


def scores(preview: StatePreview, states: HostBlock | None = None) -> np.ndarray:
    found = preview.run(Score(states))
    assert isinstance(found, HostTensor)
    return np.frombuffer(found.data, np.float32).reshape(found.shape)


def exported(preview: StatePreview) -> HostBlock:
    states = preview.run(Export())
    assert isinstance(states, tuple)
    return states


def test_scores_are_those_of_the_model_itself(model: LoadedModel) -> None:
    logits = model.model(mx.array([PROMPT + FOLLOW]))[0, -len(FOLLOW) :].astype(mx.float32)
    wanted = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))

    np.testing.assert_allclose(scores(begun(model)), wanted, atol=1e-3)


def test_the_exact_states_give_the_same_bits_again_and_again(model: LoadedModel) -> None:
    preview = begun(model)
    first = scores(preview)

    assert np.array_equal(scores(preview, exported(preview)), first)
    assert np.array_equal(scores(preview), first)


def test_other_states_give_other_scores_and_are_not_kept(model: LoadedModel) -> None:
    preview = begun(model)
    first = scores(preview)
    nothing = tuple(
        HostTensor(t.name, t.dtype, t.shape, memoryview(bytes(t.nbytes))) for t in exported(preview)
    )

    assert np.abs(scores(preview, nothing) - first).max() > 1e-3
    assert np.array_equal(scores(preview), first)


def test_what_has_ended_keeps_nothing(model: LoadedModel) -> None:
    preview = begun(model)

    preview.run(End())
    preview.run(End())

    assert preview._caches == []
