"""The chunks give what mlx-lm's loop over tokens gives."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as caches
from mlx_lm.models import gated_delta, kimi_linear, qwen3_5, qwen3_next

from omlx.engine import gdn_chunked
from omlx.engine.gdn_chunked import delta_rule, one_token

TOLERANCE = 1e-5

pytestmark = pytest.mark.skipif(mx.metal.is_available(), reason="mlx-lm has a kernel on Metal")


def draw(
    tokens: int,
    *,
    rows: int = 1,
    key_heads: int = 1,
    value_heads: int = 1,
    key_dim: int = 32,
    value_dim: int = 32,
    strength: float = -2.0,
    alike: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Inputs of the rule; gates near e^-e^strength, keys the more alike the higher ``alike``."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        return random.normal(size=shape)

    q = normal(rows, tokens, key_heads, key_dim)
    k = normal(rows, tokens, key_heads, key_dim) + alike * normal(1, 1, 1, key_dim)
    q = q / np.linalg.norm(q, axis=-1, keepdims=True) * key_dim**-0.5
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    arrays = {
        "q": q,
        "k": k,
        "v": normal(rows, tokens, value_heads, value_dim),
        "log_g": -np.exp(strength + normal(rows, tokens, value_heads)),
        "beta": 1 / (1 + np.exp(-normal(rows, tokens, value_heads))),
        "state": normal(rows, value_heads, value_dim, key_dim),
    }
    return {name: mx.array(array.astype(np.float32)) for name, array in arrays.items()}


def loop(log_g: mx.array, **inputs: Any) -> tuple[mx.array, mx.array]:
    return gated_delta.gated_delta_ops(g=mx.exp(log_g), **inputs)


def assert_close(
    found: mx.array, expected: mx.array, tolerance: float = TOLERANCE, least: float = 1e-30
) -> None:
    """Largest difference against the largest value, or ``least`` if that is larger."""
    assert found.shape == expected.shape
    difference = float(mx.abs(found - expected).max())
    assert difference <= tolerance * max(float(mx.abs(expected).max()), least)


def assert_same(inputs: dict[str, Any], valid: Any = None, chunk: int | None = None) -> None:
    y, state = delta_rule(**inputs, chunk=chunk)
    expected, expected_state = loop(**inputs)
    assert y.dtype == inputs["q"].dtype and state.dtype == mx.float32
    if valid is not None:
        y, expected = (mx.where(valid[..., None, None], x, 0.0) for x in (y, expected))
    # Where S and q are almost at right angles, y is what is left of larger terms, and so rounded.
    rows, queries = (mx.linalg.norm(x, axis=-1).max() for x in (expected_state, inputs["q"]))
    assert_close(y, expected, least=0.01 * float(rows * queries))
    assert_close(state, expected_state)


# ── one token ────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 1), (2, 2), (2, 6)])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 32), (128, 64), (64, 128)])
def test_one_token_is_one_step_of_the_loop(
    rows: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> None:
    inputs = draw(
        1,
        rows=rows,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    expected, expected_state = loop(**inputs)
    y, state = one_token(g=mx.exp(inputs.pop("log_g")), **inputs)
    assert_close(y, expected, 1e-6)
    assert_close(state, expected_state, 1e-6)


def test_one_token_after_another_is_the_loop() -> None:
    """Errors do not grow: each token leaves its own, and the gates forget those before."""
    inputs = draw(300, key_heads=2, value_heads=4, alike=1.0)
    expected, expected_state = loop(**inputs)
    state = inputs.pop("state")
    inputs["g"] = mx.exp(inputs.pop("log_g"))
    ys: list[mx.array] = []
    for at in range(300):
        y, state = one_token(**{name: x[:, at : at + 1] for name, x in inputs.items()}, state=state)
        ys.append(y)
    assert_close(mx.concatenate(ys, axis=1), expected, 2e-6)
    assert_close(state, expected_state, 2e-6)


def test_one_token_without_a_state_starts_from_zeros() -> None:
    inputs = draw(1, key_heads=2, value_heads=4)
    expected, expected_state = loop(**inputs | {"state": mx.zeros((1, 4, 32, 32))})
    inputs["g"], inputs["state"] = mx.exp(inputs.pop("log_g")), None
    y, state = one_token(**inputs)
    assert_close(y, expected, 1e-6)
    assert_close(state, expected_state, 1e-6)


def test_one_token_in_bfloat16_keeps_a_float32_state() -> None:
    inputs = draw(1, key_heads=2, value_heads=4)
    half = {name: inputs[name].astype(mx.bfloat16) for name in ("q", "k", "v", "beta")}
    inputs |= half
    expected, expected_state = loop(**inputs)
    y, state = one_token(g=mx.exp(inputs.pop("log_g")), **inputs)
    assert y.dtype == mx.bfloat16 and state.dtype == mx.float32
    assert_close(y.astype(mx.float32), expected.astype(mx.float32), 2**-7)
    assert_close(state, expected_state, 1e-6)


# ── against the loop ─────────────────────────────────────────────────────────
@pytest.mark.parametrize("tokens", [1, 2, 8, 15, 16, 17, 31, 32, 33, 63, 65, 97, 128, 200])
def test_any_number_of_tokens(tokens: int) -> None:
    assert_same(draw(tokens, key_heads=2, value_heads=4, seed=tokens))


@pytest.mark.parametrize(
    ("rows", "key_heads", "value_heads", "key_dim", "value_dim"),
    [
        (1, 1, 1, 16, 16),
        (2, 2, 2, 64, 32),
        (3, 1, 3, 32, 64),
        (2, 2, 6, 16, 128),
        (1, 2, 4, 128, 128),
    ],
)
def test_any_heads(
    rows: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> None:
    assert_same(
        draw(
            43,
            rows=rows,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
        )
    )


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 90),
    rows=st.integers(1, 3),
    key_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    strength=st.floats(-9, 5),
    alike=st.floats(0, 9),
    chunk=st.sampled_from([None, 16, 64, 128]),
    seed=st.integers(0, 9),
)
def test_whatever_comes(
    tokens: int,
    rows: int,
    key_heads: int,
    group: int,
    strength: float,
    alike: float,
    chunk: int | None,
    seed: int,
) -> None:
    inputs = draw(
        tokens,
        rows=rows,
        key_heads=key_heads,
        value_heads=key_heads * group,
        key_dim=16,
        value_dim=16,
        strength=strength,
        alike=alike,
        seed=seed,
    )
    assert_same(inputs, chunk=chunk)


@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
def test_any_size_of_chunk(chunk: int) -> None:
    assert_same(draw(2 * chunk, rows=2, key_heads=2, value_heads=4), chunk=chunk)


def test_no_state_means_zeros() -> None:
    inputs = draw(40)
    del inputs["state"]
    y, state = delta_rule(**inputs)
    expected, expected_state = loop(**inputs)
    assert_close(y, expected)
    assert_close(state, expected_state)


def test_segments_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn_chunked, "_CPU_SEGMENT", 1)
    monkeypatch.setattr(gdn_chunked, "_GPU_SEGMENT", 1)
    assert_same(draw(150, rows=2, key_heads=1, value_heads=2), chunk=32)


def test_bfloat16_is_computed_in_float32() -> None:
    inputs = draw(70, key_heads=2, value_heads=4)
    for name in ("q", "k", "v"):
        inputs[name] = inputs[name].astype(mx.bfloat16)
    y, state = delta_rule(**inputs)
    expected, expected_state = loop(**inputs)
    assert y.dtype == mx.bfloat16
    assert_close(y.astype(mx.float32), expected.astype(mx.float32), 2**-8)
    assert_close(state, expected_state)


# ── hard cases ───────────────────────────────────────────────────────────────
def test_one_token_repeated_loses_no_digits() -> None:
    # Every key the same and beta 1: powers of A reach 1e18.
    inputs = draw(128, strength=-12)
    inputs["k"] = mx.broadcast_to(inputs["k"][:, :1], inputs["k"].shape)
    inputs["beta"] = mx.ones_like(inputs["beta"])
    assert_same(inputs, chunk=64)
    # The most that allow_neg_eigval can ask for: nothing is ever forgotten, nor any rounding.
    inputs["beta"] = 2 * inputs["beta"]
    for found, expected in zip(delta_rule(**inputs, chunk=64), loop(**inputs), strict=True):
        assert_close(found, expected, 1e-4)


def test_gates_that_close() -> None:
    inputs = draw(100, key_heads=2, value_heads=4)
    closed: Any = np.random.default_rng(0).random(inputs["log_g"].shape) < 0.2
    inputs["log_g"] = mx.where(mx.array(closed), -mx.inf, inputs["log_g"])
    assert_same(inputs)


def test_weak_gates_after_a_strong_one() -> None:
    # Sums from the chunk's start would round the weak gates away.
    inputs = draw(64, strength=-7)
    inputs["log_g"][:, 3] = -30000.0
    assert_same(inputs, chunk=64)


def test_open_gates() -> None:
    inputs = draw(100)
    inputs["log_g"] = mx.zeros_like(inputs["log_g"])
    assert_same(inputs)


# ── masks ────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding(side: str) -> None:
    tokens = 75
    places = np.arange(tokens)[None]
    left = np.array([0, 7, 40])[:, None] if side != "right" else np.zeros((3, 1))
    right = np.array([75, 41, 66])[:, None] if side != "left" else np.full((3, 1), tokens)
    inside: Any = (places >= left) & (places < right)
    mask = mx.array(inside)
    inputs = draw(tokens, rows=3, key_heads=1, value_heads=2) | {"mask": mask}
    assert_same(inputs, valid=mask)


def test_all_masked_leaves_the_state() -> None:
    inputs = draw(50, rows=2)
    _, state = delta_rule(**inputs, mask=mx.zeros((2, 50), dtype=mx.bool_))
    assert mx.array_equal(state, inputs["state"])


# ── splits ───────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("at", [1, 8, 31, 32, 50, 99])
def test_a_split_changes_nothing(at: int) -> None:
    inputs = draw(100, rows=2, key_heads=1, value_heads=2)
    y, state = delta_rule(**inputs)
    middle = inputs.pop("state")
    ys: list[mx.array] = []
    for part in (slice(0, at), slice(at, None)):
        cut = {name: x[:, part] for name, x in inputs.items()}
        one, middle = delta_rule(**cut, state=middle)
        ys.append(one)
    assert_close(mx.concatenate(ys, axis=1), y)
    assert_close(middle, state)


# ── in the place of mlx-lm's function ────────────────────────────────────────
@pytest.fixture
def installed() -> Iterator[None]:
    gdn_chunked.install()
    yield
    gdn_chunked.uninstall()


def bound(module: ModuleType) -> Any:
    """What a model calls."""
    return module.__dict__["gated_delta_update"]


TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
}


def tiny(name: str) -> Any:
    mx.random.seed(3)
    if name == "qwen3_5":
        model: Any = qwen3_5.TextModel(
            qwen3_5.TextModelArgs.from_dict(TINY | {"model_type": "qwen3_5_text"})
        )
    else:
        more = {
            "model_type": "qwen3_next",
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [],
            "moe_intermediate_size": 32,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "norm_topk_prob": True,
        }
        model = qwen3_next.Model(qwen3_next.ModelArgs.from_dict(TINY | more))
    model.eval()
    mx.eval(model.parameters())
    return model


def run(model: Any, tokens: mx.array) -> list[mx.array]:
    """Logits of a prompt in two passes and of one decoded token, and what the layers keep."""
    cache = caches.make_prompt_cache(model)
    logits = [model(tokens[:, :70], cache=cache)]
    logits += [model(tokens[:, 70:-1], cache=cache), model(tokens[:, -1:], cache=cache)]
    kept = [layer.cache[1] for layer in cache if isinstance(layer, caches.ArraysCache)]
    mx.eval(logits, kept)
    return logits + kept


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_a_model_computes_the_same(name: str) -> None:
    model = tiny(name)
    tokens = mx.random.randint(0, 96, (2, 131))
    expected = run(model, tokens)
    gdn_chunked.install()
    try:
        found = run(model, tokens)
    finally:
        gdn_chunked.uninstall()
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 5e-5)


@pytest.mark.usefixtures("installed")
def test_update_takes_what_mlx_lm_takes() -> None:
    inputs = draw(40, key_heads=2, value_heads=4)
    q, k, v, state = (inputs[name] for name in ("q", "k", "v", "state"))
    a, b = inputs["log_g"] * 3, inputs["beta"] * 4 - 2
    A_log, dt_bias = mx.array([0.1, 0.5, 1.0, 2.5]), mx.array([0.3, -0.2, 1.0, 0.0])
    mask = mx.arange(40)[None] < 33
    cases: list[dict[str, Any]] = [
        {},
        {"allow_neg_eigval": True},
        {"lower_bound": -5.0},
        {"mask": mask},
    ]
    for more in cases:
        args = (q, k, v, a, b, A_log, dt_bias, state)
        y, found = bound(qwen3_5)(*args, **more)
        expected, expected_state = gdn_chunked._theirs(*args, **more)
        assert_close(y[:, :33], expected[:, :33])
        assert_close(found, expected_state)
    q, k, v, a, b = (x[:, :1] for x in (q, k, v, a, b))
    for more in cases[:3]:
        args = (q, k, v, a, b, A_log, dt_bias, state)
        found_pair, expected_pair = (
            bound(qwen3_5)(*args, **more),
            gdn_chunked._theirs(*args, **more),
        )
        for found, expected in zip(found_pair, expected_pair, strict=True):
            assert_close(found, expected, 1e-6)


@pytest.mark.usefixtures("installed")
def test_few_tokens_a_masked_one_and_vector_gates_stay_with_mlx_lm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("is not to be called")

    monkeypatch.setattr(gdn_chunked, "delta_rule", refuse)
    monkeypatch.setattr(gdn_chunked, "one_token", refuse)
    inputs = draw(40, key_heads=2, value_heads=2)
    q, k, v, b = (inputs[name] for name in ("q", "k", "v", "beta"))
    vector = mx.zeros((1, 40, 2, 32))
    bound(kimi_linear)(q, k, v, vector, b, mx.zeros((2, 1)), mx.zeros((2, 32)))
    few = [x[:, : gdn_chunked.LOOP_TOKENS] for x in (q, k, v, b, b)]
    bound(qwen3_5)(*few, mx.zeros(2), mx.zeros(2))
    one = [x[:, :1] for x in (q, k, v, b, b)]
    bound(qwen3_5)(*one, mx.zeros(2), mx.zeros(2), None, mx.array([[True]]))


def test_install_twice_and_uninstall() -> None:
    theirs = gated_delta.gated_delta_update
    modules = (gated_delta, qwen3_5, qwen3_next, kimi_linear)
    assert gdn_chunked.install() and gdn_chunked.install()
    assert {bound(module) for module in modules} == {gdn_chunked.update}
    gdn_chunked.uninstall()
    gdn_chunked.uninstall()
    assert {bound(module) for module in modules} == {theirs}


def test_models_imported_later_get_it() -> None:
    name = "mlx_lm.models.olmo_hybrid"
    before = sys.modules.pop(name, None)
    gdn_chunked.install()
    try:
        from mlx_lm.models import olmo_hybrid

        assert bound(olmo_hybrid) is gdn_chunked.update
    finally:
        gdn_chunked.uninstall()
        if before is not None:
            sys.modules[name] = before


def test_metal_keeps_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert not gdn_chunked.install()
    assert gated_delta.gated_delta_update is gdn_chunked._theirs
