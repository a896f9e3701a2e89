"""A size means the same however it is written, and a doubtful one is refused."""

from __future__ import annotations

from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pydantic import TypeAdapter, ValidationError

from omlx.sizes import Size

UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
units = st.sampled_from(sorted(UNITS))
wholes = st.integers(0, 2**20)
any_case = st.sampled_from([str.lower, str.upper, str.title, str])
adapter = TypeAdapter(Size)


@given(wholes, units, any_case, st.sampled_from(["", " "]))
def test_units_are_read_in_any_case_with_or_without_a_space(number, unit, case, space) -> None:
    assert Size.parse(f"{number}{space}{case(unit)}").resolve(0) == number * UNITS[unit]


@given(st.decimals(1, 10**6, places=3), units)
def test_decimals_are_exact_to_the_byte(number, unit) -> None:
    assert Size.parse(f"{number}{unit}").resolve(0) == int(Fraction(number) * UNITS[unit])


@given(st.integers(0, 2**63 - 1))
def test_a_bare_number_is_bytes(number: int) -> None:
    assert Size.parse(number).resolve(1) == Size.parse(str(number)).resolve(1) == number


@given(st.decimals(0, 100, places=2), st.integers(0, 2**50))
def test_a_share_is_taken_of_the_total_and_never_exceeds_it(share, total: int) -> None:
    assert Size.parse(f"{share}%").resolve(total) == int(Fraction(share) * total / 100) <= total


@given(st.decimals(1, 100, places=3), st.sampled_from([*UNITS, "%"]))
def test_the_text_of_a_size_reads_back_as_the_same_size(number, unit) -> None:
    size = Size.parse(f"{number}{unit}")

    assert Size.parse(str(size)) == size
    assert adapter.validate_json(adapter.dump_json(size)) == size


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("100 gb", "100GB"),
        ("007kib", "7KiB"),
        ("1.50 GiB", "1.5GiB"),
        (".5mb", "0.5MB"),
        ("1.", "1B"),
        ("20 %", "20%"),
        (0, "0B"),
        (" 64MB\n", "64MB"),
        (512.0, "512B"),
    ],
)
def test_text_is_shown_in_one_spelling(written: object, shown: str) -> None:
    assert str(Size.parse(written)) == shown


def test_equal_sizes_are_equal_however_written() -> None:
    assert Size.parse("1GB") == Size.parse("1000MB")
    assert hash(Size.parse("1GB")) == hash(Size.parse("1000MB"))
    assert Size.parse("20%") != Size.parse("20")


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("", "must not be empty"),
        ("  ", "must not be empty"),
        ("-1GB", "must not be negative"),
        (-1, "must not be negative"),
        ("-0", "must not be negative"),
        ("100.1%", "must not exceed 100%"),
        ("5XB", "unit XB is not known"),
        ("5G", "unit G is not known"),
        ("1e9", "no size"),
        ("1_000", "no size"),
        ("1,5GB", "no size"),
        ("+1", "no size"),
        ("5  GB", "no size"),
        ("٥GB", "no size"),
        ("GB", "no size"),
        ("inf", "no size"),
        ("9" * 5000, "no size"),
        (2**63, "below 8 EiB"),
        ("8388608TiB", "below 8 EiB"),
        ("0.1B", "at least one byte"),
        (True, "no sizes"),
        (1.5, "no size"),
        (float("nan"), "no size"),
        (None, "no size"),
        ([], "no size"),
    ],
)
def test_what_is_no_size_is_refused_with_a_reason(written: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Size.parse(written)
    with pytest.raises(ValidationError, match=reason):
        adapter.validate_python(written)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        size = Size.parse(text)
    except ValueError:
        return
    assert Size.parse(str(size)) == size


def test_the_json_schema_says_text() -> None:
    assert adapter.json_schema()["type"] == "string"
