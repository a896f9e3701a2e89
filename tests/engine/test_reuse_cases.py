"""What users lost reuse or got wrong answers by, replayed on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from omlx.cache.tickets import Reason
from omlx.engine.load import LoadedModel
from tests import tiny
from tests.engine.rig import BLOCK, Rig
from tests.engine.test_step import assert_near

Loaded = Callable[[str], LoadedModel]


def test_old_chats_never_show_in_new_answers_while_they_are_evicted(loaded: Loaded) -> None:
    """B23: many old chats, room for five, two new prompts at once; and every token is counted."""
    model = loaded("llama")
    chats = [tiny.tokens(3 * BLOCK + 5, seed=seed) for seed in range(30)]
    room = 5 * 4 * BLOCK * model.cache.bytes_per_token
    rig = Rig(model, hot_bytes=room)
    for chat in chats:
        rig.ask(chat, 4)

    for seed in range(0, 28, 2):
        prompts = [
            (*chats[seed + k][: BLOCK + 3], *tiny.tokens(20, seed=90 + seed + k)) for k in (0, 1)
        ]
        uids = [rig.submit(prompt, 6) for prompt in prompts]
        rig.run()
        for uid, prompt in zip(uids, prompts, strict=True):
            answer = rig.answers[uid]
            stops = [p.stop for plan in rig.plans for p in plan.prefills if p.uid == uid]
            computed = max(stops, default=answer.cached) - answer.cached
            assert_near(answer, Rig(model, caching=False).ask(prompt, 6))
            assert answer.cached + computed == len(prompt) - 1, "the last is fed by the first step"
        assert rig.cache.pool.hot_bytes <= room


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_restart_counts_what_lies_there_and_writes_nothing_twice(
    loaded: Loaded, name: str, tmp_path: Path
) -> None:
    """B56: the books agree with the folder before the first request, and after the same one."""
    model, prompt = loaded(name), tiny.tokens(5 * BLOCK + 7)
    Rig(model, files=tmp_path).ask(prompt)

    again = Rig(model, files=tmp_path)
    lying = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert again.cache.cold.ledger.total_bytes == lying

    answer = again.ask(prompt)
    assert answer.cached == len(prompt) - 1
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) == lying


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_prompts_shorter_than_a_block_are_reused_and_their_end_counts(
    loaded: Loaded, name: str
) -> None:
    """B70: no spacing is too large for a prompt, and what stands in the tail is computed."""
    model, rig = loaded(name), Rig(loaded(name))
    prompt = tiny.tokens(BLOCK - 5)
    rig.ask(prompt)

    repeat, changed = rig.ask(prompt), rig.ask((*prompt[:-2], 7, 8))

    assert repeat.cached == len(prompt) - 1
    assert_near(repeat, Rig(model, caching=False).ask(prompt))
    assert_near(changed, Rig(model, caching=False).ask((*prompt[:-2], 7, 8)))


@pytest.mark.parametrize("embedded", [False, True])
def test_a_chat_that_never_fills_a_block_or_an_interval_is_reused_all_the_same(
    loaded: Loaded, embedded: bool
) -> None:
    """B70: so too large a spacing needs no warning. Ends of prompts, turns and the system part
    get checkpoints wherever they lie; the interval only serves what diverges in between."""
    rig = Rig(loaded("qwen3_5"), interval=1 << 16, embedded=embedded)
    system, first, second, other = (tiny.tokens(4, seed=seed) for seed in range(4))
    prompt = system + first
    reply = tuple(rig.ask(prompt, 3, num_system=len(system)).tokens)
    turn = (*prompt, *reply, *second)
    assert len(turn) < BLOCK

    assert rig.ask(prompt, 3, num_system=len(system)).cached == len(prompt) - 1
    assert rig.ask(turn, 4, num_system=len(system)).cached >= len(prompt + reply) - 1
    assert rig.ask(system + other, 4, num_system=len(system)).cached == len(system)


def test_a_reply_that_is_rendered_differently_is_reused_up_to_the_difference(
    loaded: Loaded,
) -> None:
    """B76: the last user turn stays; the log says at which token the prompts part."""
    model = loaded("llama")
    rig = Rig(model)
    prompt = tiny.tokens(3 * BLOCK + 9)
    reply = rig.ask(prompt, 12).tokens
    changed = (*prompt, *reply[:3], (reply[3] + 1) % 200 + 1, *tiny.tokens(20, seed=5))

    answer = rig.ask(changed)

    assert answer.cached == len(prompt) + 3
    assert answer.closed is not None
    assert answer.closed.reuse_ended.token == answer.cached
    assert answer.closed.reuse_ended.reason is Reason.DIVERGED
    assert_near(answer, Rig(model, caching=False).ask(changed))


def test_a_limit_that_was_halved_holds_from_the_start(loaded: Loaded, tmp_path: Path) -> None:
    """B55: files that were there before count; leaves go first, so what is left is found."""
    model, prompt = loaded("llama"), tiny.tokens(8 * BLOCK + 3)
    rig = Rig(model, files=tmp_path)
    rig.ask(prompt)
    half = rig.cache.cold.ledger.total_bytes // 2

    again = Rig(model, files=tmp_path)
    again.cache.cold.set_limit(half)
    answer = again.ask(prompt, 1)

    assert again.cache.cold.ledger.total_bytes <= half
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) <= half
    assert answer.cached >= 3 * BLOCK
    assert_near(answer, Rig(model, caching=False).ask(prompt, 1))
