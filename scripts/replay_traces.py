"""Which eviction policy saves most? Replays traces against the hot tier's orders.

    python scripts/replay_traces.py [--trace FILE ...] [--make NAME ...] [--seed 1] [--json FILE]
    python scripts/replay_traces.py --make agents --write FILE

A trace is Mooncake's JSONL: ``timestamp`` in ms, ``input_length``, ``output_length`` and
``hash_ids``, one for each block of the input, equal only where everything before is equal too
<https://github.com/kvcache-ai/Mooncake>. Capacities are shares of the trace's working set, the
tokens of its different blocks. Requests are served one after the other. Compared are

    lru, gdsf    ``LruOrder`` and ``CostAwareOrder``
    infinite     nothing is ever given up
    belady       the leaf whose next use is farthest, and nothing stored whose own is farther:
                 most blocks found, if all are equally big; not the most seconds saved

The pool here is a light one that uses an order as the real one does. What it finds with ``lru``
and with ``gdsf`` is compared with what the real books find, block for block. Exit code 1 if they
differ, if anything is found in a trace without reuse, or if a policy finds more than an infinite
cache or, by more than 1 %, than Belady.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from omlx.cache.blocks import BlockHash, BlockId, CacheBlock, chain_hash, pack_tokens
from omlx.cache.eviction import CostAwareOrder, Entry, EvictionOrder, LeafFirstHeap, LruOrder
from omlx.cache.prefix_cache import BlockAwarePrefixCache
from omlx.cache.tickets import StoreWish

Piece = tuple[BlockHash, int, int]
"""A block of a request: its name, its first token, the token after its last one."""

ROOT = BlockHash(b"root")


class Request(NamedTuple):
    """A line of a trace."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: Sequence[int]


class Cost(NamedTuple):
    """Seconds to compute the token at a position: ``token_s + position_s * position``."""

    token_s: float
    position_s: float

    def of(self, start: int, stop: int) -> float:
        return (stop - start) * (self.token_s + self.position_s * (start + stop - 1) / 2)


class Text:
    """Tokens that grow at the end. Texts that begin alike have equal block ids as far as that."""

    def __init__(self, names: dict[object, int], block: int) -> None:
        self._names, self._block = names, block
        self._full: list[int] = []
        self._tail: tuple[tuple[int, int, int], ...] = ()
        self._num_tail = 0

    def grow(self, length: int, run: int | None = None) -> None:
        """Add tokens: the first of ``run``, or new ones."""
        run = self._name(None, len(self._names)) if run is None else run
        start = 0
        while start < length:
            take = min(length - start, self._block - self._num_tail)
            self._tail += ((run, start, take),)
            start, self._num_tail = start + take, self._num_tail + take
            if self._num_tail == self._block:
                self._full.append(self._name(self._full[-1:], self._tail))
                self._tail, self._num_tail = (), 0

    def ask(self, at_s: float, output_length: int) -> Request:
        """A request with all so far; the answer becomes part of the text."""
        length = len(self._full) * self._block + self._num_tail
        tail = [self._name(self._full[-1:], self._tail)] if self._tail else []
        request = Request(int(1000 * at_s), length, output_length, (*self._full, *tail))
        self.grow(output_length)
        return request

    def _name(self, parent: object, content: object) -> int:
        return self._names.setdefault((str(parent), content), len(self._names))


class Maker:
    """Makes traces; the same seed gives the same trace."""

    def __init__(self, seed: str, block: int) -> None:
        self.rng, self.block = random.Random(seed), block
        self._names: dict[object, int] = {}

    def begin(self, hours: float) -> tuple[Text, float]:
        return Text(self._names, self.block), self.rng.uniform(0, 3600 * hours)

    def around(self, median: float, spread: float, most: float) -> int:
        """A log-normal number, at least 1: most are small, some are big."""
        return max(1, int(min(most, median * math.exp(self.rng.gauss(0, spread)))))

    def chats(self, count: int, hours: float) -> list[Request]:
        """People talk for a few turns, pause, paste long texts now and then, some come back."""
        rng, trace = self.rng, []
        prompts = [(-1 - i, rng.randint(200, 1500)) for i in range(4)]
        for _ in range(count):
            text, at_s = self.begin(hours)
            run, length = rng.choices(prompts, weights=[8, 4, 2, 1])[0]
            text.grow(length, run)
            for _ in range(self.around(4, 0.9, 40)):
                pasted = self.around(2500, 0.6, 12_000) if rng.random() < 0.1 else 0
                text.grow(self.around(80, 1.0, 2000) + pasted)
                trace.append(text.ask(at_s, self.around(300, 0.7, 2000)))
                pause_s = self.around(60, 1.2, 1800)
                at_s += rng.uniform(1800, 7200) if rng.random() < 0.04 else pause_s
        return trace

    def agents(self, count: int, hours: float) -> list[Request]:
        """Long shared instructions, then a loop of tool calls that is never asked for again."""
        rng, trace = self.rng, []
        kinds = [(-101 - i, rng.randint(5000, 14_000)) for i in range(5)]
        for _ in range(count):
            text, at_s = self.begin(hours)
            run, length = rng.choices(kinds, weights=[5, 4, 3, 2, 1])[0]
            text.grow(length, run)
            text.grow(self.around(300, 1.0, 4000))
            for _ in range(self.around(12, 0.6, 50)):
                reply = self.around(150, 0.8, 2000)
                trace.append(text.ask(at_s, reply))
                text.grow(self.around(700, 1.1, 8000))
                at_s += reply / 30 + self.around(6, 1.0, 300)
        return trace

    def documents(self, count: int, hours: float, again: float) -> list[Request]:
        """Each is long and asked about once, some of them a second time."""
        rng, trace = self.rng, []
        for _ in range(count):
            text, at_s = self.begin(hours)
            text.grow(self.around(20_000, 0.5, 60_000))
            trace.append(text.ask(at_s, self.around(400, 0.5, 2000)))
            if rng.random() < again:
                text.grow(self.around(40, 0.5, 200))
                trace.append(text.ask(at_s + self.around(120, 1.0, 1800), 300))
        return trace


MAKERS: dict[str, Callable[[Maker], list[Request]]] = {
    "chats": lambda maker: maker.chats(250, 3),
    "agents": lambda maker: maker.agents(90, 2),
    "mixed": lambda maker: maker.chats(130, 3) + maker.agents(40, 3) + maker.documents(70, 3, 0.15),
    "no-reuse": lambda maker: maker.documents(120, 2, again=0),
}


def make(name: str, seed: int, block: int) -> list[Request]:
    return sorted(MAKERS[name](Maker(f"{name} {seed}", block)), key=lambda r: r.timestamp)


def read(path: Path) -> list[Request]:
    """Raises KeyError for a line that lacks a field."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    return [Request(*(row[name] for name in Request._fields)) for row in rows]


def cut(request: Request, block: int) -> list[Piece]:
    starts = range(0, request.input_length, block)
    return [
        (BlockHash(name.to_bytes(8, "little")), start, min(start + block, request.input_length))
        for name, start in zip(request.hash_ids, starts, strict=True)
    ]


class BeladyOrder(LeafFirstHeap):
    """The leaf whose next use is farthest; knows the future."""

    def __init__(self, trace: Iterable[Sequence[Piece]]) -> None:
        super().__init__()
        self.now = 0
        self._uses: dict[BlockHash | None, list[int]] = {}
        for index, blocks in enumerate(trace):
            for name, _, _ in blocks:
                self._uses.setdefault(name, []).append(index)

    def next_use(self, name: BlockHash | None) -> float:
        uses = self._uses[name]
        index = bisect_right(uses, self.now)
        return uses[index] if index < len(uses) else math.inf

    def rank(self, entry: Entry) -> float:
        return -self.next_use(entry.block.block_hash)

    def is_worth(self, name: BlockHash, victim: CacheBlock) -> bool:
        return self.next_use(name) < self.next_use(victim.block_hash)


class Pool:
    """A hot tier without payloads, of a limited number of tokens."""

    def __init__(self, order: EvictionOrder, limit: int, cost: Cost) -> None:
        self.order, self.limit, self.cost = order, limit, cost
        self.used = 0
        self.blocks: dict[BlockHash, CacheBlock] = {}

    def serve(self, blocks: Sequence[Piece]) -> int:
        """Look up, compute the rest, store it. Returns how many blocks were found."""
        known = 0
        while known < len(blocks) and blocks[known][0] in self.blocks:
            known += 1
        chain = [self.blocks[name] for name, _, _ in blocks[:known]]
        for block in chain:
            self.order.hold(block)
        for block in reversed(chain):
            self.order.release(block)
        parent = blocks[known - 1][0] if known else ROOT
        for name, start, stop in blocks[known:]:
            self.order.pin(parent)
            block = self._store(name, stop - start)
            self.order.unpin(parent)
            if block is None:
                break
            self.order.add(block, parent, self.cost.of(start, stop))
            chain.append(block)
            parent = name
        for block in reversed(chain):
            self.order.touch(block)
        return known

    def _store(self, name: BlockHash, size: int) -> CacheBlock | None:
        while self.used + size > self.limit:
            victim = self.order.front
            if victim is None or victim.block_hash is None:
                return None
            if isinstance(self.order, BeladyOrder) and not self.order.is_worth(name, victim):
                return None
            self.order.forget(victim)
            del self.blocks[victim.block_hash]
            self.used -= victim.nbytes
        self.used += size
        return self.blocks.setdefault(name, CacheBlock(BlockId(0), block_hash=name, nbytes=size))


class Books:
    """The real hot tier's books, with one token for each block of a trace."""

    def __init__(self, order: Callable[[], EvictionOrder], limit_blocks: int, cost: Cost) -> None:
        self._cost = cost
        self._cache = BlockAwarePrefixCache(
            namespace="replay",
            block_size=1,
            bytes_per_token=1,
            hot_limit_bytes=limit_blocks,
            ssd_limit_bytes=0,
            pending_limit_bytes=0,
            order=order,
        )

    def serve(self, request: Request) -> int:
        # The last token of a prompt is never reused: here it stands behind the trace's blocks.
        grant = self._cache.look_up(pack_tokens([*request.hash_ids, 2**32 - 1]))
        self._cache.pool.release([ref.block_id for ref in grant.blocks if ref.block_id is not None])
        chain = list(grant.chain)
        for name in request.hash_ids[len(chain) :]:
            parent, tokens = chain[-1] if chain else grant.root, pack_tokens([name])
            wish = StoreWish(
                parent,
                chain_hash(parent, tokens),
                tokens,
                persist=False,
                cost_s=self._cost.of(len(chain), len(chain) + 1),
            )
            ticket = self._cache.store(wish)
            if ticket is None:
                break
            self._cache.seal(wish, ticket.block_id, stored=True, writing=False, write=False)
            chain.append(wish.block_hash)
        self._cache.touch(chain)
        return len(grant.blocks)


def books_agree(
    trace: Sequence[Request], share: float, order: Callable[[], EvictionOrder], cost: Cost
) -> bool:
    """Whether the light pool finds what the real books find, request by request."""
    units = [Request(0, len(r.hash_ids), 0, r.hash_ids) for r in trace]
    limit = int(share * len({name for unit in units for name in unit.hash_ids}))
    pool, books = Pool(order(), limit, cost), Books(order, limit, cost)
    return all(pool.serve(cut(unit, 1)) == books.serve(unit) for unit in units)


class Row(NamedTuple):
    trace: str
    share: float
    policy: str
    hit_tokens: int
    input_tokens: int
    saved_s: float


def cost_of(options: argparse.Namespace) -> Cost:
    return Cost(options.token_ms / 1e3, options.position_us / 1e6)


def policies(options: argparse.Namespace) -> dict[str, Callable[[], EvictionOrder]]:
    """The orders that the server can use."""
    return {"lru": LruOrder, "gdsf": lambda: CostAwareOrder(options.uses_max)}


def replay(name: str, trace: Sequence[Request], options: argparse.Namespace) -> list[Row]:
    cost = cost_of(options)
    cuts = [cut(request, options.block) for request in trace]
    input_tokens = sum(request.input_length for request in trace)
    working_set = sum({name: stop - start for c in cuts for name, start, stop in c}.values())
    orders = {**policies(options), "belady": lambda: BeladyOrder(cuts)}
    plans = [(share, policy) for share in options.shares for policy in orders]
    rows = []
    for share, policy in [*plans, (1.0, "infinite")]:
        order = orders.get(policy, LruOrder)()
        pool = Pool(order, int(share * working_set) + (policy == "infinite"), cost)
        hit_tokens, saved_s = 0, 0.0
        for index, (request, blocks) in enumerate(zip(trace, cuts, strict=True)):
            if isinstance(order, BeladyOrder):
                order.now = index
            known = pool.serve(blocks)
            # One token must be computed, or there is nothing to sample from.
            hit = min(request.input_length - 1, blocks[known - 1][2]) if known else 0
            hit_tokens, saved_s = hit_tokens + hit, saved_s + cost.of(0, hit)
        order.check()
        rows.append(Row(name, share, policy, hit_tokens, input_tokens, saved_s))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown: token hit rate, then seconds saved."""
    titles = "trace|share|hit: lru|gdsf|belady|infinite|saved: lru|gdsf|belady|infinite"
    lines = [f"|{titles}|", "|---" * 10 + "|"]
    by = {(row.trace, row.share, row.policy): row for row in rows}
    for trace, share in dict.fromkeys((r.trace, r.share) for r in rows if r.policy == "lru"):
        cells = [by[trace, share, policy] for policy in ("lru", "gdsf", "belady")]
        cells.append(by[trace, 1.0, "infinite"])
        rates = [f"{cell.hit_tokens / cell.input_tokens:.1%}" for cell in cells]
        saved = [f"{cell.saved_s:,.0f} s" for cell in cells]
        lines.append(f"| {trace} | {share:.0%} | {' | '.join(rates + saved)} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], width: int = 60) -> str:
    """Seconds saved, as a share of what an infinite cache saves."""
    most = {row.trace: row.saved_s for row in rows if row.policy == "infinite"}
    return "\n".join(
        f"{row.trace:>9.9} {row.share:4.0%} {row.policy:>7} {'█' * round(width * part)} {part:.1%}"
        for row in rows
        if row.policy != "infinite" and most[row.trace]
        for part in [row.saved_s / most[row.trace]]
    )


def faults(rows: Sequence[Row]) -> list[str]:
    """What must not be, and is."""
    found = []
    by = {(row.trace, row.share, row.policy): row.hit_tokens for row in rows}
    for row in rows:
        if row.trace == "no-reuse" and row.hit_tokens:
            found.append(f"{row.trace} {row.share:.0%}: {row.policy} finds tokens")
        if row.hit_tokens > by[row.trace, 1.0, "infinite"]:
            found.append(f"{row.trace} {row.share:.0%}: {row.policy} beats an infinite cache")
        # Blocks at the end of a prompt are smaller, so Belady is optimal but for those.
        belady = by.get((row.trace, row.share, "belady"), row.hit_tokens)
        if row.hit_tokens > 1.01 * belady:
            found.append(f"{row.trace} {row.share:.0%}: {row.policy} beats Belady")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, nargs="*", default=[])
    parser.add_argument("--make", nargs="*", choices=list(MAKERS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--block", type=int, default=512, help="tokens in a block of the trace")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--token-ms", type=float, default=9.0)
    parser.add_argument("--position-us", type=float, default=2.0)
    parser.add_argument("--uses-max", type=int, default=2, help="uses that gdsf counts at most")
    parser.add_argument("--write", type=Path, help="write the first trace here, replay nothing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = options.make or ([] if options.trace else list(MAKERS))
    traces = {path.stem: read(path) for path in options.trace}
    traces |= {name: make(name, options.seed, options.block) for name in names}
    if options.write:
        lines = [json.dumps(request._asdict()) + "\n" for request in next(iter(traces.values()))]
        options.write.write_text("".join(lines), "utf-8")
        return 0
    rows = [row for name, trace in traces.items() for row in replay(name, trace, options)]
    found = faults(rows)
    for name, trace in traces.items():
        for policy, order in policies(options).items():
            if not books_agree(trace, options.shares[0], order, cost_of(options)):
                found.append(f"{name}: the light pool and the real books differ with {policy}")
    print(table(rows), plot(rows), *(f"FAULT {fault}" for fault in found), sep="\n\n")
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1), "utf-8")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
