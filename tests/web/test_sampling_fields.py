"""One check of what says how to generate: the same values are refused on every route, by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from omlx.core.chat import GenerationRequest
from omlx.core.plan import Sampling
from omlx.web.errors import ApiError
from tests.web.test_malformed import asked_of

USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
    "/v1/responses": {"input": "hi"},
}
LIMITS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
OUT_OF_RANGE = {
    "temperature": ["-1", "2.1"],
    "top_p": ["-0.1", "0", "1.1"],
    "top_k": ["-1", "1.5"],
    "min_p": ["-0.1", "1.1"],
    "presence_penalty": ["-2.1", "2.1"],
    "frequency_penalty": ["-2.1", "2.1"],
    "repetition_penalty": ["0", "10.1"],
    "seed": ["1.5", "9223372036854775808"],
    "n": ["0", "-1", "1.5", "129"],
    "limit": ["-1", "1.5"],
}
NO_NUMBER = ["NaN", "Infinity", "-Infinity", "1e400", '"1"', "true", "[]", "{}"]
OTHERS = {
    "model": ["7", "[]"],
    "stream": ["1", '"yes"'],
    "cache_salt": ["5", "{}"],
    "logit_bias": ["[]", '{"foo": 1}', '{"300": 1}', '{"5": 101}', '{"5": "1"}', '{"-1": 1}'],
}
CASES = [
    *[(field, bad) for field, values in OUT_OF_RANGE.items() for bad in [*values, *NO_NUMBER]],
    *[(field, bad) for field, values in OTHERS.items() for bad in values],
]

path = pytest.mark.parametrize("path", BODIES)


def body(path: str, fields: str) -> bytes:
    return (json.dumps(BODIES[path])[:-1] + f", {fields}}}").encode()


def asked(path: str, **fields: Any) -> GenerationRequest:
    (one,) = asked_of(path, json.dumps({**BODIES[path], **fields}).encode())
    return one


@path
@pytest.mark.parametrize(("field", "value"), CASES)
def test_a_value_that_is_none_or_out_of_range_is_refused_by_its_name(
    path: str, field: str, value: str
) -> None:
    """B77, B88."""
    name = LIMITS[path] if field == "limit" else field

    with pytest.raises(ApiError) as refused:
        asked_of(path, body(path, f'"{name}": {value}'))

    assert refused.value.status == 400
    assert refused.value.param == name
    json.dumps(refused.value.body(), allow_nan=False).encode()
    json.dumps(refused.value.anthropic_body("r"), allow_nan=False).encode()


NULLABLE = [
    (path, LIMITS[path] if field == "limit" else field)
    for path in BODIES
    for field in (*OUT_OF_RANGE, *OTHERS)
]
NULLABLE.remove(("/v1/messages", "max_tokens"))  # required there


@pytest.mark.parametrize(("path", "field"), NULLABLE)
def test_null_is_as_good_as_absent(path: str, field: str) -> None:
    assert asked(path, **{field: None}) == asked(path)


@path
def test_absent_fields_mean_what_they_mean_at_openai(path: str) -> None:
    found = asked(path)

    assert found.sampling == Sampling(temperature=1.0)
    assert (found.n, found.salt, found.stops) == (1, "", ())


@path
def test_every_field_reaches_the_sampler(path: str) -> None:
    found = asked(
        path, temperature=0.5, top_p=0.6, top_k=7, min_p=0.1, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.5, logit_bias={"5": -100, "foo": 0}, seed=-3,
        cache_salt="s", n=1.0, **{LIMITS[path]: 4.0},
    )  # fmt: skip

    assert found.sampling == Sampling(0.5, 0.6, 7, 0.1, 1.5, 1.0, -1.0, ((5, -100.0),), -3)
    assert (found.salt, found.max_tokens) == ("s", 4)


@path
def test_no_tokens_at_all_is_a_number_of_tokens(path: str) -> None:
    assert asked(path, **{LIMITS[path]: 0}).max_tokens == 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_where_there_is_one_choice_two_are_refused(path: str) -> None:
    """B88: not answered with one."""
    with pytest.raises(ApiError) as refused:
        asked(path, n=2)

    assert (refused.value.param, refused.value.code) == ("n", "unsupported_value")
