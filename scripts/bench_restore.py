"""From block files to arrays that the engine can use, against reading the same files raw.

    python scripts/bench_restore.py [--tokens N] [--threads N ...] [--folder FOLDER] [--json FILE]

Ours is the reader as the server runs it: several files in flight, each read, checked and verified
by its checksums. ``arrays`` ends with what the RAM tier keeps and the engine restores from, ``row``
with the blocks joined in the caches of a row (a checkpoint has no such part). Raw is one ``preadv``
of each whole file into memory of its own, which is kept until all are read: any reader has to own
the bytes that it hands over. It is done in one thread, as a plain loop over the files would, and in
as many threads of the same kind as ours has. All ways take memory from one heap that keeps what was
freed, as in the server (``engine/host_memory``): so none has pages cleared first.
``floor`` is the least that a reader can do that proves what it read: ``preadv`` and xxh3-128 in
pieces of 512 kB and, for states, one pass that looks for values that are not finite; no header, no
actor, nothing else. What ours takes beyond it is ours to save.

Warm: the files are in the page cache. Cold: they were synced, and dropped from it by
``posix_fadvise(POSIX_FADV_DONTNEED)`` before each round; what a hypervisor or the drive keeps is
out of our hands. Rounds of the ways alternate; medians of 9 are shown, after one that is not
counted. Layers, heads and dtype are those of SmolLM2-135M in float32; a checkpoint has 18
recurrent layers of 16 heads of 128 x 128 in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from omlx import blas

BLOCK = 256
ROUNDS = 9
PIECE_BYTES = 512 << 10
NAMESPACE = "00" * 8
KINDS = ("kv", "checkpoint")


def config_of(kind: str) -> Any:
    from omlx.cache.hybrid_cache import LayerConfig, LayerKind, ModelCacheConfig, StateSpec

    if kind == "kv":
        layer = LayerConfig(LayerKind.KV, kv_heads=3, key_dim=64, value_dim=64, dtype="float32")
        return ModelCacheConfig((layer,) * 30)
    return ModelCacheConfig(
        tuple(
            LayerConfig(
                LayerKind.RECURRENT,
                states=(
                    StateSpec(f"gdn.{index}.0", (3, 6144), "float32"),
                    StateSpec(f"gdn.{index}.1", (16, 128, 128), "float32"),
                ),
            )
            for index in range(18)
        )
    )


class Bench:
    """The files of one kind, and the two ways to read them."""

    def __init__(self, kind: str, tokens: int, threads: int, folder: Path) -> None:
        import numpy as np

        from omlx.actors import ssd_reader
        from omlx.actors.daemon_threads import DaemonThreads
        from omlx.cache.block_file import HostTensor, Identity
        from omlx.cache.blocks import chain_hash, pack_tokens, root_hash, state_hash
        from omlx.cache.checkpoints import Place
        from omlx.cache.tickets import BlockRef
        from omlx.disk.block_files import BlockFiles
        from omlx.disk.directory import CacheDirectory
        from omlx.engine.kv import BlockStore

        self.kind, self.config = kind, config_of(kind)
        self.files = BlockFiles(CacheDirectory(folder), NAMESPACE, self.config, BLOCK)
        self.files.prepare()
        self.store = BlockStore(self.config, host_copies=on_cpu())
        place = None if kind == "kv" else Place.LAST
        self.refs: list[BlockRef] = []
        rng = np.random.default_rng(1)
        parent = root_hash(NAMESPACE)
        for start in range(0, tokens, BLOCK):
            count = min(BLOCK, tokens - start)
            packed = pack_tokens([start] * count)
            block = chain_hash(parent, packed)
            name = block if place is None else state_hash(parent, packed)
            specs = self.config.tensors if place is None else self.config.states
            payload = []
            for spec in specs:
                shape = spec.shape(count) if place is None else spec.shape
                data = rng.standard_normal(shape, np.float32)
                payload.append(HostTensor(spec.name, spec.dtype, shape, data.data.cast("B")))
            self.files.write(Identity(NAMESPACE, name, parent, packed, place), tuple(payload))
            self.refs.append(BlockRef(name, parent, packed, count, None, True, place))
            parent = block
        self.paths = [str(path) for path in sorted(folder.rglob("*.safetensors"))]
        self.nbytes = sum(Path(path).stat().st_size for path in self.paths)
        ssd_reader.READ_THREADS = threads
        self.pool = DaemonThreads(threads, "bench-read")
        self.one = DaemonThreads(1, "bench-raw")

    async def start(self) -> None:
        from omlx.actors.ssd_reader import SsdReader
        from omlx.kernel.actor import run
        from omlx.kernel.mailbox import Mailbox, Ref

        mailbox = Mailbox(8)
        actor = SsdReader(self.files, Ref("paged_cache", Mailbox(8)), None, self.pool, self.one)
        self.reader: Any = Ref("ssd_reader", mailbox)
        self.running = asyncio.create_task(run(actor, mailbox))

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.pool.close(0.0)
        self.one.close(0.0)

    def drop(self) -> None:
        os.sync()
        for path in self.paths:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    async def raw(self, threads: Any) -> None:
        await asyncio.gather(*(threads(read_raw, path) for path in self.paths))

    async def floor(self) -> None:
        read = read_proved if self.kind == "kv" else read_proved_finite
        await asyncio.gather(*(self.pool(read, path) for path in self.paths))

    async def arrays(self) -> list[Any]:
        from omlx.actors.disk_messages import ReadBlocks
        from omlx.engine.kv import from_host, views_of

        outcome = await self.reader.ask(ReadBlocks(tuple(self.refs)))
        assert len(outcome.payloads) == len(self.refs), outcome.reason
        ready = views_of if self.store.host_copies else from_host
        return [ready(payload) for payload in outcome.payloads]

    async def row(self) -> None:
        import mlx.core as mx
        from mlx_lm.models.cache import BatchKVCache

        blocks = await self.arrays()
        if self.kind == "kv":
            caches: list[Any] = [BatchKVCache([0]) for _ in self.config.layers]
            self.store.restore(caches, blocks, [ref.take for ref in self.refs])
            mx.eval([cache.state for cache in caches])

    async def measure(self, *, cold: bool) -> dict[str, float]:
        """Megabytes a second of each way."""
        ways: dict[str, Callable[[], Awaitable[Any]]] = {
            "raw_one_thread": lambda: self.raw(self.one),
            "raw": lambda: self.raw(self.pool),
            "floor": self.floor,
            "arrays": self.arrays,
            "row": self.row,
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS + 1):
            for name, work in ways.items():
                if cold:
                    self.drop()
                started = time.perf_counter()
                await work()
                times[name].append(time.perf_counter() - started)
        return {
            name: self.nbytes / statistics.median(taken[1:]) / 1e6 for name, taken in times.items()
        }


def read_raw(path: str) -> Any:
    import numpy as np

    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        buffer = np.empty(size, np.uint8).data
        done = 0
        while done < size:
            done += os.preadv(fd, [buffer[done:]], done)
        return buffer
    finally:
        os.close(fd)


def read_proved(path: str, look: Callable[[memoryview], object] = len) -> Any:
    import numpy as np
    import xxhash

    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        buffer, digest, done = np.empty(size, np.uint8).data, xxhash.xxh3_128(), 0
        while done < size:
            count = os.preadv(fd, [buffer[done : done + PIECE_BYTES]], done)
            digest.update(buffer[done : done + count])
            look(buffer[done : done + count])
            done += count
        return buffer, digest.hexdigest()
    finally:
        os.close(fd)


def read_proved_finite(path: str) -> Any:
    import numpy as np

    from omlx.cache.finite import all_finite

    def look(piece: memoryview) -> bool:
        return all_finite(np.frombuffer(piece[: len(piece) // 4 * 4], np.float32))

    return read_proved(path, look)


def on_cpu() -> bool:
    import mlx.core as mx

    return mx.default_device().type == mx.DeviceType.cpu


async def bench(kind: str, threads: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="omlx-bench-", dir=arguments.folder) as folder:
        one = Bench(kind, arguments.tokens, threads, Path(folder))
        await one.start()
        for cold in (False, True):
            mb_s = await one.measure(cold=cold)
            rows.append(
                {
                    "kind": kind,
                    "threads": threads,
                    "page_cache": "cold" if cold else "warm",
                    "mbytes": one.nbytes / 1e6,
                    **{f"{name}_mb_s": value for name, value in mb_s.items()},
                    "arrays_of_raw": mb_s["arrays"] / mb_s["raw"],
                    "arrays_of_raw_one_thread": mb_s["arrays"] / mb_s["raw_one_thread"],
                    "floor_of_raw": mb_s["floor"] / mb_s["raw"],
                    "row_of_raw": mb_s["row"] / mb_s["raw"],
                }
            )
        await one.stop()
    return rows


def main() -> None:
    blas.preload_fast_blas()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from omlx.engine.host_memory import keep_freed_memory

    keep_freed_memory()
    print(
        "MB/s        threads  page     raw 1      raw    floor  of raw"
        "   arrays  of raw of raw 1     row  of raw"
    )
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        for threads in arguments.threads:
            for row in asyncio.run(bench(kind, threads, arguments)):
                rows.append(row)
                print(
                    f"{row['kind']:12}{row['threads']:7}  {row['page_cache']:5}"
                    f"{row['raw_one_thread_mb_s']:9,.0f}{row['raw_mb_s']:9,.0f}"
                    f"{row['floor_mb_s']:9,.0f}{row['floor_of_raw']:8.0%}"
                    f"{row['arrays_mb_s']:9,.0f}{row['arrays_of_raw']:8.0%}"
                    f"{row['arrays_of_raw_one_thread']:8.0%}"
                    f"{row['row_mb_s']:9,.0f}{row['row_of_raw']:8.0%}",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
