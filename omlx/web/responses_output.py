"""The output of a response, item by item, and the events that tell how it grows.

A response that is not streamed is made by the same steps, and its events are not sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omlx.core.pieces import Piece, Text, Thought, ToolCall
from omlx.web.ids import new_id

Json = dict[str, Any]
Event = tuple[str, Json]
"""Its type and its fields."""


@dataclass
class _Words:
    """An item of text, a message or reasoning, that may go on."""

    thought: bool
    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = new_id("rs_" if self.thought else "msg_")

    @property
    def place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    def part(self) -> Json:
        text = "".join(self.text)
        if self.thought:
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": list(self.logprobs),
        }

    def item(self, status: str, content: list[Json]) -> Json:
        if self.thought:
            return {
                "id": self.id,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "encrypted_content": None,
                "status": status,
            }
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def begin(self) -> list[Event]:
        item = self.item("in_progress", [])
        return [
            ("response.output_item.added", {"output_index": self.index, "item": item}),
            ("response.content_part.added", {**self.place, "part": self.part()}),
        ]

    def add(self, text: str, logprobs: list[Json]) -> Event:
        self.text.append(text)
        self.logprobs += logprobs
        if self.thought:
            return "response.reasoning_text.delta", {**self.place, "delta": text}
        fields = {**self.place, "delta": text, "logprobs": logprobs}
        return "response.output_text.delta", fields

    def end(self, status: str) -> tuple[Json, list[Event]]:
        part = self.part()
        item = self.item(status, [part])
        done = {"text": part["text"]}
        if not self.thought:
            done["logprobs"] = part["logprobs"]
        name = "reasoning_text" if self.thought else "output_text"
        return item, [
            (f"response.{name}.done", {**self.place, **done}),
            ("response.content_part.done", {**self.place, "part": part}),
            ("response.output_item.done", {"output_index": self.index, "item": item}),
        ]


class Output:
    def __init__(self) -> None:
        self.items: list[Json] = []
        """Those that are complete."""
        self._open: _Words | None = None
        self._early: list[Json] = []
        """Log-probabilities of tokens that gave no text yet."""

    def take(self, pieces: tuple[Piece, ...], logprobs: list[Json]) -> list[Event]:
        """What comes with some tokens, and the log-probabilities of these."""
        events: list[Event] = []
        logprobs, self._early = self._early + logprobs, []
        for piece in pieces:
            match piece:
                case Text(text):
                    events += self._say(text, logprobs, thought=False)
                    logprobs = []
                case Thought(text):
                    events += self._say(text, [], thought=True)
                case ToolCall():
                    events += self.close("completed")
                    events += self._call(piece)
        # The tokens of thoughts and calls have no place for theirs.
        if pieces or (self._open is not None and self._open.thought):
            return events
        if self._open is not None and logprobs:
            return [self._open.add("", logprobs)]
        self._early = logprobs
        return []

    def close(self, status: str) -> list[Event]:
        """The item that is open, if one is, gets no more."""
        if self._open is None:
            return []
        item, events = self._open.end(status)
        self.items.append(item)
        self._open = None
        return events

    def _say(self, text: str, logprobs: list[Json], *, thought: bool) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.thought != thought:
            events += self.close("completed")
            self._open = _Words(thought, len(self.items))
            events += self._open.begin()
        return [*events, self._open.add(text, logprobs)]

    def _call(self, call: ToolCall) -> list[Event]:
        index = len(self.items)
        item = {
            "id": new_id("fc_"),
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        self.items.append(item)
        begun = {**item, "arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": index}
        whole = {"name": call.name, "arguments": call.arguments}
        return [
            ("response.output_item.added", {"output_index": index, "item": begun}),
            ("response.function_call_arguments.delta", {**place, "delta": call.arguments}),
            ("response.function_call_arguments.done", {**place, **whole}),
            ("response.output_item.done", {"output_index": index, "item": item}),
        ]
