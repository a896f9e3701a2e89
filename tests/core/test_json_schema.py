"""A value fits a schema when every keyword that is known says so."""

from __future__ import annotations

from typing import Any

import pytest

from omlx.core.json_schema import DEPTH_MAX, fits

NESTED: Any = {"$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}}

CASES: list[tuple[Any, list[Any], list[Any]]] = [
    ({}, [None, 1, "a", [], {}], []),
    (True, [1], []),
    (False, [], [1, None]),
    ({"type": "string"}, ["", "a"], [1, None, []]),
    ({"type": "integer"}, [0, 2.0, 10**30], [1.5, True, "1"]),
    ({"type": "number"}, [0, 1.5], [True, "1", None]),
    ({"type": "boolean"}, [True, False], [0, 1, "true"]),
    ({"type": ["string", "null"]}, ["a", None], [1]),
    ({"enum": [1, "a", None]}, [1, "a", None], [2, True, "b"]),
    ({"const": 0}, [0], [False, 1]),
    ({"minimum": 1, "maximum": 3}, [1, 3, "a"], [0, 4]),
    ({"exclusiveMinimum": 1, "exclusiveMaximum": 3}, [2], [1, 3]),
    ({"minLength": 1, "maxLength": 2}, ["a", "ab", 5], ["", "abc"]),
    ({"minItems": 1, "maxItems": 2}, [[1], [1, 2], "abc"], [[], [1, 2, 3]]),
    ({"items": {"type": "integer"}}, [[], [1], "a"], [["a"], [1, None]]),
    ({"anyOf": [{"type": "string"}, {"const": 1}]}, ["a", 1], [2]),
    ({"oneOf": [{"type": "string"}, {"const": 1}]}, ["a", 1], [2]),
    ({"allOf": [{"minimum": 1}, {"maximum": 3}]}, [2], [0, 4]),
    (
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        [{"a": 1}, {"a": 1, "b": 2}, "no object"],
        [{}, {"a": "1"}, {"b": 1}],
    ),
    ({"properties": {"a": {}}, "additionalProperties": False}, [{}, {"a": 1}], [{"b": 1}]),
    ({"additionalProperties": {"type": "integer"}}, [{"b": 1}], [{"b": "1"}]),
    (
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}},
        ["a"],
        [1],
    ),
    ({"$ref": "#/anyOf/1", "anyOf": [{"const": 1}, {"type": "string"}]}, ["a"], [1, 2]),
    ({**NESTED, "$ref": "#/$defs/list"}, [[], [[]], [[], [[]]]], [1, [[1]]]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=range(len(CASES)))
def test_a_value_fits_or_does_not(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert [fits(value, schema) for value in good] == [True] * len(good)
    assert [fits(value, schema) for value in bad] == [False] * len(bad)


def test_a_reference_that_goes_round_ends() -> None:
    assert not fits(1, {"$ref": "#"})


def test_a_value_may_be_only_so_deep() -> None:
    deep: list[Any] = []
    for _ in range(DEPTH_MAX):
        deep = [deep]

    assert not fits(deep, {**NESTED, "$ref": "#/$defs/list"})
