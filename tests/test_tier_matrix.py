"""The settings of the tiers, each in a server of its own: what is kept, what is not, and where.

One row of the matrix a test. Everything is asked over HTTP and seen in the files; each answer is
compared with the one of a server without any cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.process import Server, block_files, cached, files_under, first_logprob, said, until, user

pytestmark = pytest.mark.slow

TEXT = "the cat sat on the mat and looked at two red birds. " * 4
NEAR = 1e-4
"""Of the logprob of the first token."""
SMALL = ("--paged-cache-block-size", "16", "--gdn-checkpoint-interval", "64")
WITHOUT_RAM = ("--hot-cache-max-size", "0")


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> Path:
    return model_path("qwen3_5")


@pytest.fixture(scope="module")
def oracle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answer without a cache, which leaves no file and reuses nothing."""
    home = tmp_path_factory.mktemp("oracle")
    with serve(model, home, "--no-cache") as server:
        answer, repeat = ask(server), ask(server)
        server.stop()
    assert cached(answer) == cached(repeat) == 0
    assert said(answer) == said(repeat)
    assert not files_under(home / "cache")
    return answer


def serve(model: Path, home: Path, *options: str) -> Server:
    return Server(model, home, *SMALL, *options).wait_ready()


def ask(server: Server) -> dict[str, Any]:
    return server.chat(user(TEXT), max_tokens=8, logprobs=True)


def assert_reuses(
    answer: dict[str, Any], oracle: dict[str, Any], *, ram: bool = False, ssd: bool = False
) -> None:
    """All but the last token from that tier, or nothing; and the same answer."""
    tokens = oracle["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens"] == tokens
    assert cached(answer) == (tokens - 1 if ram or ssd else 0)
    sources = {"ram": cached(answer) if ram else 0, "ssd": cached(answer) if ssd else 0}
    assert answer["omlx"]["cached_from"] == sources
    assert said(answer) == said(oracle)
    assert abs(first_logprob(answer) - first_logprob(oracle)) <= NEAR


def sidecars(root: Path) -> list[Path]:
    return [path for path in files_under(root) if "_gdn_sidecars" in path.parts]


def test_without_a_ram_tier_an_immediate_repeat_comes_from_files(
    model: Path,
    oracle: dict[str, Any],
    tmp_path: Path,
) -> None:
    """B67: also while they are on their way to the disk."""
    with serve(model, tmp_path, *WITHOUT_RAM) as server:
        first, *repeats = (ask(server) for _ in range(3))
        assert until(lambda: server.stats()["cache"]["ssd_restored_bytes"] > 0)
        assert server.stats()["cache"]["hot_bytes"] == 0
        server.stop()

    assert_reuses(first, oracle)
    for repeat in repeats:
        assert_reuses(repeat, oracle, ssd=True)


def test_without_an_ssd_tier_nothing_outlives_the_server(
    model: Path, oracle: dict[str, Any], tmp_path: Path
) -> None:
    with serve(model, tmp_path, "--ssd-cache-max-size", "0") as server:
        first, repeat = ask(server), ask(server)
        assert server.tier_state() == "off"
        server.stop()
    assert not files_under(tmp_path / "cache")
    with serve(model, tmp_path, "--ssd-cache-max-size", "0") as server:
        later = ask(server)

    assert_reuses(first, oracle)
    assert_reuses(repeat, oracle, ram=True)
    assert_reuses(later, oracle)


def test_without_any_tier_nothing_is_reused(
    model: Path, oracle: dict[str, Any], tmp_path: Path
) -> None:
    """Both limits are 0; ``--no-cache`` is the oracle itself."""
    off = (*WITHOUT_RAM, "--ssd-cache-max-size", "0")
    with serve(model, tmp_path, *off) as server:
        answers = [ask(server) for _ in range(3)]
        server.stop()

    for answer in answers:
        assert_reuses(answer, oracle)
    assert not files_under(tmp_path / "cache")


def test_what_was_written_through_survives_a_kill_right_after_the_answer(
    model: Path,
    oracle: dict[str, Any],
    tmp_path: Path,
) -> None:
    through = ("--ssd-write-policy", "through")
    with serve(model, tmp_path, *through) as server:
        first = ask(server)
        server.kill()
    with serve(model, tmp_path, *through) as server:
        later = ask(server)

    assert sidecars(tmp_path)
    assert_reuses(first, oracle)
    assert_reuses(later, oracle, ssd=True)


def test_selective_writes_what_was_asked_for_twice(
    model: Path, oracle: dict[str, Any], tmp_path: Path
) -> None:
    """Not even a polite end writes what was asked for once."""
    selective = ("--ssd-write-policy", "selective")
    with serve(model, tmp_path, *selective) as server:
        ask(server)
        server.stop()
    assert not block_files(tmp_path)
    with serve(model, tmp_path, *selective) as server:
        first, second = ask(server), ask(server)
        server.stop()
    assert block_files(tmp_path)
    with serve(model, tmp_path, *selective) as server:
        later = ask(server)

    assert_reuses(first, oracle)
    assert_reuses(second, oracle, ram=True)
    assert_reuses(later, oracle, ssd=True)


def test_a_checkpoint_that_is_embedded_in_a_block_is_reused_after_a_restart(
    model: Path, oracle: dict[str, Any], tmp_path: Path
) -> None:
    """No checkpoint has a file of its own, and one is restored all the same."""
    embedded = ("--gdn-snapshot-storage", "embedded")
    with serve(model, tmp_path, *embedded) as server:
        first = ask(server)
        server.stop()
    assert block_files(tmp_path)
    assert not sidecars(tmp_path)
    with serve(model, tmp_path, *embedded) as server:
        later = ask(server)
        assert until(lambda: server.stats()["gdn"]["gdn_checkpoint_loads"] == 1)
        assert server.stats()["gdn"]["storage"] == "embedded"
        server.stop()

    assert not sidecars(tmp_path)
    assert_reuses(first, oracle)
    assert_reuses(later, oracle, ssd=True)
