"""Renders conversations in a thread of its own: a long prompt must not stop the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import assert_never

from omlx.actors.messages import Render, Rendered, TokenizerMessage
from omlx.core.chat import TemplateRefused
from omlx.core.render import ChatTokenizer, render
from omlx.kernel.actor import Actor
from omlx.kernel.message import Rejected


class PromptRejected(Rejected):
    """The conversation can't be rendered; the text says why."""


class Tokenizer(Actor):
    name = "tokenizer"
    capacity = 64

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def receive(self, message: TokenizerMessage) -> object:
        match message:
            case Render(conversation):
                loop = asyncio.get_running_loop()
                try:
                    prompt, tokens = await loop.run_in_executor(
                        self._thread, render, self._tokenizer, conversation
                    )
                except TemplateRefused as refusal:
                    raise PromptRejected(str(refusal)) from None
                return Rendered(prompt, tuple(tokens))
        assert_never(message)

    async def on_stop(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
