"""Renders and encodes in a thread of its own: a long prompt must not stop the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import assert_never

from omlx.actors.messages import (
    Detokenize,
    Remember,
    Render,
    Rendered,
    Tokenize,
    TokenizerMessage,
)
from omlx.core.chat import Conversation, TemplateRefused
from omlx.core.diagnosis import Diagnosis, Occasion, fingerprint
from omlx.core.render import ChatTokenizer, detokenize, landmarks, render, tokenize
from omlx.kernel.actor import Actor
from omlx.kernel.message import Rejected


class PromptRejected(Rejected):
    """The conversation can't be rendered; the text says why."""


class Tokenizer(Actor):
    name = "tokenizer"
    capacity = 64

    def __init__(self, tokenizer: ChatTokenizer, *, find_system: bool = False) -> None:
        """``find_system``: say where the system part ends, and where a client's breakpoints are;
        only recurrent models need it."""
        self._tokenizer = tokenizer
        self._find_system = find_system
        self._diagnosis = Diagnosis()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def receive(self, message: TokenizerMessage) -> object:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._work, message)
        except TemplateRefused as refusal:
            raise PromptRejected(str(refusal)) from None

    def _work(self, message: TokenizerMessage) -> object:
        match message:
            case Render(conversation, occasion):
                return self._render(conversation, occasion)
            case Remember(request_id, print_):
                return self._diagnosis.remember(request_id, print_)
            case Tokenize(text, add_special, parse_special):
                ids = tokenize(
                    self._tokenizer, text, add_special=add_special, parse_special=parse_special
                )
                return tuple(ids)
            case Detokenize(tokens):
                return detokenize(self._tokenizer, tokens)
        assert_never(message)

    def _render(self, conversation: Conversation, occasion: Occasion | None) -> Rendered:
        prompt, tokens = render(self._tokenizer, conversation)
        num_system, hints = 0, ()
        if self._find_system:
            num_system, hints = landmarks(self._tokenizer, conversation, tokens)
        found = Rendered(prompt, tuple(tokens), num_system, hints)
        if occasion is None:
            return found
        print_ = fingerprint(conversation, tokens, occasion)
        name = occasion.compare_with
        comparison = (
            self._diagnosis.compare_with_best(print_)
            if name is None
            else self._diagnosis.compare(print_, name)
        )
        return replace(found, fingerprint=print_, comparison=comparison)

    async def on_stop(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
