"""A short form of ``scripts/soak_server.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crashing import make_chats
from tests.mixing import Mix


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_mixed_clients_get_what_is_right_and_leave_nothing_behind(
    model_path: Callable[[str], Path], name: str, tmp_path: Path
) -> None:
    model = model_path(name)
    chats = make_chats(model, tmp_path / "oracle", seed=3, topics=1)
    mix = Mix(model, tmp_path / "served", chats, seed=3)

    with mix.server.wait_ready():
        asyncio.run(mix.run(30))
        first = mix.held()
        asyncio.run(mix.run(30))
        last = mix.held()
        mix.server.stop()

    assert mix.tally.faults == []
    assert mix.tally.cached_tokens > 0
    assert last["threads"] <= first["threads"]
    assert last["mlx_bytes"] <= first["mlx_bytes"] + 300_000, "blocks are all that may stay"
