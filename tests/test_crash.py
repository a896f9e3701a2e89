"""A server that is killed at any moment comes back, and its answers are those without a cache.

``scripts/crash.py`` does the same for as long as you like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crashing import Chat, Crashes, Moment, make_chats

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> Path:
    return model_path("qwen3_5")


@pytest.fixture(scope="module")
def chats(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Chat]]:
    yield make_chats(model, tmp_path_factory.mktemp("oracle"), seed=1, topics=1)


def test_a_kill_at_any_moment_costs_no_answer(
    model: Path, chats: list[Chat], tmp_path: Path
) -> None:
    """B10, B44, B46, B50: limits, files and books agree at the end as well."""
    crashes = Crashes(model, tmp_path, chats, seed=1, ssd_bytes=300_000, hot_bytes=100_000)
    for moment in Moment:
        crashes.kill_at(moment)
    crashes.end_well()

    tally = crashes.tally
    assert tally.wrong == []
    assert tally.kills.total() == len(Moment)
    assert tally.answers >= len(chats)
    assert tally.from_cache > 0
    assert tally.evicted > 0
    assert tally.files_lost == 0


def test_files_that_are_spoiled_between_two_lives_cost_no_answer(
    model: Path, chats: list[Chat], tmp_path: Path
) -> None:
    """B08: cut, zeroed, flipped, or another's under its name."""
    crashes = Crashes(
        model, tmp_path, chats, seed=2, ssd_bytes=300_000, hot_bytes=100_000, damage=True
    )
    crashes.kill_at(Moment.SERVE)
    crashes.end_well()

    tally = crashes.tally
    assert tally.wrong == []
    assert tally.damaged > 0
    assert tally.from_cache > 0
