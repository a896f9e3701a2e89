"""One request being generated, and the states it goes through.

WAITING -> LOOKING -> (RESTORING ->) READY -> PREFILL -> DECODE -> CLOSING -> gone
   |          |            |           |       ^ |                   ^
   |          |            |           |       | |                   |
   +-> FORKING --------------------------------+ |                   |
   |      |   |            |           |         |                   |
   +------+---+------------+-----------+---------+--- cancel, fault -+

When memory is short a sequence with a slot goes back to the queue: CLOSING -> WAITING.

WAITING     no slot yet; its cold blocks may be read already
LOOKING     the cache is asked for its prefix
RESTORING   cold blocks of its prefix are being read
READY       the engine makes a row of it in the next step, or in parts in the next ones
FORKING     another choice of its request computes the prompt for it
PREFILL     its prompt is computed, chunk by chunk, up to its last token
DECODE      each step feeds its last token and samples the next
CLOSING     it has ended; what it computed is stored before its end is told
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from omlx.cache.blocks import (
    TOKEN_BYTES,
    BlockHash,
    PackedTokens,
    chain_hash,
    num_tokens,
    pack_tokens,
    state_hash,
    unpack_tokens,
)
from omlx.cache.checkpoints import Place, cuts, next_cut
from omlx.cache.tickets import BlockRef, Grant, Reason, ReuseEnded, StoreWish
from omlx.core.plan import Admit, Fork, HostBlock, Load, Restore, Sampling, Uid
from omlx.core.request import Request
from omlx.core.text import TextStream

NOT_LOOKED_UP = ReuseEnded(Reason.DISABLED, 0)


class State(Enum):
    WAITING = auto()
    LOOKING = auto()
    RESTORING = auto()
    READY = auto()
    FORKING = auto()
    PREFILL = auto()
    DECODE = auto()
    CLOSING = auto()


@dataclass(slots=True)
class Times:
    """Seconds on the scheduler's clock; None: has not happened."""

    submitted: float
    looked_up: float | None = None
    granted: float | None = None
    restored: float | None = None
    first_token: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class FirstRun:
    """Of a sequence that gave its row up: recomputing what it had is no hit and no miss."""

    times: Times
    reuse_ended: ReuseEnded


@dataclass(slots=True, eq=False)
class Sequence:
    uid: Uid
    request: Request
    text: TextStream
    times: Times
    index: int = 0
    """Which choice of its request it is. Choice 0 leads: it computes the prompt."""
    state: State = State.WAITING
    packed: bytearray = field(default_factory=bytearray)
    """Prompt and every emitted token, packed."""
    recurrent: bool = False
    """Whether the model keeps recurrent states, so that checkpoints are needed."""
    embedded: bool = False
    """Whether checkpoints go into the files of blocks."""
    preempted: bool = False
    """It is CLOSING only to go back to the queue."""
    resumed: bool = False
    """It had a slot before. It goes on alone, whichever choice it is."""
    num_resumed: int = 0
    """Generated tokens that are computed with its prompt, because they were there before."""
    first_run: FirstRun | None = None
    """What is told of the run that its prompt counts for, if it is not this one."""
    num_generated: int = 0
    num_computed: int = 0
    """Tokens whose KV is in the row: a number that restore, prefill and decode all move."""
    root: BlockHash | None = None
    chain: list[BlockHash] = field(default_factory=list)
    """Names of its full blocks that are stored, or were asked to be."""
    cuts: dict[int, Place] = field(default_factory=dict)
    """Positions at which its recurrent state is kept, and why; empty for other models."""
    adrift: bool = False
    """The engine fed a token that nobody took: its recurrent state is not at ``num_computed``."""
    tail_wished: bool = False
    all_wished: bool = False
    """It has ended, and everything it computed was asked to be stored."""
    owed: list[BlockHash] = field(default_factory=list)
    """Names of what it asked to be kept in files."""
    filed: bool = False
    """It has ended, and what it is owed has files."""
    grant: Grant | None = None
    payloads: dict[BlockHash, HostBlock] = field(default_factory=dict)
    """What was read for it, and is not in the engine yet."""
    reading: tuple[BlockRef, ...] = ()
    """What is being read for it now."""
    asked_ahead: bool = False
    """Whether the cache was asked what to read while it waits for its slot."""
    ahead_bytes: int = 0
    """What is read while it waits."""
    num_loaded: int = 0
    """Tokens of its prefix that the engine has restored before it admits the row."""
    num_restored: int = 0
    """Tokens of it that were not computed in this run."""
    num_cached: int = 0
    """Prompt tokens that were never computed for it."""
    cached_ram: int = 0
    cached_ssd: int = 0
    ended: ReuseEnded = NOT_LOOKED_UP
    in_engine: bool = False
    stores_left: int = 0
    finish_reason: str | None = None
    error: str | None = None
    prefill_s: float = 0.0
    restore_s: float = 0.0

    def __post_init__(self) -> None:
        self.packed += pack_tokens(self.request.prompt)

    @property
    def leader(self) -> Uid:
        """Choice 0 of its request, maybe itself: the uids of choices follow each other."""
        return Uid(self.uid - self.index)

    @property
    def sampling(self) -> Sampling:
        """With a seed each choice has the next one, so that choices differ."""
        sampling = replace(self.request.sampling, drawn=self.num_resumed)
        if sampling.seed is None:
            return sampling
        return replace(sampling, seed=sampling.seed + self.index)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def last_prompt_position(self) -> int:
        """Prefill ends here: the last prompt token is fed by the first decode step."""
        return self.num_prompt + self.num_resumed - 1

    @property
    def ending(self) -> bool:
        """It has ended, though that may not be told yet."""
        return self.state is State.CLOSING and not self.preempted

    @property
    def num_tokens(self) -> int:
        """Prompt and generated."""
        return self.num_prompt + self.num_generated

    def is_full(self, max_context: int) -> bool:
        """Whether it has as many tokens as it may."""
        return self.num_generated >= self.request.max_tokens or self.num_tokens >= max_context

    def emit(self, token: int, *, fed: bool) -> None:
        """Add a sampled token; ``fed``: its KV is computed already."""
        self.packed += pack_tokens((token,))
        self.num_generated += 1
        self.num_computed = self.num_tokens - (not fed)

    def use_grant(self, block_size: int, checkpoint_interval: int | None) -> None:
        """The prefix it was granted is at hand: READY."""
        self.state = State.READY
        blocks = self.grant.blocks if self.grant else ()
        self.chain = [ref.block_hash for ref in blocks if ref.take == ref.num_tokens == block_size]
        self.num_computed = self.num_restored = sum(ref.take for ref in blocks)
        if self.first_run is None:
            self.num_cached = self.num_restored
            self.cached_ssd = sum(ref.take for ref in blocks if ref.cold)
            self.cached_ram = self.num_cached - self.cached_ssd
        if checkpoint_interval is not None:
            self.cuts = cuts(
                self.num_prompt + self.num_resumed,
                self.num_restored,
                interval=checkpoint_interval,
                num_system=self.request.num_system,
                hints=self.request.hints,
                branch=self.grant.branch if self.grant else None,
            )

    def next_stop(self, chunk_tokens: int) -> int:
        """How far the next chunk of its prompt goes; where it is already when that is done."""
        position, last = self.num_computed, self.last_prompt_position
        if position >= last:
            return position
        chunk_end = min((position // chunk_tokens + 1) * chunk_tokens, last)
        return next_cut(self.cuts, position, chunk_end)

    def cut_grant(self, first_lost: BlockRef, reason: Reason) -> tuple[BlockRef, ...]:
        """Use only what comes before a block that could not be read; returns the rest."""
        assert self.grant is not None, "a lost block was granted"
        index = self.grant.blocks.index(first_lost)
        kept, unused = self.grant.blocks[:index], self.grant.blocks[index:]
        self.ended = ReuseEnded(reason, sum(ref.take for ref in kept))
        self.grant = Grant(self.grant.root, kept, self.ended)
        return unused

    def look_again(self) -> None:
        """What it was granted turned out not to be there: back to LOOKING."""
        self.state = State.LOOKING
        self.times.looked_up = self.times.granted = None

    def num_to_load(self, *, hot_is_free: bool) -> int:
        """Tokens of its prefix that the engine has yet to restore."""
        blocks = self.grant.blocks if self.grant else ()
        total = sum(ref.take for ref in blocks if ref.cold or not hot_is_free)
        return max(0, total - self.num_loaded)

    def load(self, num_tokens: int) -> Load:
        """Restore a part of its prefix in the next step: still READY."""
        self.num_loaded += num_tokens
        return Load(self.uid, num_tokens, self._restores())

    def admit(self) -> Admit:
        """Make a row of it in the next step: PREFILL."""
        self.state = State.PREFILL
        grant = self.grant
        state = self._restore(grant.checkpoint) if grant and grant.checkpoint else None
        prompt = self.request.prompt
        if self.num_resumed:
            prompt = tuple(unpack_tokens(PackedTokens(bytes(self.packed))))
        return Admit(self.uid, prompt, self.sampling, self._restores(), state)

    def fork(self, leader: Sequence) -> Fork:
        """Make a row of it in the next step, from the leader's, whose prompt is computed then."""
        self.state, self.in_engine = State.PREFILL, True
        self.root, self.chain = leader.root, list(leader.chain)
        self.num_computed = self.last_prompt_position
        self.num_restored = leader.num_restored
        self.num_cached, self.ended = leader.num_cached, leader.ended
        self.cached_ram, self.cached_ssd = leader.cached_ram, leader.cached_ssd
        self.tail_wished = True  # the leader's is the same
        return Fork(leader.uid, self.uid, self.sampling)

    def preempt(self, now_s: float) -> None:
        """Give up its row: what it computed is stored, then it goes back to the queue."""
        ran = self.state in (State.PREFILL, State.DECODE)
        if ran and self.first_run is None:
            self.first_run = FirstRun(self.times, self.ended)
        self.times = replace(self.times, ended=now_s)
        self.state, self.preempted = State.CLOSING, True

    def resume(self) -> None:
        """Wait as if it came now, with what was generated as a part of its prompt."""
        self.state, self.preempted, self.resumed = State.WAITING, False, True
        self.times = Times(self.times.submitted, first_token=self.times.first_token)
        self.num_resumed = self.num_generated
        self.num_computed = self.num_restored = 0
        self.chain, self.cuts, self.adrift = [], {}, False
        self.tail_wished, self.all_wished = self.num_resumed > 0, False

    def told(self) -> tuple[Times, ReuseEnded]:
        """Its times and why reuse ended, as of the run that its prompt counts for."""
        if self.first_run is None:
            return self.times, self.ended
        times = replace(
            self.first_run.times, first_token=self.times.first_token, ended=self.times.ended
        )
        return times, self.first_run.reuse_ended

    def _restores(self) -> tuple[Restore, ...]:
        return tuple(map(self._restore, self.grant.blocks)) if self.grant else ()

    def _restore(self, ref: BlockRef) -> Restore:
        return Restore(ref.take, ref.block_id, self.payloads.get(ref.block_hash))

    def wishes(self, block_size: int) -> list[tuple[int, StoreWish]]:
        """(position, wish) of blocks to be stored: full ones as they come, the tail at its end."""
        if not self.in_engine or self.all_wished:
            return []
        closing = self.state is State.CLOSING
        self.all_wished = closing
        wishes = self._full_block_wishes(block_size)
        place = self.cuts.pop(self.num_computed, None)
        if closing and self.recurrent:
            place = Place.TURN
        if self.adrift or self.num_computed <= self.num_restored:
            place = None
        prompt_done = self.num_computed >= self.last_prompt_position
        if closing or (prompt_done and not self.tail_wished):
            stop = self.num_computed if closing else self.last_prompt_position
            start = len(self.chain) * block_size
            if stop > start:
                wishes.append((start, self._wish(start, stop, persist=closing)))
            self.tail_wished = True
        if place is not None:
            if self.embedded:
                self._embed(wishes, block_size, place)
            wishes.append(self._checkpoint_wish(block_size, place))
        self.owed += [wish.block_hash for _, wish in wishes if wish.persist]
        return wishes

    def refused(self, start: int, block_size: int) -> None:
        """The block that begins at ``start`` was not stored: ask again, and for what follows."""
        del self.chain[start // block_size :]
        self.all_wished = False

    def _embed(self, wishes: list[tuple[int, StoreWish]], block_size: int, place: Place) -> None:
        """Let the file of the block that ends here carry the checkpoint."""
        depth = (self.num_computed - 1) // block_size
        start = depth * block_size
        for index, (at, wish) in enumerate(wishes):
            if at == start and num_tokens(wish.tokens) == self.num_computed - start:
                wishes[index] = (at, replace(wish, persist=True, carries=place))
                return
        parent = self.chain[depth - 1] if depth else self.root
        assert parent is not None, "nothing is stored before the look-up gave the root"
        tokens = self._packed(start, self.num_computed)
        name = chain_hash(parent, tokens)
        wishes.append((start, StoreWish(parent, name, tokens, persist=True, carries=place)))

    def wishes_nothing(self) -> None:
        """Nothing is stored, so an ended row need not wait for it."""
        self.all_wished = self.all_wished or self.state is State.CLOSING

    def _full_block_wishes(self, block_size: int) -> list[tuple[int, StoreWish]]:
        """Each computed full block is asked for once."""
        wishes: list[tuple[int, StoreWish]] = []
        while (len(self.chain) + 1) * block_size <= self.num_computed:
            start = len(self.chain) * block_size
            wish = self._wish(start, start + block_size, persist=True)
            self.chain.append(wish.block_hash)
            wishes.append((start, wish))
        return wishes

    def _checkpoint_wish(self, block_size: int, place: Place) -> tuple[int, StoreWish]:
        """The state as it is now, under the parent of the block that ends here."""
        depth = (self.num_computed - 1) // block_size
        start = depth * block_size
        parent = self.chain[depth - 1] if depth else self.root
        assert parent is not None, "nothing is stored before the look-up gave the root"
        tokens = self._packed(start, self.num_computed)
        name = state_hash(parent, tokens)
        return start, StoreWish(parent, name, tokens, persist=not self.embedded, place=place)

    def _packed(self, start: int, stop: int) -> PackedTokens:
        return PackedTokens(bytes(self.packed[TOKEN_BYTES * start : TOKEN_BYTES * stop]))

    def _wish(self, start: int, stop: int, *, persist: bool) -> StoreWish:
        assert self.root is not None, "nothing is stored before the look-up gave the root"
        parent = self.chain[-1] if self.chain else self.root
        tokens = self._packed(start, stop)
        return StoreWish(parent, chain_hash(parent, tokens), tokens, persist)
