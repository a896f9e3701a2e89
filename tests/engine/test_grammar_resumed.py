"""A row with a grammar that had to give its place up goes on within it, where it was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from omlx.core import admission
from omlx.core.grammar import Grammar, Kind, json_schema
from omlx.core.plan import Sampling, Uid
from omlx.engine.grammar import Grammars, Matcher
from omlx.engine.load import LoadedModel
from tests.engine.rig import Answer, Rig
from tests.engine.test_memory import drawn_prompt, tight

Loaded = Callable[[str], LoadedModel]

LONG = 200
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "digits": {"type": "string", "pattern": "^[0-9]{25}$"},
        "sure": {"type": "boolean"},
        "letters": {"type": "string", "pattern": "^[a-f]{15}$"},
    },
    "required": ["digits", "sure", "letters"],
    "additionalProperties": False,
}
FORM = json_schema(json.dumps(SCHEMA))
SPACES = (197, 198, 201, 220)
"""A tab, two line ends and a space, by their tokens."""

ONE_OF_TWO = Grammar(Kind.REGEX, "a{5}(b{40}|c{40})d{5}")
"""What is right in its second half depends on what was said in the first."""


@pytest.fixture
def make(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    """A rig in which rows are reckoned as short, so that they outgrow what memory there is."""
    monkeypatch.setattr(admission, "USUAL_TOKENS", 1)

    def made(name: str = "llama", **options: Any) -> Rig:
        model = loaded(name)
        eos = frozenset(model.tokenizer.eos_token_ids)
        return Rig(model, grammars=Grammars(model.tokenizer), eos=eos, **options)

    return made


Make = Callable[..., Rig]


def bound(grammar: Grammar, seed: int) -> Sampling:
    """Without white space, which some of these models would fill the memory with."""
    spaces = tuple((token, -100.0) for token in SPACES)
    return Sampling(temperature=1.0, seed=seed, grammar=grammar, logit_bias=spaces)


def said(model: LoadedModel, answer: Answer) -> str:
    assert answer.closed is not None and answer.closed.finish_reason == "stop", answer.closed
    return model.tokenizer.decode(answer.tokens, skip_special_tokens=True)


def resumed(rig: Rig) -> list[Uid]:
    """Whose row was made with a part of its answer already in its prompt."""
    admits = [admit for plan in rig.plans for admit in plan.admits]
    return [admit.uid for admit in admits if admit.sampling.drawn > 0]


@pytest.mark.parametrize("cold", [False, True], ids=["", "files"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
@AHEAD
def test_rows_that_waited_again_end_with_the_answer_they_had_begun(
    make: Make, loaded: Loaded, name: str, ahead: bool, cold: bool, tmp_path: Path
) -> None:
    """B101, K3: the schema is kept to, and what is said is what would be said with room."""
    model = loaded(name)
    prompts = [drawn_prompt(seed, 40 + seed) for seed in range(4)]
    samplings = [bound(FORM, 1), bound(ONE_OF_TWO, 2), bound(FORM, 3), bound(ONE_OF_TWO, 4)]
    alone = [
        make(name, caching=False, ahead=ahead).ask(prompt, LONG, sampling).tokens
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    files = tmp_path if cold else None
    rig = make(name, files=files, ahead=ahead, memory=tight(model, 230))

    uids = [rig.submit(p, LONG, s) for p, s in zip(prompts, samplings, strict=True)]
    rig.run()

    assert resumed(rig), "nobody waited in the middle of an answer"
    answers = [rig.answers[uid] for uid in uids]
    assert [answer.tokens for answer in answers] == alone
    for answer in (answers[0], answers[2]):
        jsonschema.validate(json.loads(said(model, answer)), SCHEMA)
    for answer in (answers[1], answers[3]):
        assert re.fullmatch(ONE_OF_TWO.text, said(model, answer))


@AHEAD
def test_choices_with_a_grammar_go_on_each_where_it_was(
    make: Make, loaded: Loaded, ahead: bool
) -> None:
    model = loaded("llama")
    rig = make(ahead=ahead, memory=tight(model, 200))

    uid = rig.submit(drawn_prompt(3, 40), LONG, bound(FORM, 11), n=3)
    rig.run()

    assert resumed(rig)
    texts = [said(model, rig.answers[Uid(uid + index)]) for index in range(3)]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) == 3


@AHEAD
def test_a_matcher_that_breaks_on_the_way_back_costs_its_row_alone(
    make: Make, loaded: Loaded, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """B32: even by a panic, which is no Exception; the others still wait, and are answered."""

    class Panic(BaseException):
        pass

    class Broken:
        def consume_token(self, token: int) -> bool:
            raise Panic("on purpose")

    follow = Matcher.follow

    def break_once(self: Matcher, tokens: Any) -> None:
        if tokens and not victims:
            victims.append(tuple(tokens))
            self._matcher = Broken()  # pyright: ignore[reportAttributeAccessIssue]
        follow(self, tokens)

    victims: list[tuple[int, ...]] = []
    monkeypatch.setattr(Matcher, "follow", break_once)
    model = loaded("llama")
    rig = make(ahead=ahead, memory=tight(model, 230))
    uids = [rig.submit(drawn_prompt(seed, 40 + seed), LONG, bound(FORM, seed)) for seed in range(4)]

    rig.run()

    assert len(victims) == 1
    failed = [uid for uid in uids if (closed := rig.answers[uid].closed) and closed.error]
    assert len(failed) == 1
    (lost,) = [rig.answers[uid] for uid in failed]
    assert tuple(lost.tokens) == victims[0], "those that it had been told"
    assert lost.closed is not None and lost.closed.finish_reason is None
    assert lost.closed.error == "the grammar can't be followed: on purpose"
    for uid in set(uids) - set(failed):
        jsonschema.validate(json.loads(said(model, rig.answers[uid])), SCHEMA)
