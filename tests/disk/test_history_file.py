"""The history survives a restart, stays small, and a file that can't be read stops nothing."""

from __future__ import annotations

import logging
import sqlite3
import stat
from pathlib import Path

import pytest

from omlx.core.history import COLUMNS, MARKS_MAX, RESOLUTIONS, History, Kept
from omlx.disk.history_file import NAMESPACES_MAX, HistoryFile
from tests.sim.records import record

NOW = 1_700_000_000.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "history.sqlite"


def file_at(path: Path, now: float = NOW) -> HistoryFile:
    return HistoryFile(path, lambda: now)


def changed(now: float = NOW) -> Kept:
    history = History(now)
    history.add(record(), now)
    history.mark("model", now)
    kept = history.take_changed()
    return Kept(kept.rows, kept.marks, (("00ff", 0, 2.0, 3.0),))


def set_aside(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir() if ".corrupt-" in p.name)


def test_what_was_saved_is_loaded_by_the_next_process(path: Path) -> None:
    first = file_at(path)
    first.save(changed())
    first.close()

    kept = file_at(path).load()

    assert sorted(kept.rows) == sorted(changed().rows)
    assert kept.marks == ((NOW, "model"),)
    assert kept.speeds == (("00ff", 0, 2.0, 3.0),)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_bucket_is_written_again_and_not_twice(path: Path) -> None:
    file = file_at(path)
    history = History(NOW)
    for _ in range(3):
        history.add(record(), NOW)
        file.save(history.take_changed())

    rows = dict(file.load().rows)

    assert len(rows) == len(RESOLUTIONS)
    assert {row[4] for row in rows.values()} == {3}


def test_looking_for_a_history_makes_none(path: Path) -> None:
    assert file_at(path).load() == Kept()
    assert not path.parent.exists()


def test_what_is_too_old_or_of_the_future_goes(path: Path) -> None:
    file_at(path, NOW + 10**9).save(changed(NOW + 10**9))
    file_at(path, NOW - 10**9).save(changed(NOW - 10**9))
    file = file_at(path)

    file.save(changed())

    assert sorted(file.load().rows) == sorted(changed().rows)


def test_it_is_bounded_however_long_it_is_written_to(path: Path) -> None:
    for step in range(4):
        now = NOW + step * 40 * 86_400
        file, history = file_at(path, now), History(now)
        for second in range(2000):
            history.add(record(), now - 2000 + second)
            history.mark("model", now - 2000 + second)
        speeds = tuple((f"{step}-{n}", 0, 1.0, 1.0) for n in range(NAMESPACES_MAX))
        kept = history.take_changed()
        file.save(Kept(kept.rows, kept.marks, speeds))
        found = file.load()
        file.close()

        assert len(found.rows) <= sum(length + 2 for _, length in RESOLUTIONS.values())
        assert (len(found.marks), len(found.speeds)) == (MARKS_MAX, NAMESPACES_MAX)
        assert found.speeds[0][0].startswith(f"{step}-")
        assert path.stat().st_size < 1_000_000


def damaged(path: Path, how: str) -> None:
    """A file that was written, and what became of it."""
    file = file_at(path)
    file.save(changed())
    file.close()
    whole = path.read_bytes()
    match how:
        case "text":
            path.write_bytes(b"no database at all, but longer than a header of a hundred bytes" * 9)
        case "short":
            path.write_bytes(whole[: len(whole) // 2])
        case "flipped":
            path.write_bytes(whole[:4096] + bytes(len(whole) - 4096))
        case _:
            with sqlite3.connect(path) as database:
                database.executescript(how)
            database.close()


@pytest.mark.parametrize(
    "how",
    [
        "text",
        "short",
        "flipped",
        "PRAGMA user_version = 99;",
        "DROP TABLE buckets;",
        "ALTER TABLE marks RENAME COLUMN what TO why;",
        "UPDATE buckets SET cached = -1;",
        "UPDATE buckets SET cached = 'many';",
        "UPDATE buckets SET width_s = 7 WHERE width_s = 60;",
        "UPDATE speeds SET weight = 0;",
        "UPDATE marks SET time = 'noon';",
    ],
)
def test_a_file_that_cannot_be_understood_is_moved_aside_and_another_begun(
    path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    damaged(path, how)
    file = file_at(path)

    found = file.load()
    file.save(changed())

    assert found == Kept()
    assert set_aside(path) == ["history.sqlite.corrupt-20231114T221320Z"]
    assert sorted(file.load().rows) == sorted(changed().rows)
    lines = [line for line in caplog.records if line.levelno >= logging.WARNING]
    assert len(lines) == 1 and "begin anew" in lines[0].getMessage()


def test_damage_while_it_runs_loses_the_past_and_not_what_is_saved_then(path: Path) -> None:
    file = file_at(path)
    file.save(changed())
    file.close()
    path.write_bytes(b"x" * 5000)
    journal = path.with_name("history.sqlite-journal")
    journal.write_bytes(b"left behind")

    file.save(changed())

    assert sorted(file.load().rows) == sorted(changed().rows)
    assert set_aside(path) and not journal.exists()


def test_two_damaged_files_of_one_second_are_both_kept(path: Path) -> None:
    for _ in range(2):
        damaged(path, "text")
        file_at(path).load()

    assert len(set_aside(path)) == 2


def test_a_locked_file_is_left_alone_and_written_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx.disk.history_file.LOCK_WAIT_S", 0.0)
    file = file_at(path)
    file.save(changed())
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")

    with pytest.raises(OSError, match="locked"):
        file.save(changed(NOW - 60))
    with pytest.raises(OSError, match="locked"):
        file_at(path).load()
    other.execute("ROLLBACK")
    other.close()
    file.save(changed(NOW - 60))

    assert len(file.load().rows) == 2 * len(RESOLUTIONS) - 1  # the hour is the same
    assert not set_aside(path)


def test_a_link_is_not_followed(path: Path) -> None:
    path.parent.mkdir()
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_bytes(b"")
    path.symlink_to(elsewhere)

    with pytest.raises(OSError):
        file_at(path).save(changed())

    assert elsewhere.read_bytes() == b""


def test_the_columns_are_those_of_the_buckets(path: Path) -> None:
    file_at(path).save(changed())

    with sqlite3.connect(path) as database:
        columns = [name for _, name, *_ in database.execute("PRAGMA table_info(buckets)")]
    database.close()

    assert tuple(columns) == ("width_s", *COLUMNS)
