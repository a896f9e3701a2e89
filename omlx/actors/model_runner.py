"""Hands plans to the engine thread and the blocks that come out to the writer."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Protocol, assert_never

from omlx.actors.disk_messages import SsdWriterMessage, WriteBlock
from omlx.actors.messages import ModelRunnerMessage, ReadHot, RunPreview, RunStep, StartOver
from omlx.cache.blocks import BlockId
from omlx.core.plan import HostBlock, StepFailed, StepPlan, StepResult
from omlx.core.preview import End, PreviewResult, PreviewWork
from omlx.kernel.actor import Actor
from omlx.kernel.mailbox import Ref
from omlx.kernel.message import Rejected

log = logging.getLogger(__name__)


class EngineCalls(Protocol):
    """The engine behind its thread."""

    async def run(self, plan: StepPlan) -> Any: ...

    async def reset(self) -> None:
        """Forget every row."""

    async def read_hot(self, block_id: BlockId, checkpoint: bool) -> HostBlock | None: ...

    async def preview(self, work: PreviewWork) -> PreviewResult: ...

    async def start_over(self) -> None:
        """Forget every row and every block."""


class PreviewFailed(Rejected):
    """A codec preview could not be computed."""


class ModelRunner(Actor):
    name = "model_runner"
    capacity = 4

    def __init__(self, engine: EngineCalls, writer: Ref[SsdWriterMessage] | None) -> None:
        self._engine = engine
        self._writer = writer

    async def on_start(self) -> None:
        await self._engine.start_over()

    async def receive(self, message: ModelRunnerMessage) -> object:
        match message:
            case RunStep(plan):
                return await self._run(plan)
            case StartOver():
                await self._engine.start_over()
                return None
            case ReadHot(block_id, checkpoint):
                return await self._engine.read_hot(block_id, checkpoint)
            case RunPreview(work):
                return await self._preview(work)
        assert_never(message)

    async def _preview(self, work: PreviewWork) -> PreviewResult:
        """Nobody's request hangs on it, so what goes wrong in it harms none."""
        try:
            return await self._engine.preview(work)
        except Exception as error:
            log.exception("a codec preview failed")
            await self._engine.preview(End())
            raise PreviewFailed(f"the engine failed ({type(error).__name__})") from None

    async def _run(self, plan: StepPlan) -> StepResult | StepFailed:
        try:
            output = await self._engine.run(plan)
        except Exception as error:
            log.exception("a step failed; every running request is lost")
            await self._engine.reset()
            return StepFailed(f"the engine failed ({type(error).__name__}) and was restarted")
        seals = output.result.seals
        shed = {s.ticket.wish.block_hash for s in seals if s.ticket.write and not s.writing}
        for export in output.exports:
            ticket = export.ticket
            # What hangs on a block that is not written is not written either.
            if ticket.parent in shed or not self._offer(WriteBlock(ticket, export.payload)):
                shed.add(ticket.block_hash)
        if not shed:
            return output.result
        return replace(
            output.result,
            seals=tuple(
                replace(seal, writing=seal.writing and seal.ticket.wish.block_hash not in shed)
                for seal in output.result.seals
            ),
            written=tuple(
                replace(written, writing=written.ticket.block_hash not in shed)
                for written in output.result.written
            ),
        )

    def _offer(self, block: WriteBlock) -> bool:
        return self._writer is not None and self._writer.offer(block)
