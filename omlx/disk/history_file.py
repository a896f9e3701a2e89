"""The file of the history: a small SQLite database that only this process writes.

    table     columns                                              rows
    buckets   width_s, time, and the counts of ``core/history``    what the charts cover: < 2,900
    marks     time, what                                           200
    speeds    namespace, depth, weight, weighted_s                 32 a model, of 50 models

A file that can't be understood is moved aside with its journal, and another is begun: it counts
for nothing, but it is not lost either. One that is only out of reach (locked, no room) stays, and
what was to be written is written later. All of this is for one thread.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from omlx.core.history import COLUMNS, MARKS_MAX, RESOLUTIONS, History, Kept
from omlx.core.prefill_cost import PrefillCost

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION = 1
FILE_BYTES_MAX = 64 << 20
"""Hundreds of times what we write: a larger one is somebody else's."""

NAMESPACES_MAX = 50
LOCK_WAIT_S = 2.0

_FAULTS_OF_THE_FILE = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
"""Of SQLite's result codes; SQLITE_ERROR is a table or a column that is not there."""

_COUNTS = ", ".join(COLUMNS)
_SCHEMA = f"""
CREATE TABLE buckets (
    width_s INTEGER NOT NULL,
    {", ".join(f"{name} INTEGER NOT NULL" for name in COLUMNS)},
    PRIMARY KEY (width_s, time)
) WITHOUT ROWID;
CREATE TABLE marks (time REAL NOT NULL, what TEXT NOT NULL);
CREATE TABLE speeds (
    namespace TEXT NOT NULL,
    depth INTEGER NOT NULL,
    weight REAL NOT NULL,
    weighted_s REAL NOT NULL,
    PRIMARY KEY (namespace, depth)
);
PRAGMA user_version = {VERSION};
"""


class NotOurs(Exception):
    """The file is damaged, or of another format."""


class HistoryFile:
    """``path`` is ``history.sqlite`` in the home directory."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._now = now
        self._database: sqlite3.Connection | None = None

    def load(self) -> Kept:
        """What was kept. Nothing when there is no file, and when it had to be moved aside.

        Raises OSError when it is out of reach.
        """
        if self._database is None and not self._path.exists():
            return Kept()  # a server that never becomes one leaves nothing behind
        try:
            return self._attempt(self._load)
        except NotOurs as fault:
            self._begin_anew(fault)
            return Kept()

    def save(self, changed: Kept) -> None:
        """Add what changed, and drop what is too old. Raises OSError, and then nothing changed."""
        try:
            self._attempt(lambda database: self._save(database, changed))
        except NotOurs as fault:
            self._begin_anew(fault)
            self._attempt(lambda database: self._save(database, changed))

    def close(self) -> None:
        """Harmless when it is closed. The next call opens the file again."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _attempt(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Raises NotOurs, or OSError."""
        try:
            if self._database is None:
                self._database = self._open()
            with self._database:
                return work(self._database)
        except sqlite3.Error as error:
            self.close()
            if error_code(error) in _FAULTS_OF_THE_FILE:
                raise NotOurs(str(error)) from None
            raise OSError(f"{self._path}: {error}") from None
        except NotOurs:
            self.close()
            raise

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # For this user's eyes only from the first byte on, and never where a link leads.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o600)
        try:
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if size > FILE_BYTES_MAX:
            raise NotOurs(f"longer than {FILE_BYTES_MAX} bytes")
        database = sqlite3.connect(self._path, timeout=LOCK_WAIT_S)
        try:
            _check_or_make(database)
        except BaseException:
            database.close()
            raise
        return database

    def _load(self, database: sqlite3.Connection) -> Kept:
        rows = database.execute(f"SELECT width_s, {_COUNTS} FROM buckets ORDER BY time")
        marks = database.execute("SELECT time, what FROM marks ORDER BY time")
        speeds = database.execute("SELECT namespace, depth, weight, weighted_s FROM speeds")
        kept = Kept(tuple((width_s, row) for width_s, *row in rows), tuple(marks), tuple(speeds))
        try:
            History(self._now(), kept)
            PrefillCost([(depth, w, s) for _, depth, w, s in kept.speeds])
        except (TypeError, ValueError) as fault:
            raise NotOurs(str(fault)) from None
        return kept

    def _save(self, database: sqlite3.Connection, changed: Kept) -> None:
        places = ", ".join("?" * (len(COLUMNS) + 1))
        database.executemany(
            f"INSERT OR REPLACE INTO buckets (width_s, {_COUNTS}) VALUES ({places})",
            [(width_s, *row) for width_s, row in changed.rows],
        )
        database.executemany("INSERT INTO marks (time, what) VALUES (?, ?)", changed.marks)
        database.executemany(
            "INSERT OR REPLACE INTO speeds (namespace, depth, weight, weighted_s)"
            " VALUES (?, ?, ?, ?)",
            changed.speeds,
        )
        now = self._now()
        for width_s, length in RESOLUTIONS.values():
            # Those of the future, of a clock that was set back, would stay for ever.
            database.execute(
                "DELETE FROM buckets WHERE width_s = ? AND NOT (time > ? AND time <= ?)",
                (width_s, now - width_s * (length + 1), now + width_s),
            )
        database.execute(
            "DELETE FROM marks WHERE rowid NOT IN (SELECT rowid FROM marks ORDER BY time DESC"
            " LIMIT ?)",
            (MARKS_MAX,),
        )
        database.execute(
            "DELETE FROM speeds WHERE namespace NOT IN (SELECT namespace FROM speeds"
            " GROUP BY namespace ORDER BY max(rowid) DESC LIMIT ?)",
            (NAMESPACES_MAX,),
        )

    def _begin_anew(self, fault: Exception) -> None:
        self.close()
        place = self._set_aside()
        log.warning(
            "the history in %s cannot be read (%s); %s; the charts begin anew",
            self._path,
            fault,
            f"the file was moved to {place}",
        )

    def _set_aside(self) -> Path:
        """Raises OSError when it can't be moved."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._now()))
        place = self._path.with_name(f"{self._path.name}.corrupt-{stamp}")
        num_tries = 1
        while place.exists():
            num_tries += 1
            place = self._path.with_name(f"{self._path.name}.corrupt-{stamp}-{num_tries}")
        self._path.rename(place)
        # A journal that is left behind would be played back into the new file.
        for ending in ("-journal", "-wal", "-shm"):
            journal = self._path.with_name(self._path.name + ending)
            if journal.exists():
                journal.rename(place.with_name(place.name + ending))
        return place


def error_code(error: sqlite3.Error) -> int:
    """SQLite's result code without its extension; SQLITE_ERROR where there is none."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _check_or_make(database: sqlite3.Connection) -> None:
    """Raises NotOurs, or sqlite3.Error."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    (num_tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version == 0 and num_tables == 0:
        database.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        return
    if version != VERSION:
        raise NotOurs(f"it is of version {version}, this is {VERSION}")
    (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise NotOurs(verdict)
