"""Which part of a model's text is meant for whom: the markers, and a machine that reads them.

    content    <think>   -> reasoning       reasoning  </think>      -> content
    content    <call>    -> call            call       </call>       -> content
    reasoning  <call>    -> call            (some models forget to end their thoughts)

That is the table of most models, with markers of their own; some have more states, whose text
nobody sees. A marker that leads to where it stands is left out, and nothing else happens.

Markers are found in the text and not in the tokens: the end of one may be a part of a token that
goes on with something else. Of markers that begin at one place the longest counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

CONTENT, REASONING, CALL = "normal", "reasoning", "tool"
"""mlx-lm's names, which its tables of transitions use. The text of other states is dropped."""


@dataclass(frozen=True, slots=True)
class Edge:
    state: str
    marker: str
    target: str


@dataclass(frozen=True, slots=True)
class Markup:
    """How the text of one answer is read. The default is no markup at all."""

    edges: tuple[Edge, ...] = ()
    initial: str = CONTENT
    spelled: frozenset[int] = frozenset()
    """Control tokens that are a part of a marker: in the text they are spelled out."""
    spelled_in_calls: frozenset[int] = frozenset()
    """Those that parsers of calls may look for."""
    one_call: bool = False
    """The answer ends with its first call."""


PLAIN = Markup()


class MarkupTokenizer(Protocol):
    """What mlx-lm's tokenizer knows of a model's markup."""

    think_start: str | None
    think_end: str | None
    tool_call_start: str | None
    tool_call_end: str | None
    structural_markers: Sequence[str]
    response_transitions: Mapping[str, Sequence[tuple[str, str]]]
    response_initial_state: str | None
    added_tokens_decoder: Mapping[int, object]
    all_special_ids: Sequence[int]
    eos_token_ids: set[int]
    chat_template: object
    has_chat_template: bool
    init_kwargs: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ModelMarkup:
    """What a model's markup is, whatever is asked of it."""

    think: tuple[str, str] | None = None
    """What begins and ends a thought."""
    call: tuple[str, str] | None = None
    """What begins and ends a call; an empty end: the end of the answer."""
    edges: tuple[Edge, ...] = ()
    """Those that are the model's own."""
    initial: str = CONTENT
    control: tuple[tuple[int, str], ...] = ()
    """Ids and spellings of its control tokens, but for those that end an answer."""
    takes_tools: bool = False
    """Whether its template shows tools, and its calls can be read."""
    takes_budget: bool = False
    """Whether its template has a use for a number of tokens to think with."""
    family: str = ""
    """mlx-lm's name for the format of its calls."""
    end_is_token: bool = False
    """Whether the end of a call is a token of its own, and so never a part of a text."""

    @classmethod
    def of(cls, tokenizer: MarkupTokenizer) -> ModelMarkup:
        special = set(tokenizer.all_special_ids) - set(tokenizer.eos_token_ids)
        edges = [Edge(CONTENT, marker, CONTENT) for marker in tokenizer.structural_markers]
        for state, following in tokenizer.response_transitions.items():
            edges += [Edge(state, marker, target) for marker, target in following]
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        think = None
        if tokenizer.think_start and tokenizer.think_end:
            think = (tokenizer.think_start, tokenizer.think_end)
        return cls(
            think=think,
            call=None if start is None else (start, end or ""),
            edges=tuple(edges),
            initial=tokenizer.response_initial_state or CONTENT,
            control=tuple(
                (token, str(spelling))
                for token, spelling in tokenizer.added_tokens_decoder.items()
                if token in special
            ),
            takes_tools=start is not None and _shows_tools(tokenizer),
            takes_budget="thinking_budget" in str(tokenizer.chat_template),
            family=str(tokenizer.init_kwargs.get("tool_parser_type") or ""),
            end_is_token=end in [str(t) for t in tokenizer.added_tokens_decoder.values()],
        )

    @property
    def has_channels(self) -> bool:
        """Whether what is said to the user begins with a marker too."""
        return self.initial != CONTENT or any(edge.target != CONTENT for edge in self.edges)

    def reading(self, prompt: str, *, tools: bool, one_call: bool = False) -> Markup:
        """How to read the answer to ``prompt``. Without tools the markers of calls are text."""
        edges = [*self.edges]
        if self.think is not None:
            start, end = self.think
            edges += [
                Edge(CONTENT, start, REASONING),
                Edge(CONTENT, end, CONTENT),
                Edge(REASONING, end, CONTENT),
                Edge(REASONING, start, REASONING),
            ]
        if tools and self.call is not None:
            edges += self._call_edges(*self.call)
        markers = [edge.marker for edge in edges]
        parts = [(t, name) for t, name in self.control if any(name in m for m in markers)]
        # Half a marker of several tokens is no text either.
        edges += [
            Edge(state, name, state)
            for _, name in parts
            for state in (CONTENT, REASONING)
            if not any(edge.state == state and edge.marker == name for edge in edges)
        ]
        initial = self.initial
        if self.think is not None and prompt.rstrip().endswith(self.think[0]):
            initial = REASONING  # the template began the thought
        return Markup(
            tuple(edges),
            initial,
            spelled=frozenset(token for token, _ in parts),
            spelled_in_calls=frozenset(token for token, _ in self.control),
            one_call=one_call,
        )

    def _call_edges(self, start: str, end: str) -> list[Edge]:
        edges = [Edge(REASONING, start, CALL)]
        # Where the model's own table says what leads to a call, nothing else does.
        if not any(edge.target == CALL for edge in self.edges):
            edges.append(Edge(CONTENT, start, CALL))
        if end:
            edges.append(Edge(CALL, end, CONTENT))
        if self.end_is_token:
            edges += [Edge(CONTENT, end, CONTENT), Edge(REASONING, end, REASONING)]
        return edges


def _shows_tools(tokenizer: MarkupTokenizer) -> bool:
    template = tokenizer.chat_template
    if isinstance(template, str):
        return "tools" in template
    return template is not None or tokenizer.has_chat_template


class Reader:
    """Reads text piece by piece. How it is cut makes no difference to what is read."""

    def __init__(self, edges: Sequence[Edge], initial: str) -> None:
        self.state = initial
        self._targets: dict[str, dict[str, str]] = {}
        for edge in edges:
            self._targets.setdefault(edge.state, {}).setdefault(edge.marker, edge.target)
        self._held = ""

    def read(self, text: str) -> list[tuple[str, str]]:
        """Text with its state, as far as it is sure. Another state than before: a marker stood
        between, and the last one is the present state, maybe with no text."""
        return self._read(self._held + text, more=True)

    def finish(self) -> list[tuple[str, str]]:
        """What was held, once no text will follow."""
        return self._read(self._held, more=False)

    def _read(self, text: str, *, more: bool) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        while True:
            targets = self._targets.get(self.state, {})
            # The leftmost, and of those the longest.
            matches = [(at, -len(m), m) for m in targets if (at := text.find(m)) >= 0]
            keep = max((overlap(text, m) for m in targets), default=0) if more else 0
            if not matches or (keep and len(text) - keep <= min(matches)[0]):
                found.append((self.state, text[: len(text) - keep]))
                self._held = text[len(text) - keep :]
                return found
            at, _, marker = min(matches)
            found.append((self.state, text[:at]))
            self.state, text = targets[marker], text[at + len(marker) :]


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that begins ``marker`` and is not all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[len(text) - length :]):
            return length
    return 0
