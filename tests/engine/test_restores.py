"""A prefix that is restored in parts, between others' steps, is the prefix that was stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from omlx.cache.block_file import HostTensor
from omlx.cache.blocks import BlockId
from omlx.core.plan import Load, Restore, StepPlan, Uid
from omlx.engine.kv import BlockStore, to_host, views_of
from omlx.engine.load import LoadedModel
from omlx.engine.step import Engine
from tests import tiny
from tests.engine.rig import Rig, greatest_difference

Loaded = Callable[[str], LoadedModel]
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["host", "device"])
MODELS = ("llama", "gemma3", "qwen3_5")


def arrays_of(cache: Any) -> list[mx.array]:
    return [array for array in cache.state if isinstance(array, mx.array)]


def beside_a_decoding_row(rig: Rig, prompt: tuple[int, ...]) -> Uid:
    """Ask while another row decodes, and until the answer has ended."""
    other = rig.submit(tiny.tokens(7, seed=99), 60)
    while not rig.answers[other].tokens:
        rig.step()
    rig.plans.clear()
    uid = rig.submit(prompt)
    while rig.answers[uid].closed is None:
        rig.step()
    assert rig.answers[other].closed is None, "it decoded all the time"
    return uid


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [17, 66, 131])
@AHEAD
def test_restored_in_parts_or_at_once_is_equal_bit_for_bit(
    loaded: Loaded, name: str, length: int, ahead: bool, tmp_path: Path
) -> None:
    """Every array that the row goes on from, whether it came from files or from RAM."""
    model, prompt = loaded(name), tiny.tokens(length)
    Rig(model, files=tmp_path, ahead=ahead).ask(prompt)
    rig = Rig(model, files=tmp_path, ahead=ahead)
    rig.ask(prompt)
    rig.ask(prompt)
    cold, hot = (admit for plan in rig.plans for admit in plan.admits)
    found: list[list[bytes]] = []
    for admit, parts in ((cold, 0), (cold, 3), (hot, 0), (hot, 3)):
        engine = Engine(model.model, model.cache, ahead=ahead)
        for restore in (*hot.restores, *([hot.state] if hot.state else [])):
            assert restore.block_id is not None
            if admit is hot:
                engine.store.put(restore.block_id, rig.engine.store.get(restore.block_id))
        for _ in range(parts):
            engine.run(StepPlan(loads=(Load(admit.uid, 5, admit.restores),)))
        engine.run(StepPlan(admits=(admit,)))
        states = [array for cache in engine._rows[admit.uid].caches for array in arrays_of(cache)]
        found.append(tiny.digests(states))
        assert len(engine.store) == len(hot.restores) + (hot.state is not None)

    assert found == [found[0]] * 4


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [17, 131])
@AHEAD
def test_while_others_decode_an_answer_is_the_same_in_parts_or_at_once(
    loaded: Loaded, name: str, length: int, ahead: bool, tmp_path: Path
) -> None:
    """Up to rounding: a row that joins later meets longer neighbours."""
    model, prompt = loaded(name), tiny.tokens(length)
    Rig(model, files=tmp_path, ahead=ahead).ask(prompt)
    answers = {}
    for tokens in (None, 5):
        rig = Rig(model, files=tmp_path, ahead=ahead, restore_tokens=tokens)
        for tier in ("cold", "hot"):
            uid = beside_a_decoding_row(rig, prompt)
            answers[tokens, tier] = rig.answers[uid]
            loads = [load for plan in rig.plans for load in plan.loads]
            expected = tokens is not None and (tier == "cold" or not ahead)
            assert bool(loads) == expected
            rig.run()

    reference = answers[None, "cold"]
    for answer in answers.values():
        assert answer.cached == length - 1
        assert answer.tokens == reference.tokens
        assert greatest_difference(answer, reference) <= 1e-3


@AHEAD
def test_who_leaves_while_it_is_restored_leaves_nothing_behind(
    loaded: Loaded, ahead: bool, tmp_path: Path
) -> None:
    """B35: the next one with this prefix is right, from a file again."""
    model, prompt = loaded("llama"), tiny.tokens(100)
    oracle = Rig(model, files=tmp_path, ahead=ahead).ask(prompt)
    rig = Rig(model, files=tmp_path, ahead=ahead, restore_tokens=5)
    other = rig.submit(tiny.tokens(7, seed=99), 40)
    while not rig.answers[other].tokens:
        rig.step()
    uid = rig.submit(prompt)
    for _ in range(3):
        rig.step()
    assert rig.plans[-1].loads
    assert rig.engine.num_rows == 2

    rig.core.cancel(uid, 0.0)
    rig.step()

    assert rig.engine.num_rows == 1
    rig.run()
    answer = rig.ask(prompt)
    assert answer.closed is not None
    assert answer.closed.cached_ssd >= 64
    assert greatest_difference(answer, oracle) == 0.0


@AHEAD
def test_a_fault_while_a_prefix_is_restored_is_that_rows_alone(
    loaded: Loaded, ahead: bool, tmp_path: Path
) -> None:
    model, prompt = loaded("llama"), tiny.tokens(100)
    Rig(model, files=tmp_path, ahead=ahead).ask(prompt)
    unlucky: set[Uid] = set()

    def hook(phase: str, uid: Uid | None) -> None:
        if phase == "restore" and uid in unlucky:
            raise MemoryError

    rig = Rig(model, files=tmp_path, ahead=ahead, restore_tokens=5, hook=hook)
    other = rig.submit(tiny.tokens(7, seed=99), 20)
    while not rig.answers[other].tokens:
        rig.step()
    uid = rig.submit(prompt)
    rig.step()
    rig.step()
    unlucky.add(uid)

    rig.run()

    closed = rig.answers[uid].closed
    assert closed is not None
    assert closed.error == "MemoryError in the engine"
    other_closed = rig.answers[other].closed
    assert other_closed is not None
    assert other_closed.error is None
    unlucky.clear()
    assert rig.ask(prompt).cached == 99


def test_a_part_is_about_as_large_as_it_was_to_be(loaded: Loaded) -> None:
    """To the layer: no step joins the whole of a long prefix."""
    model = loaded("llama")
    engine = Engine(model.model, model.cache, ahead=False)
    length = 4096
    block = tuple(mx.zeros(spec.shape(length)) for spec in model.cache.tensors)
    mx.eval(block)
    engine.store.put(BlockId(1), block)
    restores = (Restore(length, BlockId(1), None),)

    engine.run(StepPlan(loads=(Load(Uid(1), 10, restores),)))

    caches = engine._prefixes[Uid(1)].caches
    filled = [cache.keys is not None for cache in caches]
    assert filled == [True] + [False] * (len(caches) - 1)


# ── where arrays are in host memory ──────────────────────────────────────────────────────────


def test_a_block_that_was_read_is_used_where_it_is(loaded: Loaded, tmp_path: Path) -> None:
    """One copy, into the row; the tier keeps the very bytes that came from the file."""
    model, prompt = loaded("llama"), tiny.tokens(100)
    Rig(model, files=tmp_path).ask(prompt)
    rig = Rig(model, files=tmp_path)

    rig.ask(prompt)

    promoted = [rig.engine.store.get(b) for b in list(rig.engine.store._blocks)]
    kept = [a for block in promoted for a in block if isinstance(a, np.ndarray)]
    assert len(kept) == 7 * len(model.cache.tensors)
    assert not any(array.flags.owndata for array in kept)


def test_a_block_whose_file_brought_more_does_not_keep_the_rest_in_memory() -> None:
    """A checkpoint that is embedded may weigh more than its block."""
    whole = np.arange(1 << 17).astype(np.uint8)
    small = HostTensor("kv0.keys", "uint8", (100,), whole.data[:100])

    (array,) = views_of((small,))

    assert isinstance(array, np.ndarray)
    assert array.flags.owndata
    assert array.tobytes() == bytes(range(100))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_kept_as_it_was_read_is_exported_byte_for_byte(loaded: Loaded, dtype: str) -> None:
    """B28: also bfloat16, which NumPy does not have."""
    config = loaded("llama").cache
    spec = config.tensors[0]
    bits = mx.random.randint(0, 1 << 15, (2, 2, 16, 16), mx.uint16, mx.random.key(1))
    array = bits.view(getattr(mx, dtype)) if dtype != "float32" else bits.astype(mx.float32)
    mx.eval(array)
    spec = type(spec)("kv0.keys", 2, 2, 16, dtype)

    first = to_host([spec], (array,))
    second = to_host([spec], views_of(first))

    assert bytes(second[0].data) == bytes(first[0].data)
    store = BlockStore(config, host_copies=True)
    store.put(BlockId(1), views_of(first))
    assert store.nbytes == array.nbytes
