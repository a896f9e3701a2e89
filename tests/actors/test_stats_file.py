"""The all-time totals on disk: the last whole ones, for this user alone."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from omlx.actors.stats_file import StatsFile
from omlx.core.usage import Totals


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


async def test_the_file_is_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "home" / "stats.json"
    store = StatsFile(path)

    await store.save(Totals(processed_tokens=7))
    await store.save(Totals(processed_tokens=8))

    assert await store.load() == Totals(processed_tokens=8)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names_in(path.parent) == ["stats.json"]


async def test_no_file_is_zeros(tmp_path: Path) -> None:
    assert await StatsFile(tmp_path / "stats.json").load() == Totals()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[]", b'{"completed": -1}', b"0" * 70_000]
)
async def test_a_corrupt_file_is_set_aside_with_a_warning(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "stats.json"
    store = StatsFile(path, now=lambda: 0.0)
    for _ in range(2):
        path.write_bytes(content)
        assert await store.load() == Totals()

    names = names_in(tmp_path)
    assert names == [f"stats.json.corrupt-19700101T000000Z{end}" for end in ("", "-2")]
    assert (tmp_path / names[0]).read_bytes() == content
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 2


async def test_a_failed_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stats.json"
    store = StatsFile(path)
    await store.save(Totals(processed_tokens=7))

    async def full(fd: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("omlx.actors.stats_file._fsync", full)
    with pytest.raises(OSError):
        await store.save(Totals(processed_tokens=8))

    assert await store.load() == Totals(processed_tokens=7)
    assert names_in(tmp_path) == ["stats.json"]
