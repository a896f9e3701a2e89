"""What is to be told to the cache with the next settle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from omlx.cache.blocks import BlockHash, BlockId
from omlx.cache.tickets import BlockRef, StoreWish
from omlx.core.plan import LookUp, LostFile, Promoted, Seal, SettleWork, Uid, Written


@dataclass(slots=True)
class Outbox:
    seals: list[Seal] = field(default_factory=list)
    promoted: list[Promoted] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    releases: list[tuple[BlockId, ...]] = field(default_factory=list)
    lost: list[LostFile] = field(default_factory=list)
    touches: list[tuple[BlockHash, ...]] = field(default_factory=list)
    given_up: int = 0

    def give_back(self, blocks: Sequence[BlockRef], *, stored: bool) -> None:
        """Release the hot ones; ``stored``: whether the cold ones were restored."""
        held = tuple(r.block_id for r in blocks if not r.cold and r.block_id is not None)
        if held:
            self.releases.append(held)
        # The leaf first: if the limit was lowered meanwhile, it is the leaf that finds no room.
        self.promoted += [Promoted(ref, stored) for ref in reversed(blocks) if ref.cold]

    def touch(self, chain: Iterable[BlockHash]) -> None:
        """The chain, from head to tail, is in use."""
        chain = tuple(chain)
        if chain:
            self.touches.append(chain)

    def take(
        self,
        look_ups: Iterable[LookUp],
        wishes: Iterable[tuple[Uid, int, StoreWish]],
        ending: Iterable[tuple[Uid, tuple[BlockHash, ...]]] = (),
        hot_allowed: int | None = None,
    ) -> SettleWork:
        """Everything that gathered, with these; nothing is left."""
        work = SettleWork(
            tuple(self.seals),
            tuple(self.promoted),
            tuple(self.written),
            tuple(self.releases),
            tuple(self.lost),
            tuple(self.touches),
            tuple(look_ups),
            tuple(wishes),
            tuple(ending),
            self.given_up,
            hot_allowed,
        )
        self.given_up = 0
        for gathered in (
            self.seals,
            self.promoted,
            self.written,
            self.releases,
            self.lost,
            self.touches,
        ):
            gathered.clear()
        return work
