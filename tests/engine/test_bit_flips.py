"""One flipped bit anywhere in any cache file: the answer is that of a sound restore, or of less.

What a prompt answers depends on the checkpoint it is continued from and on nothing else, so there
is one right answer for each position that a restore can end at. With float32 they are all the same
bits, those without a cache; a codec that loses precision has its own for each position.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from omlx.engine.load import LoadedModel, backend_name
from tests import tiny
from tests.engine.rig import Answer, Rig, greatest_difference

Loaded = Callable[[str], LoadedModel]

PROMPT = tiny.tokens(70)
ANSWER_TOKENS = 2
INTERVAL = 32
FULL = len(PROMPT) - 1
LENGTH_BYTES = 8
"""Of the header, before it."""

KINDS = [(codec, embedded) for codec in ("fp32", "rht_int8", "int8") for embedded in (False, True)]
FAR = {"fp32": 0.0, "rht_int8": 0.2, "int8": 0.3}
"""How far a codec may move a logit of this model; they are about 1 in size."""
SEEDS_A_TEST = 50
NAMING = ("token_ids", "parent_hash")
"""What a block's name is the hash of."""


@dataclass(frozen=True)
class Stored:
    """The files of one request, and what may be answered out of them."""

    codec: str
    embedded: bool
    files: dict[Path, bytes]
    """By their path below the root."""
    needed: frozenset[Path]
    """Files without which less than everything is reused."""
    right: dict[int, Answer]
    """By the number of tokens that were reused."""

    def put(self, root: Path) -> None:
        for path, data in self.files.items():
            for folder in reversed(path.parents):
                (root / folder).mkdir(mode=0o700, exist_ok=True)
            (root / path).write_bytes(data)


Kept = Callable[[str, bool], Stored]


def start(model: LoadedModel, stored: Stored, root: Path) -> Rig:
    return Rig(model, files=root, interval=INTERVAL, codec=stored.codec, embedded=stored.embedded)


def ask(rig: Rig) -> Answer:
    return rig.ask(PROMPT, ANSWER_TOKENS)


ROUNDING = 1e-4 if backend_name() == "cuda" else 0.0
"""CUDA's matrix products don't round alike from one run to the next."""


def same(one: Answer, other: Answer) -> bool:
    return one.tokens == other.tokens and greatest_difference(one, other) <= ROUNDING


@pytest.fixture(scope="module")
def model(loaded: Loaded) -> LoadedModel:
    return loaded("qwen3_5")


@pytest.fixture(scope="module")
def kept(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """The files of each kind, and its right answers: one for each file that is taken away."""

    @cache
    def stored(codec: str, embedded: bool) -> Stored:
        root = tmp_path_factory.mktemp("stored")
        empty = Stored(codec, embedded, {}, frozenset(), {})
        ask(start(model, empty, root))
        names = sorted(p.relative_to(root) for p in root.rglob("*.safetensors"))
        found = Stored(
            codec,
            embedded,
            {name: (root / name).read_bytes() for name in names},
            frozenset(),
            {},
        )
        # Whole, and without each file, and at last without all of them.
        lacking: dict[Path, int] = {}
        for missing in ([], *([name] for name in names), names):
            here = tmp_path_factory.mktemp("lacking")
            found.put(here)
            for name in missing:
                (here / name).unlink()
            answer = ask(start(model, found, here))
            found.right.setdefault(answer.cached, answer)
            if len(missing) == 1:
                lacking[missing[0]] = answer.cached
        needed = frozenset(name for name, reused in lacking.items() if reused < FULL)
        return Stored(codec, embedded, found.files, needed, found.right)

    return stored


def span(data: bytes | bytearray, field: str) -> range:
    """Where the value of a field lies in a file's header."""
    key = f'"{field}":"'.encode()
    first = data.index(key) + len(key)
    return range(first, data.index(b'"', first))


def draw(rng: random.Random, data: bytes) -> int:
    """An offset; the few bytes of a header are drawn as often as the many of the tensors."""
    header = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    regions = [(0, LENGTH_BYTES), (LENGTH_BYTES, header), (header, len(data))]
    return rng.randrange(*rng.choices(regions, [1, 4, 5])[0])


@pytest.mark.parametrize("first", range(0, 1000, SEEDS_A_TEST))
def test_a_flipped_bit_is_never_answered_from(
    model: LoadedModel,
    kept: Kept,
    first: int,
    tmp_path: Path,
) -> None:
    """B08, B17: before a start or in a server's life; what is lost is told and made anew."""
    for seed in range(first, first + SEEDS_A_TEST):
        rng = random.Random(seed)
        stored = kept(*KINDS[seed % len(KINDS)])
        root = tmp_path / str(seed)
        stored.put(root)
        name = rng.choice(sorted(stored.files))
        spoiled = bytearray(stored.files[name])
        position = draw(rng, stored.files[name])
        spoiled[position] ^= 1 << rng.randrange(8)
        what = f"seed {seed}: {stored.codec}, byte {position} of {name}"
        before_start = rng.random() < 0.5

        if before_start:
            (root / name).write_bytes(spoiled)
            rig = start(model, stored, root)
        else:
            rig = start(model, stored, root)
            (root / name).write_bytes(spoiled)
        refused = not (root / name).exists()
        answer, again = ask(rig), ask(rig)

        assert answer.closed is not None and answer.closed.error is None, what
        assert answer.cached in stored.right, what
        assert same(answer, stored.right[answer.cached]), what
        # With losses, KV computed after a walk-back stands beside what the first life computed.
        assert greatest_difference(again, stored.right[0]) <= FAR[stored.codec] + ROUNDING, what
        told = refused or rig.cache.stats.corrupt_blocks > 0
        assert told or answer.cached == FULL, what
        header = LENGTH_BYTES + int.from_bytes(stored.files[name][:LENGTH_BYTES], "little")
        if position >= header and name in stored.needed and not stored.embedded:
            assert told and answer.cached < FULL, what
        if stored.codec == "fp32":
            restarted = ask(start(model, stored, root))
            assert restarted.cached == FULL, what
            assert same(restarted, stored.right[0]), what


@pytest.mark.parametrize("field", NAMING)
def test_a_block_that_names_others_is_refused_at_the_start(
    model: LoadedModel, kept: Kept, field: str, tmp_path: Path
) -> None:
    """Or it is in the way of its chain, which is neither reused nor stored again, for ever."""
    stored = kept("fp32", False)
    blocks = [n for n in stored.needed if "_gdn_sidecars" not in n.parts]
    for name in sorted(blocks):
        root = tmp_path / name.stem[:16]
        stored.put(root)
        # The lowest bit of a letter: another letter of the same alphabet.
        spoiled = bytearray(stored.files[name])
        spoiled[span(spoiled, field)[4]] ^= 1
        (root / name).write_bytes(spoiled)

        rig = start(model, stored, root)
        refused = not (root / name).exists()
        answer = ask(rig)
        restarted = ask(start(model, stored, root))

        assert refused
        assert same(answer, stored.right[0])
        assert restarted.cached == FULL
        assert same(restarted, stored.right[0])


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_damaged_embedded_state_is_met_once(
    model: LoadedModel, kept: Kept, codec: str, tmp_path: Path
) -> None:
    """Its file is sound as a block's, and made anew all the same, or each start would meet it."""
    stored = kept(codec, True)
    carrying = [n for n in stored.files if b'"carries"' in stored.files[n]]
    met = 0
    for name in carrying:
        root = tmp_path / name.stem[:16]
        stored.put(root)
        spoiled = bytearray(stored.files[name])
        spoiled[-1] ^= 1
        (root / name).write_bytes(spoiled)

        first = start(model, stored, root)
        answer = ask(first)
        ask(first)
        again = start(model, stored, root)
        restarted = ask(again)

        assert same(answer, stored.right[answer.cached])
        assert again.cache.stats.corrupt_blocks == 0
        assert restarted.cached == FULL
        if first.cache.stats.corrupt_blocks:
            met += 1
            assert (root / name).read_bytes() != bytes(spoiled)
    assert met > 0


def test_without_loss_every_restore_is_the_same_answer(model: LoadedModel, kept: Kept) -> None:
    """The oracle of the test above; and those of a lossy codec do differ, so it can tell them."""
    alone = Rig(model, caching=False, interval=INTERVAL).ask(PROMPT, ANSWER_TOKENS)

    for codec, embedded in KINDS:
        right = kept(codec, embedded).right
        assert {0, FULL} < right.keys()
        assert same(right[0], alone)
        differing = [n for n, answer in right.items() if not same(answer, alone)]
        assert differing == ([] if codec == "fp32" else [n for n in right if n > 0])
