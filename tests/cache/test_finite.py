"""An infinity or a NaN is found wherever it is, and nothing else is taken for one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from omlx.cache.finite import all_finite, all_finite_bits

pytestmark = pytest.mark.filterwarnings("error")

FLOAT_MAX = float(np.finfo(np.float32).max)
WORDS = hnp.arrays(np.uint16, st.integers(0, 20), elements=st.integers(0, 0xFFFF))


@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=3), elements=st.floats(width=32)))
def test_any_values_are_judged_as_one_by_one(values: np.ndarray) -> None:
    assert all_finite(values) == all(np.isfinite(value) for value in values.flat)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 1, 77_777, 99_999])
def test_one_value_among_many_is_found(value: float, at: int) -> None:
    values = np.ones(100_000, np.float32)
    assert all_finite(values)

    values[at] = value

    assert not all_finite(values)


def test_infinities_that_cancel_out_are_found() -> None:
    assert not all_finite(np.array([np.inf, -np.inf, 1.0], np.float32))


def test_values_whose_sum_overflows_are_finite() -> None:
    assert all_finite(np.full(1000, FLOAT_MAX, np.float32))


@given(WORDS)
def test_float16_is_judged_by_its_bits(bits: np.ndarray) -> None:
    assert all_finite_bits("float16", bits) == bool(np.isfinite(bits.view(np.float16)).all())


@given(WORDS)
def test_bfloat16_is_judged_as_the_float32_that_it_begins(bits: np.ndarray) -> None:
    values = (bits.astype(np.uint32) << 16).view(np.float32)

    assert all_finite_bits("bfloat16", bits) == bool(np.isfinite(values).all())
