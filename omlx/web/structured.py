"""What an answer must look like, in the words of each dialect.

OpenAI's and Anthropic's formats, and vLLM's fields, which every dialect takes here. A request
gives one of them at most; whatever is asked for is done, or refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import orjson

from omlx.actors.grammars import CheckGrammar, GrammarRejected
from omlx.core.chat import Conversation, GenerationRequest
from omlx.core.grammar import (
    TEXT_MAX,
    Grammar,
    Kind,
    after_thought,
    json_object,
    json_schema,
    or_calls,
)
from omlx.core.plan import Sampling
from omlx.web.body import Loose, unsupported
from omlx.web.edge import Edge
from omlx.web.errors import invalid

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A dialect's own field, as it was sent."""

    value: Json | None
    field: str
    nested: bool = False
    """A schema lies in ``json_schema`` and not beside the type."""


class GuidedFields(Loose):
    guided_json: str | Json | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structured_outputs: Json | None = None
    """vLLM's newer form: json, regex, choice, grammar or json_object."""
    grammar: str | None = None

    @property
    def answer_format(self) -> AnswerFormat | None:
        """For dialects that have a field for it."""
        return None


def grammar_of(request: GuidedFields) -> Grammar | None:
    """Raises ApiError, naming the field. Whether it can be compiled is not known yet."""
    if request.guided_whitespace_pattern is not None:
        raise unsupported("guided_whitespace_pattern is", "guided_whitespace_pattern")
    if request.grammar is not None:
        raise invalid(
            "grammar is not supported; guided_grammar is, and takes the same text.",
            "grammar",
            "unsupported_value",
        )
    found = list(_asked(request))
    if not found:
        return None
    if len(found) > 1:
        one, other = found[0].field, found[1].field
        raise invalid(
            f"{one} and {other} both say what the answer must look like; give one of them.", other
        )
    (grammar,) = found
    if len(grammar.text) > TEXT_MAX:
        raise invalid(f"{grammar.field} is longer than {TEXT_MAX} characters.", grammar.field)
    return grammar


async def constrained(edge: Edge, asked: GenerationRequest, prompt: str) -> Sampling:
    """How to answer the rendered prompt, with a grammar that was compiled if there is one.

    In a conversation the model may think before it keeps to the grammar, and call tools instead of
    answering. Raises ApiError, naming the field.
    """
    grammar = asked.sampling.grammar
    if grammar is None:
        return asked.sampling
    if isinstance(asked.prompt, Conversation):
        if edge.markup.has_channels:
            raise unsupported(
                f"{grammar.field} for a model that answers in channels, as this one does, is",
                grammar.field,
            )
        grammar = after_thought(grammar, edge.markup.think, prompt)
        if asked.tools_to_call and not asked.must_call:
            grammar = or_calls(grammar, edge.markup.call)
    assert edge.grammars is not None, "a ready server has its actors"
    try:
        await edge.grammars.ask(CheckGrammar(grammar))
    except GrammarRejected as refused:
        code = "unsupported_value" if refused.unsupported else "invalid_value"
        field = grammar.field
        raise invalid(f"{field} can't be followed: {refused}.", field, code) from None
    return replace(asked.sampling, grammar=grammar)


def _asked(request: GuidedFields) -> Iterator[Grammar]:
    if request.answer_format is not None:
        yield from _of_format(request.answer_format)
    names = ("json", "regex", "choice", "grammar")
    for name in names:
        field = f"guided_{name}"
        yield from _guided(name, getattr(request, field), field)
    for name, value in (request.structured_outputs or {}).items():
        field = f"structured_outputs.{name}"[:80]
        if value is None or value is False:
            continue
        if name == "json_object" and value is True:
            yield json_object(field)
        elif name in names:
            yield from _guided(name, value, field)
        else:
            raise unsupported(f"{field} is", field)


def _of_format(form: AnswerFormat) -> Iterator[Grammar]:
    value, field = form.value or {}, form.field
    match value.get("type", "text"):
        case "text":
            return
        case "json_object":
            schema = value.get("schema")  # as llama.cpp takes it
            if schema is None:
                yield json_object(field)
            else:
                yield _schema(schema, f"{field}.schema")
        case "json_schema" if form.nested:
            described = value.get("json_schema")
            if not isinstance(described, dict):
                raise invalid(f"{field}.json_schema must be an object.", f"{field}.json_schema")
            yield _schema(described.get("schema"), f"{field}.json_schema.schema")
        case "json_schema":
            yield _schema(value.get("schema"), f"{field}.schema")
        case kind:
            raise unsupported(f"{field} of type {str(kind)[:60]!r} is", field)


def _guided(name: str, value: Any, field: str) -> Iterator[Grammar]:
    match name, value:
        case _, None:
            return
        case "json", _:
            yield _schema(value, field)
        case "regex", str():
            yield Grammar(Kind.REGEX, value, field)
        case "grammar", str():
            yield Grammar(Kind.GRAMMAR, value, field)
        case "choice", [_, *_] if all(isinstance(choice, str) and choice for choice in value):
            yield Grammar(Kind.CHOICE, orjson.dumps(value).decode(), field)
        case "choice", _:
            raise invalid(f"{field} must be a list of texts that are not empty.", field)
        case _:
            raise invalid(f"{field} must be a text.", field)


def _schema(value: Any, field: str) -> Grammar:
    """Of an object, or of the JSON of one. The order of its properties is kept."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise invalid(f"{field} is not valid JSON: {error}.", field) from None
    if not isinstance(value, dict):
        raise invalid(f"{field} must be a JSON schema, which is an object.", field)
    try:
        return json_schema(orjson.dumps(value).decode(), field)
    except orjson.JSONEncodeError:
        raise invalid(f"{field} is nested too deeply.", field) from None
