"""The faster forms give the bits that MLX's own give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from omlx.engine import cpu_ops
from omlx.engine.cpu_ops import DepthwiseConv1d, rms_norm

pytestmark = pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu), reason="for MLX on CPU, where nothing is fused"
)


def draw(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def assert_equal(found: mx.array, expected: mx.array) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert mx.array_equal(found, expected)


@pytest.fixture
def installed() -> Iterator[None]:
    yield
    cpu_ops.uninstall()


# ── rms_norm ─────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("shape", [(1, 1, 320), (4, 1, 576), (1, 1, 2, 128), (3, 5), (1, 64, 320)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e6])
def test_rms_norm_is_bit_equal(shape: tuple[int, ...], weighted: bool, scale: float) -> None:
    x = draw(*shape) * scale
    weight = draw(shape[-1], seed=1) if weighted else None
    assert_equal(rms_norm(x, weight, 1e-6), cpu_ops._theirs(x, weight, 1e-6))


def test_rms_norm_of_a_view_is_bit_equal() -> None:
    """The heads of q, k and v are cut out of one array."""
    x = draw(3, 1, 6, 64)[:, :, 2:4]
    assert_equal(rms_norm(x, None, 1e-6), cpu_ops._theirs(x, None, 1e-6))


def test_zeros_are_normalised_to_zeros() -> None:
    assert_equal(rms_norm(mx.zeros((1, 8)), None, 1e-6), mx.zeros((1, 8)))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (draw(cpu_ops.SMALL // 64 + 1, 64), draw(64)),
        (draw(2, 64).astype(mx.bfloat16), draw(64).astype(mx.bfloat16)),
        (draw(2, 64), draw(64).astype(mx.bfloat16)),
    ],
    ids=["many values", "half precision", "mixed"],
)
def test_what_is_not_small_and_float32_is_left_to_mlx(
    x: mx.array, weight: mx.array, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def theirs(x: mx.array, *_: Any, **__: Any) -> mx.array:
        seen.append(x.shape)
        return x

    monkeypatch.setattr(cpu_ops, "_theirs", theirs)
    rms_norm(x, weight, 1e-6)
    assert seen == [x.shape]


@pytest.mark.usefixtures("installed")
def test_modules_call_the_faster_form_until_it_is_taken_out() -> None:
    norm = nn.RMSNorm(64)
    x = draw(2, 64)
    cpu_ops.uninstall()  # in case that a model was loaded before
    before = norm(x)
    cpu_ops.install(norm)
    assert mx.fast.rms_norm is rms_norm
    assert_equal(norm(x), before)
    cpu_ops.uninstall()
    assert mx.fast.rms_norm is cpu_ops._theirs


# ── the convolution ──────────────────────────────────────────────────────────
class Layer(nn.Module):
    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, **options)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 7, 130])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_the_convolution_is_bit_equal(rows: int, tokens: int, taps: int, bias: bool) -> None:
    layer = Layer(48, kernel_size=taps, groups=48, bias=bias)
    layer.conv.weight = draw(48, taps, 1, seed=1)
    if bias:
        layer.conv.bias = draw(48, seed=2)
    x = draw(rows, tokens + taps - 1, 48)
    expected = layer.conv(x)
    cpu_ops.install(layer)
    assert type(layer.conv) is DepthwiseConv1d
    assert_equal(layer.conv(x), expected)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 4},
        {"kernel_size": 4, "groups": 24},
        {"kernel_size": 4, "groups": 48, "padding": 3},
        {"kernel_size": 4, "groups": 48, "stride": 2},
        {"kernel_size": 4, "groups": 48, "dilation": 2},
        {"kernel_size": 31, "groups": 48},
    ],
    ids=["dense", "grouped", "padded", "strided", "dilated", "long"],
)
def test_other_convolutions_stay_as_they_are(options: dict[str, Any]) -> None:
    layer = Layer(48, **options)
    cpu_ops.install(layer)
    assert type(layer.conv) is nn.Conv1d


@pytest.mark.usefixtures("installed")
def test_a_half_precision_convolution_stays_as_it_is() -> None:
    """A sum of products rounded to 16 bits is not what MLX computes."""
    layer = Layer(48, kernel_size=4, groups=48)
    layer.set_dtype(mx.bfloat16)
    cpu_ops.install(layer)
    assert type(layer.conv) is nn.Conv1d
