"""The CUDA kernel gives what mlx-lm's loop over tokens gives."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta

from omlx.engine import gdn_kernel

TOLERANCE = 2e-6

on_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="a CUDA kernel")


def draw(
    tokens: int, rows: int = 1, heads: tuple[int, int] = (1, 1), dims: tuple[int, int] = (128, 128)
) -> dict[str, Any]:
    random = np.random.default_rng(tokens)
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    k = random.normal(size=(rows, tokens, key_heads, key_dim))
    arrays = {
        "q": random.normal(size=k.shape) * key_dim**-0.5,
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": random.normal(size=(rows, tokens, value_heads, value_dim)),
        "g": np.exp(-np.exp(random.normal(size=(rows, tokens, value_heads)) - 2)),
        "beta": 1 / (1 + np.exp(-random.normal(size=(rows, tokens, value_heads)))),
        "state": random.normal(size=(rows, value_heads, value_dim, key_dim)),
    }
    return {name: mx.array(array.astype(np.float32)) for name, array in arrays.items()}


def error(found: mx.array, expected: mx.array) -> float:
    """Largest difference over largest value."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    return float(mx.abs(found - expected).max() / mx.abs(expected).max())


def assert_same(inputs: dict[str, Any], y_tolerance: float = TOLERANCE) -> None:
    y, state = gdn_kernel.delta_rule(**inputs)
    expected, expected_state = gated_delta.gated_delta_ops(**inputs)
    assert error(y, expected) <= y_tolerance
    assert error(state, expected_state) <= TOLERANCE


def test_it_is_for_cuda_and_for_whole_blocks_of_rows() -> None:
    one = mx.zeros((1, 1, 1, 128))
    assert gdn_kernel.fits(one, one) == mx.cuda.is_available()
    assert not gdn_kernel.fits(one[..., :48], one)
    assert not gdn_kernel.fits(one, one[..., :24])


@on_cuda
@pytest.mark.parametrize("tokens", [1, 2, 16, 31, 32, 33, 64, 65, 200, 1000])
def test_any_number_of_tokens(tokens: int) -> None:
    assert_same(draw(tokens, heads=(2, 4)))


@on_cuda
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 6)])
@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 64), (192, 128), (256, 256)])
def test_any_heads(rows: int, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    inputs = draw(43, rows, heads, dims)
    assert gdn_kernel.fits(inputs["q"], inputs["v"])
    assert_same(inputs)


@on_cuda
def test_bfloat16_is_computed_in_float32() -> None:
    inputs = draw(100, 2, (2, 4))
    for name in ("q", "k", "v"):
        inputs[name] = inputs[name].astype(mx.bfloat16)
    assert_same(inputs, y_tolerance=2**-8)
    inputs["v"] = inputs["v"].astype(mx.float32)
    assert_same(inputs, y_tolerance=2**-8)


@on_cuda
def test_gates_that_close_and_gates_that_are_open() -> None:
    inputs = draw(100, heads=(1, 2))
    inputs["g"][:, 10:20] = 0.0
    inputs["g"][:, 50:60] = 1.0
    assert_same(inputs)


@on_cuda
def test_a_masked_token_leaves_the_state() -> None:
    mask = mx.arange(75)[None] < mx.array([75, 41, 0])[:, None]
    inputs = draw(75, 3, (1, 2))
    y, state = gdn_kernel.delta_rule(**inputs, mask=mask)
    expected, expected_state = gated_delta.gated_delta_ops(**inputs, mask=mask)
    counts = mask[..., None, None]
    assert error(mx.where(counts, y, 0.0), mx.where(counts, expected, 0.0)) <= TOLERANCE
    assert error(state, expected_state) <= TOLERANCE
    assert mx.array_equal(state[2], inputs["state"][2])


@on_cuda
@pytest.mark.parametrize("at", [1, 31, 32, 77, 99])
def test_a_cut_changes_no_bit(at: int) -> None:
    inputs = draw(100, 2, (1, 2))
    y, state = gdn_kernel.delta_rule(**inputs)
    middle = inputs.pop("state")
    ys: list[mx.array] = []
    for part in (slice(0, at), slice(at, None)):
        cut = {name: x[:, part] for name, x in inputs.items()}
        one, middle = gdn_kernel.delta_rule(**cut, state=middle)
        ys.append(one)
    assert mx.array_equal(mx.concatenate(ys, axis=1), y)
    assert mx.array_equal(middle, state)


@on_cuda
def test_no_state_means_zeros() -> None:
    inputs = draw(40)
    inputs["state"] = None
    y, state = gdn_kernel.delta_rule(**inputs)
    inputs["state"] = mx.zeros(state.shape)
    expected, expected_state = gdn_kernel.delta_rule(**inputs)
    assert mx.array_equal(y, expected) and mx.array_equal(state, expected_state)
