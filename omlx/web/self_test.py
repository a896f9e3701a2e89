"""Whether the cache stores and restores: one prompt of the server's own, through the real path.

The prompt has a salt of its own, so it meets nobody's blocks. It is computed twice: the second
time all but its last token must come from the cache. Then the bytes that the RAM tier holds are
compared with those that come out of the file. At the end everything of it is forgotten; only where
the cache itself fails meanwhile a file is left, like any other that nobody asks for.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from omlx.actors.disk_messages import ReadBlocks
from omlx.actors.limit_messages import CacheLimits, SetLimits
from omlx.actors.messages import (
    Ended,
    FindChain,
    ForgetChain,
    GenerationStream,
    ReadHot,
    Submit,
    Tokenize,
)
from omlx.actors.scheduler import GenerationFailed
from omlx.cache import codecs
from omlx.cache.block_file import HostTensor
from omlx.cache.blocks import PackedTokens, pack_tokens
from omlx.cache.hybrid_cache import StateSpec
from omlx.cache.one_chain import Whereabouts
from omlx.core.plan import HostBlock
from omlx.core.sequence import Request
from omlx.core.usage import RequestRecord
from omlx.kernel.message import ActorGone, Rejected
from omlx.kernel.stream import Stream
from omlx.web.edge import Edge

TEXT = (
    "The lighthouse keeper wrote one line a day: the wind, the sea, and which ships had passed. "
    "After forty years nobody read the lines for the weather any more, but for the ships. "
)
PATIENCE_S = 60.0
"""For all of it. A block has up to 4096 tokens, and others may be served meanwhile."""

FILE_S = 10.0
"""For a block to get its file when nothing else is written."""

LOOK_S = 0.05


class Failed(Exception):
    """The test found something wrong, or could not be made. ``reason`` is a key for the page."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Outcome:
    """``state``: ok, failed, or skipped (there is no cache)."""

    state: str
    reason: str = ""
    """Why not, in a word that a page has a sentence for."""
    detail: str = ""
    tokens: int = 0
    """That came from the cache the second time."""
    ram_bytes: int = 0
    """Read back from the RAM tier; 0: it kept nothing."""
    file_bytes: int = 0
    """Read back from files, as they are in RAM."""
    compared: int = 0
    """Blocks and checkpoints whose bytes were compared."""
    ms: float = 0.0
    at: float = 0.0
    """Unix seconds."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


async def self_test(edge: Edge) -> Outcome:
    """Make the test. Raises nothing but CancelledError: whatever goes wrong is its outcome."""
    began = time.perf_counter()
    salt = f"omlx/self-test/{secrets.token_hex(8)}"
    try:
        async with asyncio.timeout(PATIENCE_S):
            outcome = await _test(edge, salt)
    except Failed as failed:
        outcome = Outcome("failed", failed.reason, failed.detail)
    except TimeoutError:
        outcome = Outcome("failed", "slow")
    except (Rejected, ActorGone, GenerationFailed) as error:
        outcome = Outcome("failed", "not_now", str(error))
    finally:
        if edge.cache is not None:
            edge.cache.offer(ForgetChain(salt))
    took = 1000 * (time.perf_counter() - began)
    return Outcome(**{**asdict(outcome), "ms": round(took, 1), "at": time.time()})


async def _test(edge: Edge, salt: str) -> Outcome:
    assert edge.cache is not None and edge.running_settings is not None, "the server is ready"
    limits = await edge.cache.ask(SetLimits())
    files = limits.writing is not None and limits.ssd_bytes > 0
    enabled = edge.running_settings.loaded.settings.cache_enabled
    if not enabled or not (limits.hot_bytes or files):
        return Outcome("skipped", "off")
    prompt = await _prompt(edge)
    first = await _compute(edge, prompt, salt)
    second = await _compute(edge, prompt, salt)
    if first.cached_tokens:
        raise Failed("not_new")
    if second.cached_tokens < len(prompt) - 1:
        raise Failed("not_found", f"{second.cached_tokens} / {len(prompt) - 1}")
    known = await _settled(edge, PackedTokens(pack_tokens(prompt)), salt, files=files)
    ram = file = compared = 0
    for where in known:
        hot = await _hot(edge, where)
        cold = await _cold(edge, where) if where.filed else None
        ram += _nbytes(hot)
        file += _nbytes(cold)
        if hot is not None and cold is not None:
            await asyncio.to_thread(_compare, hot, cold, edge.codec_states, limits)
            compared += 1
    if files and not file:
        raise Failed("no_file")
    return Outcome("ok", "", "", second.cached_tokens, ram, file, compared)


async def _prompt(edge: Edge) -> tuple[int, ...]:
    """A full block and one token more, which must be computed; fewer where the context ends."""
    assert edge.tokenizer is not None, "the server is ready"
    tokens = await edge.tokenizer.ask(Tokenize(TEXT, add_special=False, parse_special=False))
    count = min(edge.model.block_size + 1, edge.max_context - 1)
    return (tokens * (count // len(tokens) + 1))[:count]


async def _compute(edge: Edge, prompt: tuple[int, ...], salt: str) -> RequestRecord:
    """As any other request, but in no list and in no count."""
    assert edge.scheduler is not None, "the server is ready"
    request = Request("self-test", prompt, 1, salt=salt, model=edge.model.id, internal=True)
    stream: GenerationStream = Stream(8)
    async with stream:
        await edge.scheduler.ask(Submit(request, stream))
        async for item in stream:
            if isinstance(item, Ended):
                return item.record
    raise Failed("not_now", "the server stops")


async def _settled(
    edge: Edge, tokens: PackedTokens, salt: str, *, files: bool
) -> Sequence[Whereabouts]:
    """Where its blocks are, once those that get a file have it."""
    assert edge.cache is not None, "the server is ready"
    until = time.monotonic() + FILE_S
    while True:
        known = await edge.cache.ask(FindChain(tokens, salt))
        if not (files and any(where.coming for where in known)):
            return known
        if time.monotonic() > until:
            raise Failed("no_file")
        await asyncio.sleep(LOOK_S)


async def _hot(edge: Edge, where: Whereabouts) -> HostBlock | None:
    """Its bytes in RAM. None: it is not there, or another block has its place by now."""
    if where.block_id is None:
        return None
    assert edge.cache is not None and edge.runner is not None, "the server is ready"
    return await edge.runner.ask(ReadHot(where.block_id, where.ref.place is not None))


async def _cold(edge: Edge, where: Whereabouts) -> HostBlock:
    assert edge.reader is not None, "what has a file was written by somebody"
    outcome = await edge.reader.ask(ReadBlocks((where.ref,)))
    if not outcome.payloads:
        raise Failed("unreadable", outcome.reason)
    return outcome.payloads[0]


def _compare(
    hot: HostBlock, cold: HostBlock, specs: Sequence[StateSpec], limits: CacheLimits
) -> None:
    """A file holds the very bytes; of a state that a codec applies to, what the codec makes."""
    assert limits.writing is not None, "there is a file"
    recurrent = {spec.name for spec in specs if spec.is_recurrent}
    for before, after in zip(hot, cold, strict=True):
        wanted = bytes(before.data)
        if before.name in recurrent:
            wanted = _through(limits.writing.codec, before)
        if (before.name, before.shape) != (after.name, after.shape) or wanted != after.data:
            raise Failed("differs", before.name)


def _through(codec: str, tensor: HostTensor) -> bytes:
    state = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
    encoded = codecs.encode(codec, tensor.name, state)
    return codecs.decode(tensor.name, encoded.metadata, encoded.tensors).tobytes()


def _nbytes(block: HostBlock | None) -> int:
    return 0 if block is None else sum(tensor.nbytes for tensor in block)
