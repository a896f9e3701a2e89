"""Which tier is on decides how much is reused, and never what is answered.

Each cell of the matrix is one model, with the RAM tier on or off and the SSD tier on or off, and
for the recurrent model checkpoints in sidecars or in the files of blocks. The oracle has no cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from omlx.engine.load import LoadedModel
from tests import tiny
from tests.engine.rig import BLOCK, INTERVAL, Answer, Rig, greatest_difference

Loaded = Callable[[str], LoadedModel]
Tokens = tuple[int, ...]

NEAR = 1e-4
"""Of two runs that cut the prompt at different places."""
REPLY = 8
PROMPT = tiny.tokens(2 * INTERVAL + 22)
BRANCH = 5 * BLOCK + 5
"""Inside a block, and where no chunk ends and no checkpoint lies."""


@dataclass(frozen=True)
class Cell:
    model: str
    ram: bool
    ssd: bool
    embedded: bool = False

    def __str__(self) -> str:
        storage = "embedded" if self.embedded else "sidecar"
        kind = self.model if self.model == "llama" else f"{self.model}-{storage}"
        return f"{kind}-ram_{'on' if self.ram else 'off'}-ssd_{'on' if self.ssd else 'off'}"

    @property
    def keeps(self) -> bool:
        return self.ram or self.ssd

    @property
    def recurrent(self) -> bool:
        return self.model != "llama"


STORAGES = (("llama", False), ("qwen3_5", False), ("qwen3_5", True))
CELLS = [
    Cell(model, ram, ssd, embedded)
    for (model, embedded), ram, ssd in product(STORAGES, (True, False), (True, False))
]
EACH = pytest.mark.parametrize("cell", CELLS, ids=str)


@dataclass
class World:
    """One cell: start a server over and over on the same files."""

    cell: Cell
    start: Callable[[], Rig]
    oracle: Callable[[Tokens], Answer]

    def check(
        self,
        answer: Answer,
        prompt: Tokens,
        cached: int,
        *,
        restarted: bool,
        cut_alike: bool = False,
    ) -> None:
        """``cached``: what is reused where anything is kept. Cut alike, bits are equal."""
        if not (self.cell.ssd if restarted else self.cell.keeps):
            cached = 0
        closed, oracle = answer.closed, self.oracle(prompt)
        assert closed is not None
        assert closed.error is None
        assert closed.cached_tokens == cached
        from_files = restarted or not self.cell.ram
        assert closed.cached_ssd == (cached if from_files else 0)
        assert answer.tokens == oracle.tokens
        assert greatest_difference(answer, oracle) <= NEAR
        if cut_alike:
            assert greatest_difference(answer, oracle) == 0.0


@pytest.fixture
def world(cell: Cell, loaded: Loaded, tmp_path: Path) -> World:
    model = loaded(cell.model)
    start = partial(
        Rig,
        model,
        files=tmp_path if cell.ssd else None,
        hot_bytes=1 << 30 if cell.ram else 0,
        embedded=cell.embedded,
    )
    return World(cell, start, lambda prompt: Rig(model, caching=False).ask(prompt, REPLY))


@EACH
def test_a_repeat_computes_the_last_token_alone(world: World) -> None:
    """At once, and again after a restart."""
    rig = world.start()

    world.check(rig.ask(PROMPT, REPLY), PROMPT, 0, restarted=False, cut_alike=True)
    whole = len(PROMPT) - 1
    world.check(rig.ask(PROMPT, REPLY), PROMPT, whole, restarted=False, cut_alike=True)

    again = world.start()
    world.check(again.ask(PROMPT, REPLY), PROMPT, whole, restarted=True, cut_alike=True)


@EACH
@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
def test_the_next_turn_computes_what_is_new(world: World, restarted: bool) -> None:
    """And the last token of the reply, which was sampled and never fed."""
    rig = world.start()
    reply = rig.ask(PROMPT, REPLY).tokens
    turn = (*PROMPT, *reply, *tiny.tokens(27, seed=1))

    rig = world.start() if restarted else rig
    answer = rig.ask(turn, REPLY)

    world.check(answer, turn, len(PROMPT) + REPLY - 1, restarted=restarted)


@EACH
@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
def test_a_branch_inside_a_block_is_reused_to_the_token(world: World, restarted: bool) -> None:
    """A recurrent model goes on from the checkpoint before, and leaves one there for the third."""
    second, third = ((*PROMPT[:BRANCH], *tiny.tokens(40, seed=seed)) for seed in (2, 5))
    rig = world.start()
    rig.ask(PROMPT, REPLY)

    rig = world.start() if restarted else rig
    first = INTERVAL if world.cell.recurrent else BRANCH
    world.check(rig.ask(second, REPLY), second, first, restarted=restarted)

    rig = world.start() if restarted else rig
    world.check(rig.ask(third, REPLY), third, BRANCH, restarted=restarted)


@EACH
@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
def test_a_branch_where_a_chunk_ends_is_equal_bit_for_bit(world: World, restarted: bool) -> None:
    second = (*PROMPT[:INTERVAL], *tiny.tokens(40, seed=4))
    rig = world.start()
    rig.ask(PROMPT, REPLY)

    rig = world.start() if restarted else rig
    answer = rig.ask(second, REPLY)

    world.check(answer, second, INTERVAL, restarted=restarted, cut_alike=True)


@EACH
def test_files_are_where_the_cell_says(world: World, tmp_path: Path) -> None:
    """None without the SSD tier, and a folder of checkpoints only where they have their own."""
    world.start().ask(PROMPT, REPLY)

    files = list(tmp_path.rglob("*.safetensors"))
    sidecars = [path for path in files if "_gdn_sidecars" in path.parts]

    assert bool(files) == world.cell.ssd
    own = world.cell.ssd and world.cell.recurrent and not world.cell.embedded
    assert bool(sidecars) == own
