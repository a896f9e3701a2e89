"""What can't be compiled is refused with a sentence, and soon, whatever a client sends."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from omlx.core.grammar import TEXT_MAX, Grammar, GrammarRefused, Kind, json_schema
from omlx.engine.grammar import COMPILED_MAX, RULES_MAX, Grammars
from omlx.engine.load import LoadedModel

Loaded = Callable[[str], LoadedModel]


@pytest.fixture(scope="module")
def grammars(loaded: Loaded) -> Grammars:
    return Grammars(loaded("llama").tokenizer)


def refusal(grammars: Grammars, grammar: Grammar) -> GrammarRefused:
    with pytest.raises(GrammarRefused) as refused:
        grammars.check(grammar)
    said = str(refused.value)
    assert said and "\n" not in said and len(said) < 400, said
    return refused.value


def schema(**fields: Any) -> Grammar:
    return json_schema(json.dumps(fields))


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (schema(type="foo"), "Invalid type: foo"),
        (schema(type="string", **{"not": {"const": "a"}}), 'Unimplemented keys: ["not"]'),
        (schema(**{"$ref": "https://example.com/x.json"}), "does not fetch"),
        (schema(type="string", minLength=5, maxLength=3), "Unsatisfiable schema"),
        (schema(**{"$ref": "#"}), "no text satisfies it"),
        (json_schema("{"), "it is not valid JSON"),
        (Grammar(Kind.REGEX, "(a"), "unclosed group"),
        (Grammar(Kind.REGEX, "(?=a)b"), "look-around"),
        (Grammar(Kind.GRAMMAR, "start: nothing"), "unknown name"),
        (Grammar(Kind.GRAMMAR, 'root ::= "a'), ""),
        (Grammar(Kind.GRAMMAR, "neither one nor the other"), ""),
    ],
    ids=lambda value: None if isinstance(value, Grammar) else value or "-",
)
def test_the_reason_is_llguidances(grammars: Grammars, grammar: Grammar, expected: str) -> None:
    refused = refusal(grammars, grammar)

    assert expected in str(refused)
    assert not refused.unsupported


def test_a_client_can_not_loosen_its_schema_by_an_option(grammars: Grammars) -> None:
    """``lenient`` would have llguidance pass over what it doesn't know."""
    refusal(grammars, schema(type="string", **{"not": {}, "x-guidance": {"lenient": True}}))


# ── hostile ones ─────────────────────────────────────────────────────────────────────────────


def chain(rule: Callable[[int], str], last: str, head: str = "", most: int = 1 << 30) -> str:
    """As many rules as may be sent, each of which is the next one."""
    rules, size = [head], len(head) + len(last) + 40
    while size + len(rule(len(rules))) < TEXT_MAX and len(rules) < most:
        rules.append(rule(len(rules)))
        size += len(rules[-1])
    return "".join(rules) + last.format(len(rules))


def references(wrap: str) -> Grammar:
    """Schemas that refer to one another; ``wrap`` has the reference's place."""
    rules = chain(
        lambda i: f'"{i}":{wrap.replace("@", f"#/$defs/{i + 1}")},',
        '"{}":{{"type":"null"}}}}}}',
        '{"$ref":"#/$defs/1","$defs":{',
    )
    return json_schema(rules)


RULES = RULES_MAX - 2

HOSTILE = {
    "rules": Grammar(
        Kind.GRAMMAR, chain(lambda i: f"r{i}:r{i + 1}\n", 'r{}:"a"', "start:r1\n", RULES)
    ),
    "many rules": Grammar(
        Kind.GRAMMAR, chain(lambda i: f"r{i}:r{i + 1}\n", 'r{}:"a"', "start:r1\n")
    ),
    "lexemes": Grammar(
        Kind.GRAMMAR,
        chain(lambda i: f'R{i}:R{i + 1} "a"\n', "R{}:/(.{{9}}){{1000}}/", "start:R1\n", RULES),
    ),
    "lexemes too large": Grammar(
        Kind.GRAMMAR,
        chain(lambda i: f"R{i}:R{i + 1}\n", "R{}:/é{{9000}}/ /a{{90000}}/", "start:R1\n", RULES),
    ),
    "doubling": Grammar(
        Kind.GRAMMAR,
        "start:R0\n" + "".join(f"R{i}:R{i + 1} R{i + 1}\n" for i in range(40)) + 'R40:"a"',
    ),
    "references": references('{"$ref":"@"}'),
    "objects": references('{"required":["a"],"properties":{"a":{"$ref":"@"}}}'),
    "all of": references('{"allOf":[{"$ref":"@"},{"type":"null"}]}'),
    "any of": references('{"anyOf":[{"$ref":"@"},{"type":"null"}]}'),
    "deep": json_schema('{"items":' * 9_000 + "{}" + "}" * 9_000),
    "optional": schema(type="object", properties={f"p{i}": {} for i in range(4000)}),
    "words": schema(enum=[f"word {i}" for i in range(6000)]),
    "automata": Grammar(
        Kind.GRAMMAR,
        "start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{i}}}/" for i in range(1, 14)),
    ),
    "multiple": schema(type="integer", multipleOf=999_999_937),
    "repeats": Grammar(Kind.REGEX, "((a{1000}){1000}){1000}"),
    "groups": Grammar(Kind.REGEX, "(" * 40_000 + "a" + ")" * 40_000),
    "brackets": Grammar(Kind.GRAMMAR, "start: " + "(" * 40_000 + '"a"' + ")" * 40_000),
    "gbnf": Grammar(Kind.GRAMMAR, "root ::= " + "(" * 40_000 + '"a"' + ")" * 40_000),
    "gbnf rules": Grammar(
        Kind.GRAMMAR, chain(lambda i: f"r{i}::=r{i + 1}\n", 'r{}::="a"', "root::=r1\n", RULES)
    ),
    "gbnf words": Grammar(Kind.GRAMMAR, "root ::= " + '"a" ' * 20_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_can_be_followed(grammars: Grammars, name: str) -> None:
    """Nothing crashes: a stack that overflows would end the process, and this test with it."""
    grammar = HOSTILE[name]
    assert len(grammar.text) <= TEXT_MAX
    try:
        grammars.check(grammar)
    except GrammarRefused as refused:
        assert len(str(refused)) < 400
        return

    followed: list[bool] = []

    def follow() -> None:
        followed.append(bool(grammars.matcher(grammar).allowed(0, 512).any()))

    thread = threading.Thread(target=follow)  # whose stack is an ordinary one, as the engine's
    thread.start()
    thread.join()
    assert followed == [True]


def test_longer_ones_are_not_looked_at(grammars: Grammars) -> None:
    refused = refusal(grammars, Grammar(Kind.REGEX, "a" * (TEXT_MAX + 1)))

    assert str(refused) == f"it is longer than {TEXT_MAX} characters"


def test_a_panic_of_the_compiler_is_a_refusal(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As Rust's arrive."""

    def panics(_grammar: Grammar) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(grammars, "_compile", panics)

    refused = refusal(grammars, Grammar(Kind.REGEX, "panic"))

    assert str(refused) == "its compiler failed: index out of bounds"


# ── what is kept ─────────────────────────────────────────────────────────────────────────────


def test_a_grammar_is_compiled_once(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(loaded("llama").tokenizer)
    grammars.check(Grammar(Kind.REGEX, "ab", field="response_format"))
    monkeypatch.setattr(grammars, "_compile", None)

    matcher = grammars.matcher(Grammar(Kind.REGEX, "ab", field="another name of it"))

    assert matcher.allowed(0, 512).any()


def test_the_oldest_is_forgotten_and_compiled_again(loaded: Loaded) -> None:
    grammars = Grammars(loaded("llama").tokenizer)
    first = Grammar(Kind.REGEX, "first")
    for text in ("first", *(f"a{{{count}}}" for count in range(1, COMPILED_MAX + 1))):
        grammars.check(Grammar(Kind.REGEX, text))

    assert first not in grammars
    assert grammars.matcher(first).allowed(0, 512).any()
    assert first in grammars


def test_many_threads_may_ask_at_once(loaded: Loaded) -> None:
    grammars = Grammars(loaded("llama").tokenizer)
    found: list[int] = []

    def ask(number: int) -> None:
        for count in range(1, 15):
            matcher = grammars.matcher(Grammar(Kind.REGEX, f"[a-d]{{{count + number % 3}}}"))
            found.append(int(matcher.allowed(0, 512).sum()))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [4] * (6 * 14)


# ── where it can't be done ───────────────────────────────────────────────────────────────────


def test_without_the_package_it_is_said_how_to_get_it(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(loaded("llama").tokenizer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    refused = refusal(grammars, schema(type="object"))

    assert 'pip install "omlx[structured]"' in str(refused)
    assert refused.unsupported


def test_other_tokenizers_are_named() -> None:
    class SlowTokenizer:
        eos_token_ids: frozenset[int] = frozenset({1})

    refused = refusal(Grammars(SlowTokenizer()), schema(type="object"))

    assert "the model's tokenizer is a SlowTokenizer" in str(refused)
    assert refused.unsupported


def test_a_model_without_an_end_is_refused(loaded: Loaded) -> None:
    wrapped: Any = loaded("llama").tokenizer
    endless = SimpleNamespace(_tokenizer=wrapped._tokenizer, eos_token_ids=frozenset())

    refused = refusal(Grammars(endless), schema(type="object"))

    assert "no token that ends an answer" in str(refused)
    assert refused.unsupported
