"""Reads run beside each other in real threads, can be stopped, and never wait for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from omlx.actors import ssd_reader
from omlx.actors.daemon_threads import DaemonThreads
from omlx.actors.disk_messages import (
    ReadBlocks,
    ScanFiles,
    SsdReaderMessage,
    SsdWriterMessage,
    StopReading,
)
from omlx.actors.messages import PagedCacheMessage, ReaderStuck
from omlx.actors.ssd_reader import READ_THREADS, SsdReader
from omlx.cache.block_file import HostTensor, Identity
from omlx.cache.blocks import BlockHash, chain_hash, pack_tokens, root_hash
from omlx.cache.hybrid_cache import LayerConfig, LayerKind, ModelCacheConfig
from omlx.cache.tickets import BlockRef
from omlx.core.plan import HostBlock, LostFile
from omlx.core.reads import ReadOutcome
from omlx.disk.block_files import BlockFiles, Files
from omlx.disk.directory import CacheDirectory
from omlx.kernel.actor import run
from omlx.kernel.mailbox import Envelope, Mailbox, Ref
from omlx.kernel.message import ActorGone, Ask, Stop

NAMESPACE = "ab" * 8
CONFIG = ModelCacheConfig((LayerConfig(LayerKind.KV, 2, 4, 4, "float32"),))
PATIENCE_S = 20.0
"""A test that waits so long has failed."""


def chain(count: int, first: int = 0) -> tuple[BlockRef, ...]:
    refs: list[BlockRef] = []
    parent = root_hash(NAMESPACE)
    for number in range(count):
        tokens = pack_tokens([first, number])
        name = chain_hash(parent, tokens)
        refs.append(BlockRef(name, parent, tokens, 2, None, cold=True))
        parent = name
    return tuple(refs)


def identity(ref: BlockRef) -> Identity:
    return Identity(NAMESPACE, ref.block_hash, ref.parent, ref.tokens)


def payload(ref: BlockRef) -> HostBlock:
    return tuple(
        HostTensor(spec.name, spec.dtype, spec.shape(2), memoryview(ref.block_hash * 2))
        for spec in CONFIG.tensors
    )


class Gated:
    """Real files, and a gate before each read that a test may keep shut."""

    namespace = NAMESPACE

    def __init__(self, folder: Path) -> None:
        self.files = BlockFiles(CacheDirectory(folder), NAMESPACE, CONFIG, 2)
        self.files.prepare()
        self._gates: dict[BlockHash, threading.Event] = {}
        self.census_gate = threading.Event()
        self.census_gate.set()
        self.begun: list[BlockHash] = []
        self.at: dict[BlockHash, threading.Event] = {}
        """Set when somebody stands before the gate."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)

    def write(self, refs: tuple[BlockRef, ...]) -> None:
        for ref in refs:
            self.files.write(identity(ref), payload(ref))

    def shut(self, *refs: BlockRef) -> None:
        for ref in refs:
            self._gates[ref.block_hash] = threading.Event()
            self.at[ref.block_hash] = threading.Event()

    def open(self, *refs: BlockRef) -> None:
        for ref in refs:
            self._gates[ref.block_hash].set()

    def read(self, expected: Identity) -> HostBlock:
        name = expected.block_hash
        self.begun.append(name)
        if name in self._gates:
            self.at[name].set()
            assert self._gates[name].wait(PATIENCE_S), "nobody opened the gate"
        return self.files.read(expected)

    def prepare(self) -> None:
        assert self.census_gate.wait(PATIENCE_S), "nobody opened the gate"
        self.files.prepare()


class Desk:
    """A reader that runs, with what it tells the cache."""

    def __init__(self, files: Gated, writer: Ref[SsdWriterMessage] | None = None) -> None:
        self.files = files
        self.mailbox = Mailbox(64)
        self.reader: Ref[SsdReaderMessage] = Ref("ssd_reader", self.mailbox)
        self.to_cache = Mailbox(64)
        cache: Ref[PagedCacheMessage] = Ref("paged_cache", self.to_cache)
        self.pool = DaemonThreads(READ_THREADS, "test-read")
        self.census = DaemonThreads(1, "test-census")
        self.actor = SsdReader(cast(Files, files), cache, writer, self.pool, self.census)

    def ask(self, message: Ask[Any]) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.reader.ask(message))

    def read(self, refs: tuple[BlockRef, ...], number: int = 0) -> asyncio.Future[ReadOutcome]:
        return self.ask(ReadBlocks(refs, number))

    async def stands_before(self, *refs: BlockRef) -> None:
        for ref in refs:
            stands = await asyncio.to_thread(self.files.at[ref.block_hash].wait, PATIENCE_S)
            assert stands, "nobody came to the gate"


def with_reader(
    files: Gated,
    work: Callable[[Desk], Coroutine[Any, Any, None]],
    writer: Ref[SsdWriterMessage] | None = None,
) -> None:
    async def main() -> None:
        desk = Desk(files, writer)
        running = asyncio.create_task(run(desk.actor, desk.mailbox))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await work(desk)
        finally:
            desk.mailbox.put_beyond_capacity(Envelope(Stop(), takes_slot=False))
            await running
            desk.pool.close(1.0)
            desk.census.close(1.0)

    asyncio.run(main())


def read_ok(refs: tuple[BlockRef, ...], outcome: ReadOutcome) -> None:
    assert (outcome.lost, outcome.stuck) == (None, False)
    assert same(outcome.payloads, refs)


def same(payloads: tuple[HostBlock, ...], refs: tuple[BlockRef, ...]) -> bool:
    return [[bytes(t.data) for t in block] for block in payloads] == [
        [bytes(t.data) for t in payload(ref)] for ref in refs
    ]


@contextmanager
def deadline(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(ssd_reader, "STUCK_S", seconds)
        yield


def test_a_small_read_overtakes_a_large_one(tmp_path: Path) -> None:
    files = Gated(tmp_path)
    large, small = chain(9), chain(1, first=7)
    files.write((*large, *small))
    files.shut(*large[: READ_THREADS - 1])

    async def work(desk: Desk) -> None:
        first = desk.read(large)
        await desk.stands_before(*large[: READ_THREADS - 1])

        read_ok(small, await desk.read(small))

        assert not first.done()
        files.open(*large[: READ_THREADS - 1])
        read_ok(large, await first)

    with_reader(files, work)


def test_several_files_of_one_read_are_read_beside_each_other(tmp_path: Path) -> None:
    files = Gated(tmp_path)
    refs = chain(READ_THREADS)
    files.write(refs)
    files.shut(*refs)

    async def work(desk: Desk) -> None:
        reading = desk.read(refs)
        await desk.stands_before(*refs)
        files.open(*reversed(refs))
        read_ok(refs, await reading)

    with_reader(files, work)


def test_a_census_under_way_does_not_hold_up_reads(tmp_path: Path) -> None:
    files = Gated(tmp_path)
    refs = chain(3)
    files.write(refs)
    files.census_gate.clear()

    async def work(desk: Desk) -> None:
        counting = desk.ask(ScanFiles(begin=True))

        read_ok(refs, await desk.read(refs))

        assert not counting.done()
        files.census_gate.set()
        await counting

    with_reader(files, work)


def test_at_the_first_damaged_file_the_rest_is_not_read(tmp_path: Path) -> None:
    """B10, B49: and it is removed, or the next request would find it again."""
    files = Gated(tmp_path)
    refs = chain(20)
    files.write(refs)
    path = next(tmp_path.rglob(f"{refs[1].block_hash.hex()}*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    files.shut(*refs[2:])

    async def work(desk: Desk) -> None:
        outcome = await desk.read(refs)

        assert same(outcome.payloads, refs[:1])
        assert outcome.lost == LostFile(refs[1].block_hash, corrupt=True)
        assert not path.exists()
        files.open(*refs[2:])
        read_ok(refs[:1], await desk.read(refs[:1]))
        assert len(files.begun) - 1 <= 2 + READ_THREADS + 1

    with_reader(files, work)


def test_a_file_that_vanished_is_lost_and_not_damaged(tmp_path: Path) -> None:
    """B49."""
    files = Gated(tmp_path)
    refs = chain(4)
    files.write(refs[:2])
    files.write(refs[3:])

    async def work(desk: Desk) -> None:
        outcome = await desk.read(refs)

        assert same(outcome.payloads, refs[:2])
        assert outcome.lost == LostFile(refs[2].block_hash, corrupt=False)

    with_reader(files, work)


def test_a_read_that_is_stopped_ends_with_the_files_in_flight(tmp_path: Path) -> None:
    """B35."""
    files = Gated(tmp_path)
    refs = chain(50)
    files.write(refs)
    files.shut(*refs[:READ_THREADS])

    async def work(desk: Desk) -> None:
        reading = desk.read(refs, number=5)
        await desk.stands_before(*refs[:READ_THREADS])

        assert desk.reader.offer(StopReading(5))
        read_ok((), await desk.read(()))  # it has heard it
        files.open(*refs[:READ_THREADS])
        outcome = await reading

        begun = READ_THREADS + 1  # one lay ready
        assert same(outcome.payloads, refs[:begun])
        assert len(files.begun) == begun

    with_reader(files, work)


def test_a_hung_read_is_a_miss_by_its_deadline_and_the_tier_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K7: the file stays, other reads go on."""
    files = Gated(tmp_path)
    hung, others = chain(2), chain(3, first=7)
    files.write((*hung, *others))
    files.shut(hung[0])

    async def work(desk: Desk) -> None:
        outcome = await desk.read(hung)

        assert outcome.stuck
        assert (outcome.payloads, outcome.lost) == ((), None)
        told = (await desk.to_cache.get()).message
        assert isinstance(told, ReaderStuck)
        read_ok(others, await desk.read(others))
        files.open(hung[0])
        read_ok(hung, await desk.read(hung))

    with deadline(monkeypatch, 0.5):
        with_reader(files, work)


def test_while_all_threads_hang_a_read_is_a_miss_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Gated(tmp_path)
    hung, other = chain(READ_THREADS), chain(1, first=7)
    files.write((*hung, *other))
    files.shut(*hung)

    async def work(desk: Desk) -> None:
        assert (await desk.read(hung)).stuck

        assert (await desk.read(other)).stuck
        assert other[0].block_hash not in files.begun

        files.open(*hung)
        while (await desk.read(other)).stuck:
            pass  # until one has come back

    with deadline(monkeypatch, 0.5):
        with_reader(files, work)


def test_a_block_that_waits_to_be_written_comes_from_the_writer(tmp_path: Path) -> None:
    files = Gated(tmp_path)
    waiting, written = chain(2)
    queued = BlockRef(
        waiting.block_hash, waiting.parent, waiting.tokens, 2, None, cold=True, queued=True
    )
    just_written = BlockRef(
        written.block_hash, written.parent, written.tokens, 2, None, cold=True, queued=True
    )
    files.write((written,))
    mailbox = Mailbox(8)

    async def work(desk: Desk) -> None:
        reading = desk.read((queued, just_written))
        for answer in (payload(waiting), None):
            (await mailbox.get()).answer(answer)

        read_ok((waiting, written), await reading)

        assert files.begun == [written.block_hash]

    with_reader(files, work, Ref("ssd_writer", mailbox))


def test_a_bug_in_a_thread_is_the_readers_and_nobody_waits(tmp_path: Path) -> None:
    files = Gated(tmp_path)
    refs = chain(1)

    def broken(expected: Identity) -> HostBlock:
        raise ZeroDivisionError

    files.read = broken

    async def main() -> None:
        desk = Desk(files)
        running = asyncio.create_task(run(desk.actor, desk.mailbox))
        reading = desk.read(refs)
        with pytest.raises(ZeroDivisionError):
            await running
        with pytest.raises(ActorGone):
            await reading
        desk.pool.close(1.0)
        desk.census.close(1.0)

    asyncio.run(main())


def test_the_end_of_the_process_does_not_wait_for_a_thread() -> None:
    async def main() -> None:
        threads = DaemonThreads(1, "test-hung")
        gate, begun = threading.Event(), threading.Event()

        def hang() -> None:
            begun.set()
            gate.wait(PATIENCE_S)

        threads(hang)
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        (thread,) = (t for t in threading.enumerate() if t.name == "test-hung-0")

        assert thread.daemon
        assert not threads.close(0.0), "it hangs"
        gate.set()
        await asyncio.to_thread(thread.join, PATIENCE_S)
        assert not thread.is_alive()

    asyncio.run(main())
