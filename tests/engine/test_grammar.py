"""Rows with a grammar, by a real model with random weights: it would say anything, and doesn't."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from omlx.core.events import Closed
from omlx.core.grammar import (
    Grammar,
    Kind,
    after_thought,
    json_object,
    json_schema,
    or_calls,
    surrounded,
)
from omlx.core.plan import GREEDY, Sampling, Uid
from omlx.engine.grammar import GrammarFailed, Grammars, Matcher
from omlx.engine.load import LoadedModel
from tests import tiny
from tests.engine.rig import Answer, Rig, greatest_difference

Loaded = Callable[[str], LoadedModel]

NEAR = 1e-3
LONG = 600
"""Tokens. What a random model says within these schemas is shorter."""
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
PROMPT = tiny.tokens(20)


def closed_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


WORD = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": closed_object(name=WORD, count={"type": "integer"}),
    "nested": closed_object(inner=closed_object(ok={"type": "boolean"}), n={"type": "null"}),
    "list": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    "unicode": closed_object(wörd={"enum": ["größe", "漢字", "😀\u200d", 'a"\\\n\x7f']}),
    "pattern": closed_object(id={"type": "string", "pattern": "^[a-f]{2}-[0-9]{3}$"}),
    "range": closed_object(n={"type": "integer", "minimum": 7, "maximum": 12}),
    "either": {"anyOf": [closed_object(a={"const": 1}), closed_object(b={"type": "boolean"})]},
    "reference": {
        "$defs": {"leaf": {"type": "boolean"}},
        **closed_object(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
    },
}
SHORT = json_schema(json.dumps(closed_object(ok={"type": "boolean"})))


@pytest.fixture(scope="module")
def model(loaded: Loaded) -> LoadedModel:
    return loaded("llama")


@pytest.fixture(scope="module")
def grammars(model: LoadedModel) -> Grammars:
    return Grammars(model.tokenizer)


@pytest.fixture
def make(model: LoadedModel, grammars: Grammars) -> Callable[..., Rig]:
    """A rig that ends answers at the model's end token."""
    eos = frozenset(model.tokenizer.eos_token_ids)

    def made(of: LoadedModel = model, **options: Any) -> Rig:
        return Rig(of, grammars=grammars, eos=eos, **options)

    return made


Make = Callable[..., Rig]


def drawn(grammar: Grammar | None, seed: int | None = 1) -> Sampling:
    return Sampling(temperature=1.0, seed=seed, grammar=grammar)


def text(model: LoadedModel, answer: Answer) -> str:
    """Without the end token."""
    return model.tokenizer.decode(answer.tokens, skip_special_tokens=True)


def spelled(model: LoadedModel, answer: Answer) -> str:
    return model.tokenizer.decode(answer.tokens)


def ended(answer: Answer) -> Closed:
    assert answer.closed is not None, "it has not ended"
    return answer.closed


# ── what is said ─────────────────────────────────────────────────────────────────────────────


@AHEAD
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_satisfies_its_schema(
    make: Make, model: LoadedModel, name: str, ahead: bool
) -> None:
    grammar = json_schema(json.dumps(SCHEMAS[name]))
    rig = make(ahead=ahead)
    uids = [rig.submit(PROMPT, LONG, drawn(grammar, seed)) for seed in range(6)]

    rig.run()

    answers = [rig.answers[uid] for uid in uids]
    for answer in answers:
        assert ended(answer).finish_reason == "stop"
        jsonschema.validate(json.loads(text(model, answer)), SCHEMAS[name])
    assert len({tuple(answer.tokens) for answer in answers}) > 1, "the model chooses"


def test_properties_come_in_the_order_of_the_schema(make: Make, model: LoadedModel) -> None:
    schema = closed_object(z={"const": 1}, a={"const": 2}, m={"const": 3})

    answer = make().ask(PROMPT, LONG, drawn(json_schema(json.dumps(schema))))

    assert list(json.loads(text(model, answer))) == ["z", "a", "m"]


@AHEAD
def test_any_object_is_an_object(make: Make, model: LoadedModel, ahead: bool) -> None:
    for seed in range(4):
        hurried = replace(drawn(json_object(), seed), logit_bias=((id_of(model, "}"), 4.0),))
        answer = make(ahead=ahead).ask(PROMPT, LONG, hurried)
        assert ended(answer).finish_reason == "stop"
        assert isinstance(json.loads(text(model, answer)), dict)


@AHEAD
@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (Grammar(Kind.REGEX, r"[0-9]{2}/[a-z]{3}"), r"[0-9]{2}/[a-z]{3}"),
        (Grammar(Kind.CHOICE, '["yes", "no", "ma\\"y/be"]'), r'yes|no|ma"y/be'),
        (Grammar(Kind.GRAMMAR, 'start: A "-" A\nA: /[xy]{2}/'), r"[xy]{2}-[xy]{2}"),
        (Grammar(Kind.GRAMMAR, 'root ::= "a" [0-9] tail\ntail ::= "!" | "?"'), r"a[0-9][!?]"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_other_kinds_are_kept_to_as_well(
    make: Make, model: LoadedModel, grammar: Grammar, expected: str, ahead: bool
) -> None:
    for seed in range(4):
        answer = make(ahead=ahead).ask(PROMPT, LONG, drawn(grammar, seed))
        assert re.fullmatch(expected, text(model, answer))
        assert ended(answer).finish_reason == "stop"


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "llama-bf16", "llama-4bit"])
@AHEAD
def test_it_holds_for_every_kind_of_model(
    loaded: Loaded, make: Make, name: str, ahead: bool
) -> None:
    """And what they said can be continued from the cache."""
    model = loaded(name)
    rig = make(model, ahead=ahead)

    answer = rig.ask(PROMPT, LONG, drawn(SHORT))

    assert json.loads(text(model, answer))["ok"] in (True, False)
    assert rig.ask((*PROMPT, *answer.tokens, 5)).cached >= len(PROMPT)


def test_likeliest_tokens_are_those_the_grammar_allows(make: Make, model: LoadedModel) -> None:
    answer = make().ask(PROMPT, LONG, replace(GREEDY, grammar=SHORT, top_logprobs=3))

    json.loads(text(model, answer).rstrip())
    for sampled in answer.sampled:
        assert sampled.top[0].token == sampled.token
        assert sampled.logprob is not None and sampled.logprob > -1e9


# ── where it ends ────────────────────────────────────────────────────────────────────────────


@AHEAD
def test_an_answer_that_is_cut_ends_with_length(
    make: Make, model: LoadedModel, ahead: bool
) -> None:
    grammar = Grammar(Kind.REGEX, "[0-9]{30}")

    answer = make(ahead=ahead).ask(PROMPT, 12, drawn(grammar))

    assert ended(answer).finish_reason == "length"
    assert re.fullmatch("[0-9]{12}", text(model, answer))


def test_the_end_is_allowed_only_where_the_grammar_may_end(grammars: Grammars) -> None:
    (end,) = ends_of(grammars)
    matcher = grammars.matcher(Grammar(Kind.REGEX, "ab?"))

    assert not matcher.allowed(0, 512)[end]
    after_a = matcher.allowed(id_of(grammars, "a"), 512)
    assert after_a[end]
    assert set(after_a.nonzero()[0]) == {end, id_of(grammars, "b")}
    assert list(matcher.allowed(id_of(grammars, "b"), 512).nonzero()[0]) == [end]


def test_logits_beyond_the_vocabulary_are_never_chosen(grammars: Grammars) -> None:
    """Heads of models are often padded."""
    mask = grammars.matcher(Grammar(Kind.REGEX, "(.|\n)*")).allowed(0, 5000)

    assert mask.shape == (5000,)
    assert mask.any()
    assert not mask[512:].any()


def test_a_row_that_runs_on_after_its_end_is_no_fault(grammars: Grammars) -> None:
    """A row whose client is gone decodes until its removal is planned."""
    (end,) = ends_of(grammars)
    matcher = grammars.matcher(Grammar(Kind.CHOICE, '["a"]'))
    matcher.allowed(0, 512)
    matcher.allowed(id_of(grammars, "a"), 512)

    for _ in range(3):
        assert matcher.allowed(end, 512)[end]


# ── who else is in the batch ─────────────────────────────────────────────────────────────────


@AHEAD
def test_rows_without_a_grammar_are_not_moved(make: Make, model: LoadedModel, ahead: bool) -> None:
    prompts = [tiny.tokens(20 + 7 * index, seed=index) for index in range(3)]
    alone = [make(caching=False).ask(prompt, 40, drawn(None, 3)) for prompt in prompts]
    rig = make(ahead=ahead)

    free = [rig.submit(prompt, 40, drawn(None, 3)) for prompt in prompts]
    bound = [rig.submit(prompt, LONG, drawn(SHORT, 3)) for prompt in prompts]
    rig.run()

    for uid, wanted in zip(free, alone, strict=True):
        assert rig.answers[uid].tokens == wanted.tokens
        assert greatest_difference(rig.answers[uid], wanted) <= NEAR
    for uid in bound:
        json.loads(text(model, rig.answers[uid]))


@AHEAD
def test_each_row_keeps_to_its_own_grammar_while_others_come_and_go(
    make: Make, model: LoadedModel, ahead: bool
) -> None:
    """Rows join a batch that decodes, and leave it at different times."""
    rig = make(ahead=ahead, max_running=3)
    expected = [f"{letter}{{{3 + 4 * index}}}" for index, letter in enumerate("abcdefgh")]

    uids = [
        rig.submit(tiny.tokens(10, seed=index), LONG, drawn(Grammar(Kind.REGEX, regex), index))
        for index, regex in enumerate(expected)
    ]
    rig.run()

    for uid, regex in zip(uids, expected, strict=True):
        assert re.fullmatch(regex, text(model, rig.answers[uid]))


@AHEAD
def test_a_seed_gives_the_same_answer_alone_and_in_a_batch(make: Make, ahead: bool) -> None:
    grammar = json_schema(json.dumps(SCHEMAS["object"]))
    wanted = make(caching=False).ask(PROMPT, LONG, drawn(grammar, 9))
    rig = make(ahead=ahead)

    others = [rig.submit(PROMPT, 30, drawn(None, seed)) for seed in (1, 2)]
    uid = rig.submit(PROMPT, LONG, drawn(grammar, 9))
    rig.run()

    assert rig.answers[uid].tokens == wanted.tokens
    assert all(len(rig.answers[other].tokens) for other in others)


@AHEAD
def test_choices_keep_to_the_grammar_each_for_itself(
    make: Make, model: LoadedModel, ahead: bool
) -> None:
    grammar = json_schema(json.dumps(SCHEMAS["object"]))
    rig = make(ahead=ahead)

    uid = rig.submit(PROMPT, LONG, drawn(grammar, 40), n=4)
    rig.run()

    answers = [rig.answers[Uid(uid + index)] for index in range(4)]
    for index, answer in enumerate(answers):
        jsonschema.validate(json.loads(text(model, answer)), SCHEMAS["object"])
        alone = make(caching=False).ask(PROMPT, LONG, drawn(grammar, 40 + index))
        assert answer.tokens == alone.tokens
    assert len({tuple(answer.tokens) for answer in answers}) == 4, "choices differ"


@AHEAD
def test_the_cache_is_used_with_a_grammar_as_without(make: Make, ahead: bool) -> None:
    prompt = tiny.tokens(70)
    rig = make(ahead=ahead)
    free = rig.ask(prompt, 8)

    cold = make(caching=False).ask(prompt, LONG, drawn(SHORT))
    warm = rig.ask(prompt, LONG, drawn(SHORT))

    assert warm.cached == len(prompt) - 1
    assert warm.tokens == cold.tokens
    assert greatest_difference(warm, cold) <= NEAR
    again = rig.ask(prompt, 8)
    assert again.tokens == free.tokens


# ── faults ───────────────────────────────────────────────────────────────────────────────────


@AHEAD
@pytest.mark.parametrize("after", [0, 5])
def test_a_row_whose_matcher_fails_fails_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch, ahead: bool, after: int
) -> None:
    rig = make(ahead=ahead)
    allowed, calls = Matcher.allowed, []

    def failing(self: Matcher, fed: int, vocab_size: int) -> Any:
        calls.append(fed)
        if len(calls) > after:
            raise GrammarFailed("the grammar can't be followed: on purpose")
        return allowed(self, fed, vocab_size)

    monkeypatch.setattr(Matcher, "allowed", failing)
    wanted = make(caching=False).ask(PROMPT, 20)

    bad = rig.submit(PROMPT, LONG, drawn(Grammar(Kind.REGEX, "[0-9]{50}")))
    good = rig.submit(PROMPT, 20)
    rig.run()

    assert ended(rig.answers[bad]).error == "the grammar can't be followed: on purpose"
    assert len(rig.answers[bad].tokens) <= after
    assert ended(rig.answers[good]).error is None
    assert rig.answers[good].tokens == wanted.tokens


@AHEAD
def test_what_llguidance_gives_up_on_later_fails_the_row_alone(make: Make, ahead: bool) -> None:
    """Too many states, found out at its second token."""
    rig = make(ahead=ahead)

    bad = rig.submit(PROMPT, LONG, drawn(Grammar(Kind.REGEX, "((a{1000}){1000}){1000}")))
    good = rig.submit(PROMPT, 10)
    rig.run()

    error = ended(rig.answers[bad]).error
    assert error is not None and error.startswith("the grammar can't be followed: ")
    assert "\n" not in error and len(error) < 400
    assert len(rig.answers[good].tokens) == 10


# ── what stands around it ────────────────────────────────────────────────────────────────────

END, START = "<|im_end|>", "<|im_start|>"


def accepted(model: LoadedModel, grammars: Grammars, grammar: Grammar, said: str) -> bool:
    """Whether exactly this may be said, token by token, and then the end."""
    matcher = grammars.matcher(grammar)
    before = 0
    ids = model.tokenizer.encode(said, add_special_tokens=False)
    for token in (*ids, *ends_of(grammars)):
        if not matcher.allowed(before, 512)[token]:
            return False
        before = token
    return True


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ('hm {</think>\n\n{"ok":true}', True),
        ('</think>{"ok":true}', True),
        ('{"ok":true}', False),
        ('hm</think>so {"ok":true}', False),
        ("hm", False),
    ],
)
def test_after_a_thought_that_the_prompt_began(
    model: LoadedModel, grammars: Grammars, said: str, wanted: bool
) -> None:
    grammar = after_thought(SHORT, ("<think>", "</think>"), "...<think>\n")

    assert accepted(model, grammars, grammar, said) == wanted


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ('<think>hm</think>\n{"ok":true}', True),
        ('{"ok":true}', True),
        ('hm</think>{"ok":true}', False),
        ("<think>hm", False),
    ],
)
def test_after_a_thought_that_the_model_may_begin(
    model: LoadedModel, grammars: Grammars, said: str, wanted: bool
) -> None:
    grammar = after_thought(SHORT, ("<think>", "</think>"), "...assistant\n")

    assert accepted(model, grammars, grammar, said) == wanted


def test_no_thought_where_the_prompt_ended_it() -> None:
    assert after_thought(SHORT, ("<think>", "</think>"), "<think>\n\n</think>\n\n") == SHORT
    assert after_thought(SHORT, None, "...<think>") == SHORT


def test_markers_that_are_control_tokens_are_these_tokens(
    model: LoadedModel, grammars: Grammars
) -> None:
    """Spelled in letters they would be text."""
    grammar = after_thought(
        surrounded(SHORT, f"{START}call\n", "\n"), (START, "<|endoftext|>"), f"...{START}"
    )
    said = f'hm<|endoftext|>{START}call\n{{"ok":true}}\n'

    assert accepted(model, grammars, grammar, said)
    assert not accepted(model, grammars, grammar, said.replace("<|endoftext|>", "x"))


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ('<call>{"ok":true}</call>', True),
        ('<call>{"ok":true}</call>\n<call>{"ok":false}</call>', True),
        ('<call>{"ok":true}', False),
        ('{"ok":true}', False),
        ("", False),
    ],
)
def test_one_call_or_several_between_their_markers(
    model: LoadedModel, grammars: Grammars, said: str, wanted: bool
) -> None:
    grammar = surrounded(SHORT, "<call>", "</call>", repeats=True)

    assert accepted(model, grammars, grammar, said) == wanted


@pytest.mark.parametrize("end", ["</call>", ""])
def test_a_call_may_come_instead_of_the_answer(
    model: LoadedModel, grammars: Grammars, end: str
) -> None:
    grammar = or_calls(SHORT, ("<call>", end))

    assert accepted(model, grammars, grammar, '{"ok":true}')
    assert accepted(model, grammars, grammar, f"<call>anything at all{end}")
    assert not accepted(model, grammars, grammar, "anything at all")


@AHEAD
def test_a_thought_and_then_the_answer_by_a_model(
    make: Make, model: LoadedModel, ahead: bool
) -> None:
    grammar = after_thought(SHORT, (START, "<|endoftext|>"), f"...{START}")
    hurried = replace(drawn(grammar), logit_bias=((id_of(model, "<|endoftext|>"), 3.0),))

    answer = make(ahead=ahead).ask(PROMPT, LONG, hurried)

    _, said = spelled(model, answer).split("<|endoftext|>")
    json.loads(said.strip("\r\n").removesuffix(END))


# ── small helpers ────────────────────────────────────────────────────────────────────────────


def ends_of(grammars: Grammars) -> list[int]:
    return sorted(grammars.tokenizer.eos_token_ids)


def id_of(of: LoadedModel | Grammars, word: str) -> int:
    (token,) = of.tokenizer.encode(word, add_special_tokens=False)
    return token
