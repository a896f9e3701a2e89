"""The content of a message, block by block, whole and as the events of a stream."""

from __future__ import annotations

from typing import Any

import orjson

from omlx.core.pieces import Piece, Text, Thought, ToolCall
from omlx.web import sse

Json = dict[str, Any]

SIGNATURE = "omlx"
"""Clients send thoughts back with what was signed. Nobody here checks who thought them."""


def event(kind: str, **fields: Any) -> bytes:
    return sse.event(kind, {"type": kind, **fields})


def block_of(piece: Piece) -> Json:
    """A whole block."""
    match piece:
        case Text(text):
            return {"type": "text", "text": text}
        case Thought(text):
            return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
        case ToolCall(name_of_call, name, arguments):
            return {
                "type": "tool_use",
                "id": name_of_call,
                "name": name,
                "input": orjson.Fragment(arguments),
            }
    raise AssertionError("a dialect gets calls that were read")


class Blocks:
    """Blocks as they come. One is open at a time; what is of another kind begins the next."""

    def __init__(self) -> None:
        self._index = 0
        self._open: type[Text] | type[Thought] | None = None

    def take(self, piece: Piece) -> bytes:
        match piece:
            case Text(text):
                return self._begun(Text) + self._delta(type="text_delta", text=text)
            case Thought(text):
                return self._begun(Thought) + self._delta(type="thinking_delta", thinking=text)
            case ToolCall(arguments=arguments):
                empty = {**block_of(piece), "input": {}}
                return (
                    self.close()
                    + self._start(empty)
                    + self._delta(type="input_json_delta", partial_json=arguments)
                    + self._stop()
                )
        raise AssertionError("a dialect gets calls that were read")

    def close(self) -> bytes:
        """End the block that is open, if one is."""
        frames = b""
        if self._open is None:
            return frames
        if self._open is Thought:
            frames = self._delta(type="signature_delta", signature=SIGNATURE)
        self._open = None
        return frames + self._stop()

    def _begun(self, kind: type[Text] | type[Thought]) -> bytes:
        if self._open is kind:
            return b""
        frames = self.close()
        self._open = kind
        empty: Json = {"type": "text", "text": ""}
        if kind is Thought:
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        return frames + self._start(empty)

    def _start(self, block: Json) -> bytes:
        return event("content_block_start", index=self._index, content_block=block)

    def _delta(self, **delta: str) -> bytes:
        return event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> bytes:
        index, self._index = self._index, self._index + 1
        return event("content_block_stop", index=index)
