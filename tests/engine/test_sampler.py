"""What each sampling parameter does to a distribution, on logits made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import Sampler

from omlx.core.plan import GREEDY, Sampling
from omlx.engine.sampler import processors_for, sampler_for

PROBABILITIES = (0.5, 0.25, 0.15, 0.06, 0.04)
DRAWS = 20_000


def logprobs(probabilities: Sequence[float] = PROBABILITIES, rows: int = 1) -> mx.array:
    return mx.log(mx.array([list(probabilities)] * rows))


def shares(sampling: Sampling) -> list[float]:
    """How often each token is drawn, of DRAWS rows in one call."""
    mx.random.seed(5)
    drawn = np.array(sampler_for(sampling)(logprobs(rows=DRAWS)))
    counts = np.bincount(drawn, minlength=len(PROBABILITIES))
    return (counts / DRAWS).tolist()


def renormalised(kept: int, temperature: float = 1.0) -> list[float]:
    powers = [p ** (1 / temperature) for p in PROBABILITIES[:kept]]
    total = sum(powers)
    return [p / total for p in powers] + [0.0] * (len(PROBABILITIES) - kept)


def processed(
    sampling: Sampling, context: Sequence[int], logits: Sequence[float] = (1.0, -1.0, 2.0, 0.5)
) -> list[float]:
    row = mx.array([list(logits)])
    for processor in processors_for(sampling):
        row = processor(mx.array(list(context), dtype=mx.int32), row)
    return np.array(row[0]).tolist()


# ── which token ──────────────────────────────────────────────────────────────────────────────


def test_temperature_zero_takes_the_likeliest() -> None:
    assert np.array(sampler_for(GREEDY)(logprobs(rows=3))).tolist() == [0, 0, 0]


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), renormalised(5)),
        (Sampling(temperature=0.5), renormalised(5, 0.5)),
        (Sampling(temperature=2.0), renormalised(5, 2.0)),
        (Sampling(temperature=1.0, top_k=1), renormalised(1)),
        (Sampling(temperature=1.0, top_k=3), renormalised(3)),
        (Sampling(temperature=1.0, top_p=0.6), renormalised(2)),
        (Sampling(temperature=1.0, top_p=0.4), renormalised(1)),
        (Sampling(temperature=1.0, min_p=0.2), renormalised(3)),
        (Sampling(temperature=1.0, min_p=1.0), renormalised(1)),
        (Sampling(temperature=1.0, top_p=0.8, min_p=0.4, top_k=4), renormalised(2)),
    ],
)
def test_tokens_are_drawn_as_often_as_the_parameters_say(
    sampling: Sampling, expected: list[float], seed: int | None
) -> None:
    found = shares(replace(sampling, seed=seed))

    assert found == pytest.approx(expected, abs=0.015)
    assert [share == 0 for share in found] == [share == 0 for share in expected]


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 1e-310, 5e-324])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_smallest_temperatures_take_the_likeliest(temperature: float, seed: int | None) -> None:
    """B77: 1 / temperature must not overflow into a distribution of nothing."""
    sampler = sampler_for(Sampling(temperature=temperature, seed=seed))
    reversed_order = logprobs(PROBABILITIES[::-1], rows=4)

    assert np.array(sampler(reversed_order)).tolist() == [4, 4, 4, 4]


def test_a_token_that_is_ruled_out_is_never_drawn() -> None:
    barred = mx.array([[-math.inf, 0.0, -math.inf]] * 100)

    drawn = np.array(sampler_for(Sampling(temperature=2.0))(barred))

    assert set(drawn.tolist()) == {1}


# ── seeds ────────────────────────────────────────────────────────────────────────────────────


def draw(sampler: Sampler) -> int:
    return int(np.array(sampler(logprobs()))[0])


def sequence(sampling: Sampling, count: int = 40) -> list[int]:
    sampler = sampler_for(sampling)
    return [draw(sampler) for _ in range(count)]


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63 - 1, -9007199254740991])
def test_a_seed_gives_the_same_tokens_each_time(seed: int) -> None:
    sampling = Sampling(temperature=1.0, seed=seed)

    assert sequence(sampling) == sequence(sampling)


def test_other_seeds_give_other_tokens() -> None:
    drawn = {tuple(sequence(Sampling(temperature=1.0, seed=seed))) for seed in (0, 1, 2, -1, -2)}

    assert len(drawn) == 5


def test_a_seeded_row_is_not_moved_by_what_others_draw() -> None:
    seeded, other = Sampling(temperature=1.0, seed=4), Sampling(temperature=1.0)
    expected = sequence(seeded)
    sampler, disturbing = sampler_for(seeded), sampler_for(other)

    found = []
    for _ in expected:
        disturbing(logprobs(rows=3))
        found.append(draw(sampler))

    assert found == expected


def test_rows_with_equal_parameters_share_a_sampler_unless_they_are_seeded() -> None:
    equal = Sampling(temperature=0.7, top_p=0.9), Sampling(temperature=0.7, top_p=0.9)
    seeded = Sampling(temperature=0.7, seed=1), Sampling(temperature=0.7, seed=1)

    assert sampler_for(equal[0]) is sampler_for(equal[1])
    assert sampler_for(GREEDY) is sampler_for(Sampling(top_p=0.5))
    assert sampler_for(seeded[0]) is not sampler_for(seeded[1])


# ── penalties and biases ─────────────────────────────────────────────────────────────────────


def test_a_row_without_penalties_has_nothing_to_do() -> None:
    assert processors_for(GREEDY) == []
    assert processors_for(Sampling(temperature=1.0, top_p=0.5, seed=1, top_logprobs=5)) == []


def test_a_bias_is_added_to_its_token() -> None:
    sampling = Sampling(logit_bias=((1, 2.5), (3, -100.0)))

    assert processed(sampling, [0]) == pytest.approx([1.0, 1.5, 2.0, -99.5])


def test_a_presence_penalty_counts_each_token_once() -> None:
    found = processed(Sampling(presence_penalty=0.5), [0, 0, 0, 1])

    assert found == pytest.approx([0.5, -1.5, 2.0, 0.5])


def test_a_frequency_penalty_counts_each_time() -> None:
    found = processed(Sampling(frequency_penalty=0.5), [0, 0, 0, 1])

    assert found == pytest.approx([-0.5, -1.5, 2.0, 0.5])


def test_a_negative_penalty_rewards() -> None:
    found = processed(Sampling(presence_penalty=-0.5, frequency_penalty=-0.25), [2, 2])

    assert found == pytest.approx([1.0, -1.0, 3.0, 0.5])


def test_a_repetition_penalty_lowers_a_logit_whatever_its_sign() -> None:
    found = processed(Sampling(repetition_penalty=2.0), [0, 1, 1])

    assert found == pytest.approx([0.5, -2.0, 2.0, 0.5])


def test_a_repetition_penalty_below_one_raises_it() -> None:
    found = processed(Sampling(repetition_penalty=0.5), [0, 1])

    assert found == pytest.approx([2.0, -0.5, 2.0, 0.5])


def test_penalties_look_at_more_than_the_last_tokens() -> None:
    context = [3] + [0] * 5000

    assert processed(Sampling(presence_penalty=1.0), context)[3] == pytest.approx(-0.5)
