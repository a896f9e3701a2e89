"""A model with recurrent layers reuses everything but the new tokens, and answers as if it did not.

What is restored is the state after exactly the tokens that are credited, or nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from omlx.cache.block_file import HostTensor, Identity
from omlx.cache.blocks import BlockHash, chain_hash, num_tokens, pack_tokens, state_hash
from omlx.cache.checkpoints import NEWEST_KEPT, Place
from omlx.cache.codecs import CODECS
from omlx.cache.tickets import Reason, ReuseEnded
from omlx.engine.kv import BlockStore, fresh_caches, leaves
from omlx.engine.load import LoadedModel
from tests import tiny
from tests.engine.rig import BLOCK, INTERVAL, Answer, Rig, greatest_difference
from tests.found import found_in

Loaded = Callable[[str], LoadedModel]
Tokens = tuple[int, ...]

MODELS = ("qwen3_5", "qwen3_next")
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
STORAGE = pytest.mark.parametrize("embedded", [False, True], ids=["sidecar", "embedded"])
BETWEEN = pytest.mark.parametrize("between", ["ram", "files", "restart"])
NEAR = 1e-3
FAR = {"fp32": NEAR, "bf16": 0.1, "int8": 0.3, "rht_int8": 0.2, "rht_int16": NEAR}
"""How far a codec may move a logit of these models; they are about 1 in size."""

EDGES = sorted(
    {edge + d for edge in (BLOCK, 2 * BLOCK, INTERVAL, 2 * INTERVAL) for d in (-1, 0, 1)}
)
PROMPT = tiny.tokens(2 * INTERVAL + 22)


class Server:
    """A rig that lives on, has its RAM emptied or is started again between two requests."""

    def __init__(
        self,
        model: LoadedModel,
        files: Path,
        between: str,
        *,
        codec: str = "fp32",
        embedded: bool = False,
    ) -> None:
        self._between = between
        self._start = partial(Rig, model, files=files, codec=codec, embedded=embedded)
        self.rig = self._start()

    def ask(self, prompt: Tokens, max_tokens: int = 8, num_system: int = 0) -> Answer:
        answer = self.rig.ask(prompt, max_tokens, num_system=num_system)
        match self._between:
            case "files":
                self.rig.cache.clear(hot=True, ssd=False)
            case "restart":
                self.rig = self._start()
        return answer


def cold(model: LoadedModel, prompt: Tokens, max_tokens: int = 8) -> Answer:
    """The oracle: nothing cached, nobody else."""
    return Rig(model, caching=False).ask(prompt, max_tokens)


def assert_near(one: Answer, other: Answer) -> None:
    assert one.tokens == other.tokens
    assert greatest_difference(one, other) <= NEAR


def checkpoints(rig: Rig) -> dict[int, tuple[Identity, Tokens]]:
    """Those on disk by their position, with all the tokens that they hold."""
    assert rig.files is not None
    blocks: dict[BlockHash, Identity] = {}
    found: list[Identity] = []
    for file in found_in(rig.files):
        identity = file.identity
        if identity.place is None:
            blocks[identity.block_hash] = identity
        else:
            found.append(identity)
        if file.carries is not None:
            name = state_hash(identity.parent, identity.tokens)
            found.append(replace(identity, block_hash=name, place=file.carries))

    def tokens_of(identity: Identity) -> bytes:
        parent = blocks.get(identity.parent)
        return (tokens_of(parent) if parent else b"") + identity.tokens

    whole = [tuple(np.frombuffer(tokens_of(one), np.uint32).tolist()) for one in found]
    return {len(tokens): (one, tokens) for one, tokens in zip(found, whole, strict=True)}


def path_of(rig: Rig, name: BlockHash, *, checkpoint: bool) -> Path:
    assert rig.files is not None
    return rig.files.path(name, checkpoint=checkpoint)


def damage(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-3] ^= 0x10
    path.write_bytes(whole)


def exact_states(model: LoadedModel, tokens: Tokens) -> list[np.ndarray]:
    """Every state after these tokens, computed in one go."""
    caches = fresh_caches(model.model)
    model.model(mx.array([tokens]), cache=caches)
    store = BlockStore(model.cache)
    return [np.array(state) for state in store.cut_states(caches, 0)]


def difference(payload: tuple[HostTensor, ...], states: list[np.ndarray]) -> float:
    return max(
        float(np.abs(np.frombuffer(tensor.data, np.float32).reshape(state.shape) - state).max())
        for tensor, state in zip(payload, states, strict=True)
    )


def assert_states_are_of_their_tokens(model: LoadedModel, rig: Rig) -> None:
    assert rig.files is not None
    found = checkpoints(rig)
    assert found, "there are checkpoints to look at"
    for position, (identity, tokens) in found.items():
        payload = rig.files.read(identity)
        assert difference(payload, exact_states(model, tokens)) <= 1e-4, f"at {position}"
        if position > 1:
            assert difference(payload, exact_states(model, tokens[:-1])) > 1e-3, "it would tell"


# ── cold, warm, reread ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
@AHEAD
@STORAGE
def test_a_repeat_is_the_first_answer_bit_for_bit(
    loaded: Loaded, name: str, ahead: bool, embedded: bool, tmp_path: Path
) -> None:
    """From RAM, from files, and in a new process's eyes: the same cuts, the same bits."""
    model = loaded(name)
    oracle = Rig(model, caching=False, ahead=ahead).ask(PROMPT)

    rig = Rig(model, files=tmp_path, ahead=ahead, embedded=embedded)
    first, from_ram = rig.ask(PROMPT), rig.ask(PROMPT)
    rig.cache.clear(hot=True, ssd=False)
    from_files = rig.ask(PROMPT)
    restarted = Rig(model, files=tmp_path, ahead=ahead, embedded=embedded).ask(PROMPT)

    assert first.cached == 0
    for warm in (from_ram, from_files, restarted):
        assert warm.cached == len(PROMPT) - 1
        assert warm.tokens == oracle.tokens
        assert greatest_difference(warm, oracle) == 0.0
    assert first.tokens == oracle.tokens
    assert greatest_difference(first, oracle) == 0.0


@pytest.mark.parametrize("length", [2, *EDGES])
def test_a_prompt_of_any_length_is_reused_but_for_its_last_token(
    loaded: Loaded, length: int, tmp_path: Path
) -> None:
    """B68: around every edge of a block and of the interval."""
    model, prompt = loaded("qwen3_5"), tiny.tokens(length)

    rig = Rig(model, files=tmp_path)
    first, again = rig.ask(prompt, 3), rig.ask(prompt, 3)
    restarted = Rig(model, files=tmp_path).ask(prompt, 3)

    assert first.cached == 0
    for warm in (again, restarted):
        assert warm.cached == length - 1
        assert warm.tokens == first.tokens
        assert greatest_difference(warm, first) == 0.0


def test_a_prompt_of_one_token_is_answered(loaded: Loaded, tmp_path: Path) -> None:
    rig = Rig(loaded("qwen3_5"), files=tmp_path)
    prompt = tiny.tokens(1)

    assert (
        rig.ask(prompt).tokens == rig.ask(prompt).tokens == cold(loaded("qwen3_5"), prompt).tokens
    )


# ── conversations ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("codec", CODECS)
@BETWEEN
@STORAGE
def test_a_turn_computes_its_new_tokens_only(
    loaded: Loaded, embedded: bool, between: str, codec: str, tmp_path: Path
) -> None:
    """B71, B73: five turns; the last token of an answer is never fed, so it is new as well."""
    model = loaded("qwen3_5")
    server = Server(model, tmp_path, between, codec=codec, embedded=embedded)
    prompt: Tokens = ()
    for turn in range(5):
        new = tiny.tokens(19 + 7 * turn, seed=turn)
        prompt += new

        answer = server.ask(prompt, 11)

        computed = len(prompt) - answer.cached
        assert computed <= len(new) + (turn > 0)
        oracle = cold(model, prompt, 11)
        assert np.isfinite(answer.logits).all()
        assert np.abs(answer.logits[0] - oracle.logits[0]).max() <= FAR[codec]
        if codec == "fp32" or between == "ram":
            assert_near(answer, oracle)
        prompt += tuple(answer.tokens)


@BETWEEN
def test_a_conversation_keeps_few_checkpoints_and_goes_on_hitting(
    loaded: Loaded, between: str, tmp_path: Path
) -> None:
    """B71: ten turns; what is let go with age is never what the next turn begins with."""
    server = Server(loaded("qwen3_5"), tmp_path, between)
    prompt: Tokens = ()
    for turn in range(10):
        prompt += tiny.tokens(3 * BLOCK, seed=turn)
        answer = server.ask(prompt, 3)
        assert len(prompt) - answer.cached <= 3 * BLOCK + (turn > 0)
        prompt += tuple(answer.tokens)

    doublings = (len(prompt) // INTERVAL).bit_length() + 1
    assert len(checkpoints(server.rig)) <= NEWEST_KEPT + 2 * doublings + 2


def test_conversations_side_by_side_all_hit(loaded: Loaded, tmp_path: Path) -> None:
    """B65: three conversations of three turns; RAM and files both fill."""
    rig = Rig(loaded("qwen3_5"), files=tmp_path)
    prompts = [tiny.tokens(40, seed=seed) for seed in (1, 2, 3)]
    for turn in range(3):
        for index, prompt in enumerate(prompts):
            answer = rig.ask(prompt, 4)
            assert answer.cached == (0 if turn == 0 else len(prompt) - 21)
            prompts[index] = prompt + tuple(answer.tokens) + tiny.tokens(20, seed=10 + index)

    assert rig.cache.pool.hot_bytes > 0
    assert len(checkpoints(rig)) > 0
    assert rig.cache.stats.gdn_checkpoint_loads == 6


def test_without_ram_files_alone_serve(loaded: Loaded, tmp_path: Path) -> None:
    rig = Rig(loaded("qwen3_5"), files=tmp_path, hot_bytes=0)
    first, again = rig.ask(PROMPT), rig.ask(PROMPT)

    assert again.cached == len(PROMPT) - 1
    assert greatest_difference(first, again) == 0.0
    assert len(rig.engine.store) == 0


# ── what prompts share ───────────────────────────────────────────────────────────────────────


@BETWEEN
@STORAGE
def test_users_of_one_system_part_compute_their_own_tokens(
    loaded: Loaded, embedded: bool, between: str, tmp_path: Path
) -> None:
    model = loaded("qwen3_5")
    server = Server(model, tmp_path, between, embedded=embedded)
    system = tiny.tokens(INTERVAL + 37)
    for user in range(6):
        own = tiny.tokens(20, seed=50 + user)
        answer = server.ask(system + own, 4, num_system=len(system))
        assert len(system + own) - answer.cached == (len(system) + 20 if user == 0 else 20)
        assert_near(answer, cold(model, system + own, 4))


@BETWEEN
@STORAGE
def test_a_shared_beginning_is_reused_from_the_third_prompt_on(
    loaded: Loaded, embedded: bool, between: str, tmp_path: Path
) -> None:
    """The second shows where it ends, and is cut there; nobody announced it."""
    model = loaded("qwen3_5")
    server = Server(model, tmp_path, between, embedded=embedded)
    shared = tiny.tokens(INTERVAL + 27)
    found: list[int] = []
    for user in range(5):
        prompt = (*shared, 200 + user, *tiny.tokens(20, seed=70 + user))
        answer = server.ask(prompt, 4)
        found.append(answer.cached)
        assert_near(answer, cold(model, prompt, 4))

    assert found == [0, INTERVAL, len(shared), len(shared), len(shared)]


def test_shared_checkpoints_outlive_a_long_conversation(loaded: Loaded, tmp_path: Path) -> None:
    rig = Rig(loaded("qwen3_5"), files=tmp_path)
    system = tiny.tokens(37)
    prompt = system
    for turn in range(8):
        prompt += tiny.tokens(2 * BLOCK, seed=turn)
        prompt += tuple(rig.ask(prompt, 3, num_system=len(system)).tokens)

    other = rig.ask(system + tiny.tokens(9, seed=99), 3, num_system=len(system))

    assert other.cached == len(system)


def test_where_reuse_ended_is_told(loaded: Loaded) -> None:
    rig = Rig(loaded("qwen3_5"))
    rig.ask(PROMPT, 2)
    fork = rig.ask((*PROMPT[: INTERVAL + 20], 7, 7, 7), 2)

    assert fork.closed is not None
    assert fork.closed.reuse_ended == ReuseEnded(Reason.NO_CHECKPOINT, INTERVAL)
    assert fork.cached == INTERVAL


# ── damage ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def stored(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """Files of one request, and its answer."""
    folder = tmp_path_factory.mktemp("stored")
    return folder, Rig(loaded("qwen3_5"), files=folder).ask(PROMPT)


@pytest.mark.parametrize("how", ["deleted", "damaged"])
@pytest.mark.parametrize("when", ["before the start", "after the start"])
def test_losing_any_file_costs_no_more_than_what_it_held(
    loaded: Loaded, stored: tuple[Path, Answer], tmp_path: Path, how: str, when: str
) -> None:
    """B07, B08, B16, B17: each checkpoint and each block in turn."""
    model, (folder, oracle) = loaded("qwen3_5"), stored
    known = _identities(model, folder)
    usable = [INTERVAL, 2 * INTERVAL, len(PROMPT) - 1]
    for name, identity in known.items():
        here = tmp_path / name.hex()[:16]
        shutil.copytree(folder, here)
        is_checkpoint = identity.place is not None
        rig = Rig(model, files=here)
        _spoil(path_of(rig, name, checkpoint=is_checkpoint), how)
        if when == "before the start":
            rig = Rig(model, files=here)

        answer, again = rig.ask(PROMPT), rig.ask(PROMPT)

        start = _start(identity, known)
        if is_checkpoint:
            left = [p for p in usable if p != start + num_tokens(identity.tokens)]
        else:
            left = [p for p in usable if p <= start]
        assert answer.cached == max(left, default=0)
        assert_near(answer, oracle)
        assert again.cached == len(PROMPT) - 1, "it was stored again"
        assert_near(again, oracle)
        missed = answer.cached < len(PROMPT) - 1 and (how, when) != ("deleted", "before the start")
        stats = rig.cache.stats
        assert stats.gdn_checkpoint_walkbacks == (missed and is_checkpoint)
        assert stats.gdn_decode_failures == (missed and is_checkpoint and how == "damaged")
        assert stats.corrupt_blocks == (missed and how == "damaged")


def _spoil(path: Path, how: str) -> None:
    if how == "deleted":
        path.unlink()
    else:
        damage(path)


def _identities(model: LoadedModel, folder: Path) -> dict[BlockHash, Identity]:
    files = Rig(model, files=folder).files
    assert files is not None
    return {found.identity.block_hash: found.identity for found in found_in(files)}


def _start(identity: Identity, known: dict[BlockHash, Identity]) -> int:
    """The position of a file's first token."""
    parent = known.get(identity.parent)
    return _start(parent, known) + num_tokens(parent.tokens) if parent else 0


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_each_step_back_costs_one_checkpoint(
    loaded: Loaded, stored: tuple[Path, Answer], tmp_path: Path, steps: int
) -> None:
    """B17, B71: the deepest are damaged; each is tried once, counted and replaced."""
    model, (folder, oracle) = loaded("qwen3_5"), stored
    here = tmp_path / "here"
    shutil.copytree(folder, here)
    rig = Rig(model, files=here)
    usable = {p: found for p, found in checkpoints(rig).items() if p < len(PROMPT)}
    deepest = sorted(usable, reverse=True)
    for position in deepest[:steps]:
        damage(path_of(rig, usable[position][0].block_hash, checkpoint=True))

    answer = rig.ask(PROMPT)

    assert answer.cached == [*deepest, 0][steps]
    assert_near(answer, oracle)
    assert rig.cache.stats.gdn_checkpoint_walkbacks == steps
    assert rig.cache.stats.gdn_decode_failures == steps
    assert Rig(model, files=here).ask(PROMPT).cached == len(PROMPT) - 1


@pytest.mark.parametrize("depth", range(3))
def test_an_embedded_state_that_is_damaged_is_stepped_over_and_replaced(
    loaded: Loaded, tmp_path: Path, depth: int
) -> None:
    """B17: the states are the last tensors of a file; its keys and values are sound."""
    model = loaded("qwen3_5")
    oracle = Rig(model, files=tmp_path, embedded=True).ask(PROMPT)
    rig = Rig(model, files=tmp_path, embedded=True)
    usable = [p for p in sorted(checkpoints(rig), reverse=True) if p < len(PROMPT)]
    for identity, _ in [checkpoints(rig)[position] for position in usable[: depth + 1]]:
        name = chain_hash(identity.parent, identity.tokens)
        damage(path_of(rig, name, checkpoint=False))

    answer, again = rig.ask(PROMPT), rig.ask(PROMPT)
    restarted = Rig(model, files=tmp_path, embedded=True).ask(PROMPT)

    assert answer.cached == [*usable, 0][depth + 1]
    assert rig.cache.stats.gdn_checkpoint_walkbacks == depth + 1
    assert again.cached == restarted.cached == len(PROMPT) - 1
    for other in (answer, again, restarted):
        assert_near(other, oracle)


def test_a_chain_of_several_codecs_is_read_file_by_file(loaded: Loaded, tmp_path: Path) -> None:
    """B16: each file by its own metadata, whatever codec the server writes now."""
    model = loaded("qwen3_5")
    prompt: Tokens = ()
    for turn, codec in enumerate((*CODECS, "fp32")):
        prompt += tiny.tokens(23, seed=turn)
        answer = Rig(model, files=tmp_path, codec=codec).ask(prompt, 5)
        assert len(prompt) - answer.cached <= 23 + (turn > 0)
        assert np.abs(answer.logits[0] - cold(model, prompt, 1).logits[0]).max() <= FAR["int8"]
        prompt += tuple(answer.tokens)


# ── what a state is ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
@AHEAD
@STORAGE
def test_a_checkpoint_is_the_state_after_exactly_its_tokens(
    loaded: Loaded, name: str, ahead: bool, embedded: bool, tmp_path: Path
) -> None:
    """B14: the chunk is no multiple of anything; an answer crosses several blocks."""
    model, prompt = loaded(name), tiny.tokens(10 * BLOCK + 7)
    rig = Rig(model, files=tmp_path, chunk=3 * BLOCK + 5, ahead=ahead, embedded=embedded)
    answer = rig.ask(prompt, 2 * BLOCK + 9, num_system=29)

    assert_states_are_of_their_tokens(model, rig)

    follow_up = prompt + tuple(answer.tokens) + tiny.tokens(12, seed=3)
    assert_near(rig.ask(follow_up), cold(model, follow_up))
    assert_states_are_of_their_tokens(model, rig)


@pytest.mark.parametrize("phase", ["prefill", "start", "decode"])
@AHEAD
def test_a_cancel_during_a_step_stores_no_state_under_a_wrong_position(
    loaded: Loaded, phase: str, ahead: bool, tmp_path: Path
) -> None:
    """B14: the step went on, so the row is a token further than what was emitted."""
    model, prompt = loaded("qwen3_5"), tiny.tokens(50)
    seen: list[str] = []

    def cancel(now: str, _uid: int | None) -> None:
        seen.append(now)
        if now == phase and seen.count(now) == (3 if phase == "decode" else 1):
            rig.core.cancel(victim, 0.0)

    rig = Rig(model, files=tmp_path, ahead=ahead, hook=cancel)
    victim = rig.submit(prompt, 20)
    rig.run()

    if checkpoints(rig):
        assert_states_are_of_their_tokens(model, rig)
    follow_up = prompt + tuple(rig.answers[victim].tokens) + tiny.tokens(5, seed=1)
    assert_near(rig.ask(follow_up), cold(model, follow_up))


def test_a_new_row_begins_with_nothing(loaded: Loaded) -> None:
    """B11: whoever had its place before."""
    model = loaded("qwen3_5")
    rig = Rig(model, max_running=2)
    for pair in range(10):
        rig.submit(tiny.tokens(70, seed=100 + pair), 3)
        rig.submit(tiny.tokens(90, seed=200 + pair), 3)
    rig.run()
    short = (200, *tiny.tokens(BLOCK - 3, seed=999))

    answer = rig.ask(short)

    assert answer.cached == 0
    assert answer.tokens == cold(model, short).tokens
    assert greatest_difference(answer, cold(model, short)) == 0.0


@AHEAD
def test_a_checkpoint_does_not_change_with_who_uses_it(loaded: Loaded, ahead: bool) -> None:
    """B11, B20: many tokens later its bytes are the same."""
    rig = Rig(loaded("qwen3_5"), ahead=ahead)
    rig.ask(PROMPT, 2)

    def bits() -> list[bytes]:
        grant = rig.cache.look_up(pack_tokens(PROMPT))
        assert grant.checkpoint is not None and grant.checkpoint.block_id is not None
        rig.cache.pool.release([ref.block_id for ref in grant.refs if ref.block_id is not None])
        return tiny.digests(rig.engine.store.get(grant.checkpoint.block_id))

    before = bits()
    rig.ask(PROMPT, 3 * BLOCK)
    rig.ask((*PROMPT, 5, 6, 7), 3 * BLOCK)

    assert bits() == before


def test_a_checkpoint_holds_on_to_nothing_but_itself(loaded: Loaded) -> None:
    """B62: cut from a batch, it is a copy of one row and not a view of all."""
    model = loaded("qwen3_5")
    caches = fresh_caches(model.model)
    model.model(mx.array([tiny.tokens(9, seed=seed) for seed in range(32)]), cache=caches)
    mx.eval([cache.state for cache in leaves(caches)])
    states = BlockStore(model.cache).cut_states(caches, 5)
    mx.eval(states)
    held = mx.get_active_memory()

    batch_bytes = sum(array.nbytes for cache in leaves(caches)[:3] for array in cache.cache)
    del caches

    assert batch_bytes == 32 * model.cache.checkpoint_bytes
    assert held - mx.get_active_memory() >= batch_bytes


def test_memory_does_not_grow_with_the_number_of_requests(loaded: Loaded) -> None:
    """B62: RAM is full after the first few; from there on nothing is added."""
    model = loaded("qwen3_5")
    rig = Rig(model, hot_bytes=8 * model.cache.checkpoint_bytes)

    def serve(seeds: range) -> int:
        for seed in seeds:
            rig.submit(tiny.tokens(40, seed=seed), 2)
        rig.run()
        rig.recorder.logits.clear()
        mx.clear_cache()
        return mx.get_active_memory()

    early = serve(range(1000, 1020))
    late = serve(range(1020, 1060))

    assert rig.engine.store.nbytes <= 8 * model.cache.checkpoint_bytes
    assert rig.engine.store.nbytes == rig.cache.pool.hot_bytes
    assert late <= early + 2 * model.cache.checkpoint_bytes


# ── batches ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_different_depth_answer_as_if_alone(
    loaded: Loaded, name: str, tmp_path: Path
) -> None:
    model = loaded(name)
    prompts = [tiny.tokens(length, seed=length) for length in (3, 17, 64, 65, 130, 151)]
    rig = Rig(model, files=tmp_path)
    rig.ask(prompts[4], 2)
    rig.ask(prompts[5], 2)
    uids = [rig.submit(prompt, 6 + 3 * index) for index, prompt in enumerate(prompts)]
    rig.run()

    for index, (uid, prompt) in enumerate(zip(uids, prompts, strict=True)):
        assert_near(rig.answers[uid], cold(model, prompt, 6 + 3 * index))


def test_two_rows_restore_one_checkpoint_at_once(loaded: Loaded, tmp_path: Path) -> None:
    model = loaded("qwen3_5")
    oracle = Rig(model, files=tmp_path).ask(PROMPT, 12)

    rig = Rig(model, files=tmp_path)
    uids = [rig.submit(PROMPT, 12), rig.submit(PROMPT, 12)]
    rig.run()

    for uid in uids:
        assert rig.answers[uid].cached == len(PROMPT) - 1
        assert_near(rig.answers[uid], oracle)


def test_two_rows_that_compute_one_prompt_at_once_store_it_once(
    loaded: Loaded, tmp_path: Path
) -> None:
    rig = Rig(loaded("qwen3_5"), files=tmp_path)
    rig.submit(PROMPT, 4)
    rig.submit(PROMPT, 4)
    rig.run()

    places = [identity.place for identity, _ in checkpoints(rig).values()]
    assert sorted(place for place in places if place is not None) == [
        Place.LATTICE,
        Place.LATTICE,
        Place.LAST,
        Place.TURN,
    ]
