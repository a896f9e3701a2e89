"""Compiles grammars in a thread of its own, before a request that has one is queued."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from omlx.core.grammar import Grammar, GrammarRefused
from omlx.kernel.actor import Actor
from omlx.kernel.message import Ask, Rejected


@dataclass(frozen=True, slots=True)
class CheckGrammar(Ask[None]):
    """Compile it, so that the engine has it. Rejected with GrammarRejected."""

    grammar: Grammar


class GrammarRejected(Rejected):
    """The grammar can't be used; the text says why."""

    def __init__(self, reason: str, *, unsupported: bool) -> None:
        """``unsupported``: no grammar could be used here."""
        super().__init__(reason)
        self.unsupported = unsupported


class Compiler(Protocol):
    def check(self, grammar: Grammar) -> None:
        """Raises GrammarRefused. What was compiled is kept for the engine."""


class GrammarCompiler(Actor):
    name = "grammars"
    capacity = 16

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def receive(self, message: CheckGrammar) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._compiler.check, message.grammar)
        except GrammarRefused as refusal:
            raise GrammarRejected(str(refusal), unsupported=refusal.unsupported) from None

    async def on_stop(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
