"""What the cache itself costs: look-up, commit, and the copy of a restore.

    python scripts/bench_cache.py [--model FOLDER] [--json FILE]

Look-up and commit are measured on the books alone, without payloads. The restore is measured on
the given model's own KV (the demo model by default), against NumPy copying as many bytes in the
same run; warm-up rounds are not counted, medians are shown.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omlx import blas

BLOCK = 256


def median_ms(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def books(rows: dict[str, Any]) -> None:
    """A prompt of 100,000 tokens over a pool of 10,000 blocks."""
    from omlx.cache.blocks import PackedTokens, chain_hash, pack_tokens, root_hash
    from omlx.cache.prefix_cache import BlockAwarePrefixCache
    from omlx.cache.tickets import StoreWish

    cache = BlockAwarePrefixCache(
        namespace="bench",
        block_size=BLOCK,
        bytes_per_token=1,
        hot_limit_bytes=1 << 40,
        ssd_limit_bytes=0,
        pending_limit_bytes=0,
    )
    rng = random.Random(1)
    root = root_hash("bench")
    cache.pool.release(())
    cache.look_up(pack_tokens([1, 2]))  # makes the root known
    commits: list[float] = []

    def commit(parent: Any, tokens: PackedTokens) -> Any:
        wish = StoreWish(parent, chain_hash(parent, tokens), tokens, True)
        started = time.perf_counter()
        ticket = cache.store(wish)
        assert ticket is not None
        cache.seal(wish, ticket.block_id, stored=True, writing=False, write=False)
        commits.append(1e6 * (time.perf_counter() - started))
        return wish.block_hash

    prompt = [rng.randrange(50000) for _ in range(100_000)]
    parent = root
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        parent = commit(parent, pack_tokens(prompt[start : start + BLOCK]))
    while cache.pool.num_cached < 10_000:
        parent = root
        for _ in range(rng.randrange(1, 60)):
            parent = commit(parent, pack_tokens(rng.randrange(50000) for _ in range(BLOCK)))

    def look_up() -> None:
        grant = cache.look_up(pack_tokens(prompt))
        assert grant.num_cached >= 99_000
        cache.pool.release([b.block_id for b in grant.blocks if b.block_id is not None])

    rows["look_up_100k_tokens_10k_blocks_ms"] = median_ms(look_up, 30)
    rows["commit_one_block_us"] = statistics.median(commits)
    rows["commit_one_block_p99_us"] = statistics.quantiles(commits, n=100)[98]


def restore(model: Path, tokens: int, rows: dict[str, Any]) -> None:
    """RAM to a live cache, against the machine's own copy bandwidth."""
    import mlx.core as mx
    import numpy as np
    from in_process import InProcess

    from omlx.engine.kv import fresh_caches, leaves

    bench = InProcess(model)
    store, config = bench.engine.store, bench.loaded.cache
    takes = [BLOCK] * (tokens // BLOCK) + [tokens % BLOCK] * (tokens % BLOCK > 0)
    blocks = [
        tuple(
            mx.random.normal(spec.shape(take)).astype(getattr(mx, spec.dtype))
            for spec in config.tensors
        )
        for take in takes
    ]
    mx.eval(blocks)
    nbytes = tokens * config.bytes_per_token

    def put_back() -> None:
        caches = fresh_caches(bench.loaded.model)
        store.restore(caches, blocks, takes)
        mx.eval([cache.state for cache in leaves(caches)])

    source = np.random.default_rng(1).random(nbytes // 8)
    target = np.empty_like(source)

    def copy() -> None:
        np.copyto(target, source)

    for work in (put_back, copy, put_back, copy):
        work()
    restores, copies = [], []
    for _ in range(15):  # interleaved, so that a busy moment hits both
        restores.append(median_ms(put_back, 1))
        copies.append(median_ms(copy, 1))
    restore_ms, copy_ms = statistics.median(restores), statistics.median(copies)
    rows["restore_tokens"] = tokens
    rows["restore_bytes"] = nbytes
    rows["restore_ms"] = restore_ms
    rows["restore_gb_s"] = nbytes / restore_ms / 1e6
    rows["numpy_copy_gb_s"] = nbytes / copy_ms / 1e6
    rows["restore_of_copy"] = copy_ms / restore_ms


def main() -> None:
    blas.preload_fast_blas()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    books(rows)
    if arguments.model:
        restore(arguments.model, arguments.tokens, rows)
    for name, value in rows.items():
        print(f"{name:40} {value:,.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
