"""Choices of one request: forked rows answer as rows that computed the prompt themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from omlx.core.plan import GREEDY, Sampling, Uid
from omlx.engine.load import LoadedModel
from tests import tiny
from tests.engine.rig import Answer, Rig, greatest_difference

Loaded = Callable[[str], LoadedModel]

NEAR = 1e-3
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
SEEDED = Sampling(temperature=1.0, seed=40)


def choices(rig: Rig, prompt: tuple[int, ...], sampling: Sampling, n: int = 3) -> list[Answer]:
    uid = rig.submit(prompt, 12, sampling, n=n)
    rig.run()
    return [rig.answers[Uid(uid + index)] for index in range(n)]


def alone(model: LoadedModel, prompt: tuple[int, ...], sampling: Sampling) -> Answer:
    """The oracle: nothing cached, nobody else."""
    return Rig(model, caching=False).ask(prompt, 12, sampling)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("length", [1, 2, 33, 70])
@AHEAD
def test_greedy_choices_equal_a_request_alone(
    loaded: Loaded, name: str, length: int, ahead: bool
) -> None:
    model, prompt = loaded(name), tiny.tokens(length, seed=length)
    wanted = alone(model, prompt, GREEDY)
    rig = Rig(model, ahead=ahead)

    for _ in ("cold", "warm"):
        for answer in choices(rig, prompt, GREEDY):
            assert answer.tokens == wanted.tokens
            assert greatest_difference(answer, wanted) <= NEAR


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@AHEAD
def test_seeded_choices_equal_requests_with_the_next_seeds(
    loaded: Loaded, name: str, ahead: bool
) -> None:
    model, prompt = loaded(name), tiny.tokens(50, seed=5)

    answers = choices(Rig(model, ahead=ahead), prompt, SEEDED)

    for index, answer in enumerate(answers):
        wanted = alone(model, prompt, replace(SEEDED, seed=40 + index))
        assert answer.tokens == wanted.tokens
        assert greatest_difference(answer, wanted) <= NEAR
    assert len({tuple(answer.tokens) for answer in answers}) == 3, "choices differ"


def test_one_prefill_serves_all(loaded: Loaded) -> None:
    rig = Rig(loaded("llama"))
    prompt = tiny.tokens(70)

    choices(rig, prompt, SEEDED)

    prefilled = [prefill for plan in rig.plans for prefill in plan.prefills]
    assert len({prefill.uid for prefill in prefilled}) == 1
    assert max(prefill.stop for prefill in prefilled) == len(prompt) - 1


def test_what_each_choice_said_can_be_continued_from_the_cache(loaded: Loaded) -> None:
    rig = Rig(loaded("llama"))
    prompt = tiny.tokens(50, seed=5)

    answers = choices(rig, prompt, SEEDED)

    for answer in answers:
        turn = (*prompt, *answer.tokens, 5)
        continued = rig.ask(turn)
        assert continued.cached >= len(turn) - 2, "all that was fed"
        wanted = Rig(loaded("llama"), caching=False).ask(turn)
        assert continued.tokens == wanted.tokens
        assert greatest_difference(continued, wanted) <= NEAR
