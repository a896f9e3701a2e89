"""Answers that keep to a grammar, by llguidance: which tokens may come next, row by row.

``Grammars`` compiles each grammar once; ``Matcher`` is one row's place in one. Nothing here
computes with MLX.

What a hostile grammar can do is bounded by its length, by llguidance's own limits (it counts what
it builds and what it looks at, and gives up), and by a deep stack for the compiler, which is
recursive: chains of references as long as ``TEXT_MAX`` allows took less than 16 MB of it.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from omlx.core.grammar import TEXT_MAX, Grammar, GrammarRefused, Kind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MISSING = 'structured output needs a package that is not installed: pip install "omlx[structured]"'

LEXER_FUEL_MAX = 250_000
"""Of llguidance, while it compiles and for each lexeme it meets later: a quarter of its default.
With the default /((a{1000}){1000}){1000}/ took 0.7 s of a step before it was given up, with this
0.1 s. An enumeration of 10,000 words is compiled with it."""

RULES_MAX = 500
"""Of a grammar in Lark's or GBNF's form. An error in the last of 2,000 that build on one another
took llguidance 80 s to tell, and the time grows with the third power."""

ROW_ITEMS_MAX = 2_000
"""llguidance's default: what a parser may take into account at one place."""

STACK_BYTES = 256 << 20
"""Of a thread that compiles; address space, of which only what is used becomes memory."""

COMPILED_MAX = 128
"""Compiled grammars that are kept; more than requests run and wait by default."""

BREAKS = r"/[\r\n]{1,4}/"
"""Between a thought and what follows, and between two calls."""

SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""White space in JSON. Without an end, a model may go on with it for ever."""

REASON_MAX = 300
"""Characters of what llguidance says that are passed on."""


class GrammarFailed(Exception):
    """A row can't be continued within its grammar; the text says why."""


class Matcher:
    """One row's place in its grammar. Belongs to one thread."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._begun = False

    def copy(self) -> Matcher:
        """Another one at the same place."""
        copied = Matcher(self._matcher.deep_copy())
        copied._begun = self._begun
        return copied

    def follow(self, tokens: Iterable[int]) -> None:
        """Go where these lead, which are in the row's prompt as the beginning of its answer.

        Raises GrammarFailed for a panic; where they are not allowed, ``allowed`` will.
        """
        try:
            for token in tokens:
                self._matcher.consume_token(token)
        except BaseException as panic:  # Rust's are no Exceptions
            raise GrammarFailed(f"the grammar can't be followed: {_short(str(panic))}") from None

    def allowed(self, fed: int, vocab_size: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """(vocab_size,): which tokens may follow ``fed``, the last token before them.

        The first ``fed`` is the prompt's last token. Ends of the answer are allowed where the
        grammar may end, and nothing else once it must. Raises GrammarFailed.
        """
        try:
            if self._begun:
                self._matcher.consume_token(fed)
            self._begun = True
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        except BaseException as panic:  # Rust's are no Exceptions
            raise GrammarFailed(f"the grammar can't be followed: {_short(str(panic))}") from None
        if self._matcher.is_error():
            raise GrammarFailed(f"the grammar can't be followed: {_reason(self._matcher)}")
        mask = np.unpackbits(bits, bitorder="little", count=vocab_size)
        return mask.view(np.bool_)


class Grammars:
    """Compiled grammars for one tokenizer. May be used by several threads."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer``: mlx-lm's. Its form for llguidance is made when it is first needed."""
        self.tokenizer = tokenizer
        self._for_matchers: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, grammar: Grammar) -> bool:
        return grammar in self._compiled

    def check(self, grammar: Grammar) -> None:
        """Compile it, so that a row can have it at once. Raises GrammarRefused."""
        self._prepared(grammar)

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the grammar's beginning. Raises GrammarRefused."""
        return Matcher(self._prepared(grammar).deep_copy())

    def _prepared(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found
        compiled = _on_a_deep_stack(lambda: self._compile(grammar))
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if importlib.util.find_spec("llguidance") is None:
            raise GrammarRefused(MISSING, unsupported=True)
        import llguidance

        if len(grammar.text) > TEXT_MAX:
            raise GrammarRefused(f"it is longer than {TEXT_MAX} characters")
        if grammar.kind is Kind.GRAMMAR and _num_rules(grammar.text) > RULES_MAX:
            raise GrammarRefused(f"it has more than {RULES_MAX} rules")
        with self._lock:
            if self._for_matchers is None:
                self._for_matchers = _convert(self.tokenizer)
            tokenizer = self._for_matchers
        limits = llguidance.LLParserLimits(
            max_items_in_row=ROW_ITEMS_MAX,
            initial_lexer_fuel=LEXER_FUEL_MAX,
            verbose_errors=False,
        )
        source = _source(grammar, tokenizer)
        matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some find out only now that they can't be followed
            if matcher.get_error().startswith("NoExtension"):
                raise GrammarRefused("no text satisfies it")
        if matcher.is_error():
            raise GrammarRefused(_reason(matcher))
        return matcher


def _convert(tokenizer: Any) -> LLTokenizer:
    """Raises GrammarRefused for tokenizers that llguidance can't read."""
    from llguidance.hf import from_tokenizer
    from transformers import PreTrainedTokenizerFast

    wrapped = getattr(tokenizer, "_tokenizer", tokenizer)
    if not isinstance(wrapped, PreTrainedTokenizerFast):
        raise GrammarRefused(
            f"the model's tokenizer is a {type(wrapped).__name__}; only Hugging Face's fast "
            "tokenizers can be used for structured output",
            unsupported=True,
        )
    ends = sorted(tokenizer.eos_token_ids)
    if not ends:
        raise GrammarRefused("the model has no token that ends an answer", unsupported=True)
    try:
        return from_tokenizer(wrapped, eos_token=ends)
    except Exception as error:  # whatever a tokenizer of another making does to it
        raise GrammarRefused(
            f"the model's tokenizer can't be used for structured output: {_short(str(error))}",
            unsupported=True,
        ) from None


# ── the source of a grammar, in llguidance's form ────────────────────────────────────────────


def _source(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """Two grammars: what stands around, and the body. Raises GrammarRefused."""
    lines = [f"BREAKS: {BREAKS}"]
    before, after = _spelled(grammar.begins, tokenizer), _spelled(grammar.ends, tokenizer)
    answer = " ".join(filter(None, (before, "@body", after)))
    if grammar.repeats:
        lines.append(f"once: {answer}")
        answer = "once (BREAKS? once)*"
    if grammar.calls is not None:
        start, end = grammar.calls
        lines.append(f"call: {_spelled(start, tokenizer)} called")
        lines.append(_text_until(end, "called", tokenizer))
        answer = f"({answer} | call (BREAKS? call)*)"
    thought = grammar.thought
    if thought is not None:
        lines.append(_text_until(thought.end, "thought", tokenizer))
        if thought.begun:
            answer = f"thought BREAKS? {answer}"
        else:
            answer = f"({_spelled(thought.start, tokenizer)} thought BREAKS?)? {answer}"
    around = "\n".join([f"start: {answer}", *lines])
    return json.dumps({"grammars": [{"lark_grammar": around}, {"name": "body", **_body(grammar)}]})


def _text_until(end: str, name: str, tokenizer: LLTokenizer) -> str:
    """A rule for any text and ``end`` after it."""
    marker = _spelled(end, tokenizer)
    if marker.startswith("<") or not marker:  # no text holds a control token
        return f"{name}: {name.upper()}? {marker}\n{name.upper()}: /(.|\\n)+/"
    return f"{name}[suffix={json.dumps(end)}]: /(.|\\n)*/"


def _body(grammar: Grammar) -> dict[str, Any]:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    match grammar.kind:
        case Kind.JSON_SCHEMA:
            schema = _parsed(grammar.text)
            # Over what the client may have put there: it could ask for less than its schema says.
            return {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": SPACE}}}
        case Kind.CHOICE:
            choices = map(json.dumps, _parsed(grammar.text))
            return {"lark_grammar": f"start: {' | '.join(choices)}"}
        case Kind.REGEX:
            found = json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"][0]
            return {"lark_grammar": found["lark_grammar"]}
        case Kind.GRAMMAR:
            try:
                return {"lark_grammar": any_to_lark(grammar.text)}
            except Exception as error:  # of its parser
                raise GrammarRefused(_short(str(error) or type(error).__name__)) from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"it is not valid JSON: {_short(str(error))}") from None


def _spelled(text: str, tokenizer: LLTokenizer) -> str:
    """Literal text for Lark: control tokens by their ids, the rest between quotation marks."""
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    if not any(map(tokenizer.is_special_token, tokens)):
        return json.dumps(text) if text else ""
    parts: list[str] = []
    plain: list[int] = []

    def close() -> None:
        if plain:
            parts.append(json.dumps(tokenizer.decode_str(plain)))
            plain.clear()

    for token in tokens:
        if tokenizer.is_special_token(token):
            close()
            parts.append(f"<[{token}]>")
        else:
            plain.append(token)
    close()
    return " ".join(parts)


def _num_rules(text: str) -> int:
    """At most so many: each has a colon, or in GBNF two."""
    return text.count(":") - text.count("::=")


def _reason(matcher: LLMatcher) -> str:
    return _short(matcher.get_error().replace("<non-verbose/>", ""))


def _short(said: str) -> str:
    """The first paragraph of an error, on one line."""
    first = " ".join(said.strip().split("\n\n")[0].split())
    return first if len(first) <= REASON_MAX else f"{first[:REASON_MAX]}…"


_stack_size = threading.Lock()


def _on_a_deep_stack(work: Callable[[], LLMatcher]) -> LLMatcher:
    """The result of ``work``, in a thread of its own. Raises what it raises."""
    outcome: list[LLMatcher | BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # told to the caller
            outcome.append(error)

    with _stack_size:  # it is the process's, for threads to come
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    (found,) = outcome
    if isinstance(found, Exception):
        raise found
    if isinstance(found, BaseException):  # Rust's panics are no Exceptions
        raise GrammarRefused(f"its compiler failed: {_short(str(found))}")
    return found
