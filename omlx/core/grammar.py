"""What an answer must look like: a grammar as a client gives it, and what stands around it.

    answer  = [thought] (body | calls)
    thought   what a model may say to itself first, between markers
    body      what the grammar itself says, between ``begins`` and ``ends``
    calls     of tools, where the model may call some instead of answering

A description only. It is compared and hashed, and compiled by the engine; see engine/grammar.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

TEXT_MAX = 100_000
"""Characters of a grammar. What a longer one could do to the compiler's stack was measured; see
engine/grammar.py."""


class Kind(Enum):
    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"
    CHOICE = "list of choices"
    GRAMMAR = "grammar"


class GrammarRefused(Exception):
    """It can't be compiled, or nothing here can; the text says why, in one sentence or more."""

    def __init__(self, reason: str, *, unsupported: bool = False) -> None:
        """``unsupported``: no grammar could be used here."""
        super().__init__(reason)
        self.unsupported = unsupported


@dataclass(frozen=True, slots=True)
class Thought:
    """The markers of a thought that may stand before the answer."""

    start: str
    end: str
    begun: bool
    """The prompt ends within a thought: its end must come."""


@dataclass(frozen=True, slots=True)
class Grammar:
    kind: Kind
    text: str
    """JSON of the schema, an expression, JSON of a list of texts, or a grammar in Lark's or
    GBNF's form."""
    field: str = field(default="", compare=False)
    """The client's name for it, for errors."""
    begins: str = ""
    ends: str = ""
    """Literal text around each body, such as the markers of a call; spellings of control tokens
    are these tokens."""
    repeats: bool = False
    """One body or more, each with what stands around it."""
    thought: Thought | None = None
    calls: tuple[str, str] | None = None
    """The markers of a call of a tool; an empty end: the end of the answer. What stands between
    them is left to the model."""


def json_schema(schema: str, field: str = "") -> Grammar:
    """``schema``: JSON, whose order of properties is the order of the answer's."""
    return Grammar(Kind.JSON_SCHEMA, schema, field)


def json_object(field: str = "") -> Grammar:
    return json_schema('{"type":"object"}', field)


def surrounded(grammar: Grammar, begins: str, ends: str, *, repeats: bool = False) -> Grammar:
    """The same between markers, such as those of a call of a tool."""
    return replace(grammar, begins=begins, ends=ends, repeats=repeats)


def or_calls(grammar: Grammar, markers: tuple[str, str] | None) -> Grammar:
    """The same, or calls of tools between ``markers`` instead."""
    return replace(grammar, calls=markers)


def after_thought(grammar: Grammar, markers: tuple[str, str] | None, prompt: str) -> Grammar:
    """The same for an answer to ``prompt`` by a model that thinks between ``markers``.

    Where the prompt ends with a thought that is over, as templates put it for thinking turned off,
    the answer begins at once.
    """
    if markers is None:
        return grammar
    start, end = markers
    said = prompt.rstrip()
    if said.endswith(end):
        return grammar
    return replace(grammar, thought=Thought(start, end, begun=said.endswith(start)))
