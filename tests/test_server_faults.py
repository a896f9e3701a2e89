"""The disk fails under a running server: every answer is right, and the tier comes back by itself.

Also what a kill or a stop may cost, and who may use one directory. Every chat is compared with its
answer without a cache; a request that is not answered with 200 fails its test.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tests.crashing import LIMITS, NEAR, Chat, make_chats
from tests.process import (
    Server,
    block_files,
    cached,
    files_under,
    first_logprob,
    said,
    temporaries,
    until,
)

pytestmark = pytest.mark.slow

BLOCK = 16
RECOVERY_S = 40.0
"""A tier that failed is looked at again within 30 s."""
FLUSH_S = 10.0
"""Idle blocks are to be written within 5 s; the rest is for the machine."""
REPEATS_MAX = 3
"""Of one line in the log, however many requests a fault meets."""
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
"""Even root obeys a folder's mode without these two."""

_fresh = count()


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> Path:
    return model_path("qwen3_5")


@pytest.fixture(scope="module")
def chats(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Chat]:
    """The last turns of conversations that branch: no other prompt goes on where one of them ends.

    Of a prompt that others go on from, the checkpoint at its end may be let go.
    """
    made = make_chats(model, tmp_path_factory.mktemp("oracle"), seed=3, topics=1)
    everything = [chat for chat in made if not chat.salt]

    def goes_on(chat: Chat) -> bool:
        ends = len(chat.tokens)
        return any(len(o.tokens) > ends and o.tokens[:ends] == chat.tokens for o in everything)

    return [chat for chat in everything if not goes_on(chat)]


def serve(model: Path, home: Path, *options: str, through: Sequence[str] = ()) -> Server:
    return Server(model, home, *LIMITS, *options, through=through).wait_ready()


def anew(chats: Sequence[Chat]) -> list[Chat]:
    """The same texts, as prompts that share nothing with any before."""
    salt = f"fresh {next(_fresh)}"
    return [replace(chat, salt=salt) for chat in chats]


def ask(server: Server, chats: Sequence[Chat]) -> list[int]:
    """Put every chat; each answer must be right. Returns the cached tokens of each."""
    reused: list[int] = []
    for chat in chats:
        answer = server.chat(chat.body, **chat.fields)
        assert said(answer) == chat.answer
        assert abs(first_logprob(answer) - chat.logprob) <= NEAR
        assert 0 <= cached(answer) < len(chat.tokens)
        reused.append(cached(answer))
    return reused


def whole(chats: Sequence[Chat]) -> list[int]:
    """The cached tokens of prompts that are known but for the token that is always computed."""
    return [len(chat.tokens) - 1 for chat in chats]


def comes_to(server: Server, *states: str) -> bool:
    return until(lambda: server.tier_state() in states, RECOVERY_S)


def unaccounted(server: Server, cache: Path) -> int:
    """Bytes of the files less those that the server counts; its lock aside."""
    sizes = files_under(cache)
    sizes.pop(cache / "lock", None)
    return sum(sizes.values()) - server.stats()["cache"]["ssd_bytes"]


def assert_books_are_right(server: Server, cache: Path | None = None) -> None:
    where = cache or server.cache
    assert until(server.settled, RECOVERY_S)
    assert until(lambda: 0 <= abs(unaccounted(server, where)) <= 64, RECOVERY_S), (
        f"{unaccounted(server, where)} bytes more on disk than counted"
    )
    assert not temporaries(where)


def assert_said_once(server: Server) -> None:
    """No line of the log for each request: the same words come a few times at most."""
    lines = [line for line in server.log.splitlines() if re.search("WARNING|ERROR", line)]
    words = Counter(re.sub(r"[0-9a-f]{8,}|[0-9]+", "#", line) for line in lines)
    assert not {line: times for line, times in words.items() if times > REPEATS_MAX}
    assert "Traceback" not in server.log


# ── the directory goes ───────────────────────────────────────────────────────────────────────


def test_a_directory_that_is_moved_away_and_back(
    model: Path, chats: list[Chat], tmp_path: Path
) -> None:
    with serve(model, tmp_path / "home") as server:
        ask(server, chats)
        assert until(server.settled)
        away = tmp_path / "away"

        server.cache.rename(away)
        for _ in range(3):
            ask(server, [*chats, *anew(chats)])
        _put_back(away, server.cache, tmp_path / "made meanwhile")
        for _ in range(3):
            ask(server, [*chats, *anew(chats)])

        assert comes_to(server, "ok")
        assert_books_are_right(server)
        assert ask(server, chats) == whole(chats)
        assert_said_once(server)
        server.stop()
    with serve(model, tmp_path / "home") as again:
        assert ask(again, chats) == whole(chats)


def _put_back(away: Path, home: Path, spare: Path) -> None:
    """The server may make the directory anew at any moment, so until it works."""

    def is_back() -> bool:
        if home.exists():
            home.rename(spare.with_name(f"{spare.name} {next(_fresh)}"))
        try:
            away.rename(home)
        except OSError:
            return False
        return True

    assert until(is_back)


@pytest.mark.parametrize("what", ["all that is in it", "the directory itself"])
def test_a_directory_that_is_removed_is_made_anew(
    model: Path, chats: list[Chat], tmp_path: Path, what: str
) -> None:
    """And it is still ours alone."""
    with serve(model, tmp_path) as server:
        ask(server, chats)
        assert until(server.settled)

        # First out of the way, or it could be written to while it is removed.
        removed = tmp_path / "removed"
        if what == "the directory itself":
            server.cache.rename(removed)
        else:
            removed.mkdir()
            for path in list(server.cache.iterdir()):
                path.rename(removed / path.name)
        shutil.rmtree(removed)
        for _ in range(2):
            ask(server, [*chats, *anew(chats)])

        assert comes_to(server, "ok")
        assert until(lambda: len(block_files(server.cache)) > 0, RECOVERY_S)
        assert_books_are_right(server)
        assert_said_once(server)
        with Server(model, tmp_path / "other", "--ssd-cache-dir", str(server.cache)) as second:
            assert second.process.wait(RECOVERY_S) == 4
        assert ask(server, chats) == whole(chats)
        server.stop()
    with serve(model, tmp_path) as again:
        assert ask(again, chats) == whole(chats)


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount")
def test_a_volume_that_is_unmounted_and_comes_back(
    model: Path, chats: list[Chat], tmp_path: Path
) -> None:
    """Nothing is written into the mount point meanwhile: that is the folder of another volume."""
    at = tmp_path / "cache"
    at.mkdir()
    with (
        volume(tmp_path / "volume", 64),
        shown_at(tmp_path / "volume", at) as (unmount, mount),
        serve(
            model,
            tmp_path / "home",
            *("--ssd-cache-dir", str(at), "--ssd-cache-max-size", "32MB"),
            *("--ssd-free-space-floor", "0", "--hot-cache-max-size", "50kB"),
        ) as server,
    ):
        ask(server, chats)
        assert until(server.settled)

        unmount()
        for _ in range(3):
            ask(server, [*chats, *anew(chats)])
        assert comes_to(server, "degraded")
        ask(server, chats)
        assert not list(at.iterdir())
        mount()

        assert comes_to(server, "ok")
        assert sum(ask(server, chats)) > 0
        assert until(server.settled)
        assert_books_are_right(server, at)
        assert ask(server, chats) == whole(chats)
        assert_said_once(server)
        server.stop()


# ── the directory can't be used ──────────────────────────────────────────────────────────────


def obeys_modes() -> Sequence[str] | None:
    """A command that runs a process which file modes hold for; None: there is none."""
    if os.getuid() != 0:
        return ()
    return WITHOUT_RIGHTS if shutil.which(WITHOUT_RIGHTS[0]) else None


def test_a_directory_that_nobody_may_enter(model: Path, chats: list[Chat], tmp_path: Path) -> None:
    through = obeys_modes()
    if through is None:
        pytest.skip("modes do not hold for root, and there is no setpriv")
    with serve(model, tmp_path, through=through) as server:
        ask(server, chats)
        assert until(server.settled)

        server.cache.chmod(0)
        try:
            for _ in range(3):
                ask(server, [*chats, *anew(chats)])
            assert comes_to(server, "degraded")
            ask(server, chats)
        finally:
            server.cache.chmod(0o700)

        assert comes_to(server, "ok")
        ask(server, anew(chats))
        assert ask(server, chats) == whole(chats)
        assert_books_are_right(server)
        assert_said_once(server)
        server.stop()


def test_files_that_may_not_grow(model: Path, chats: list[Chat], tmp_path: Path) -> None:
    """The kernel refuses each write in its middle, as a quota does."""
    with serve(model, tmp_path, "--log-level", "warning") as server:
        pid = server.process.pid
        ask(server, chats)
        assert until(server.settled)
        unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)

        # Less than a block's file. The log, which is a file as well, is shorter.
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (2000, unlimited[1]))
        for _ in range(3):
            ask(server, [*chats, *anew(chats)])
        assert comes_to(server, "degraded", "full")
        assert ask(server, chats) == whole(chats)
        assert not temporaries(server.cache)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)

        assert comes_to(server, "ok")
        assert_books_are_right(server)
        files = len(block_files(server.cache))
        ask(server, anew(chats))
        assert until(lambda: len(block_files(server.cache)) > files)
        assert_said_once(server)
        server.stop()


@contextmanager
def volume(at: Path, megabytes: int) -> Iterator[Callable[[int], None]]:
    """A small volume of its own; yields what gives it another size. Skips where none may be had."""
    at.mkdir()
    options = f"size={megabytes}m,mode=700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no volume can be mounted here: {mounted.stderr.strip()}")
    try:
        yield lambda size: _mount("-o", f"remount,size={size}m", str(at))
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


@contextmanager
def shown_at(folder: Path, at: Path) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Mount a folder at another as well; yields what ends that at once, and what begins it."""

    def unmount() -> None:
        subprocess.run(["umount", "--lazy", str(at)], check=True)

    def mount() -> None:
        _mount("--bind", str(folder), str(at))

    mount()
    try:
        yield unmount, mount
    finally:
        if at.is_mount():
            unmount()


def _mount(*options: str) -> None:
    subprocess.run(["mount", *options], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount")
@pytest.mark.parametrize(("megabytes", "floor"), [(1, "0"), (2, "50%")], ids=["full", "floor"])
def test_a_volume_that_runs_full(
    model: Path, chats: list[Chat], tmp_path: Path, megabytes: int, floor: str
) -> None:
    """Nothing is deleted, what is there is read, and more room is used when there is some."""
    at = tmp_path / "volume"
    with (
        volume(at, megabytes) as resize,
        serve(
            model,
            tmp_path / "home",
            *("--ssd-cache-dir", str(at / "cache"), "--ssd-cache-max-size", "100MB"),
            *("--ssd-free-space-floor", floor, "--hot-cache-max-size", "50kB"),
        ) as server,
    ):
        ask(server, chats)
        assert until(server.settled)
        first = set(block_files(at))
        for _ in range(8):
            ask(server, anew(chats))
        assert comes_to(server, "full")
        kept = len(block_files(at))
        ask(server, [*chats, *anew(chats)])
        assert server.stats()["cache"]["evictions_ssd"] == 0
        thinned = first - set(block_files(at))
        assert all("_gdn_sidecars" in path.parts for path in thinned), "a newer one is better"
        if floor != "0":
            status = os.statvfs(at)
            assert status.f_bavail >= 0.45 * status.f_blocks

        resize(64)
        assert comes_to(server, "ok")
        ask(server, anew(chats))

        assert until(lambda: len(block_files(at)) > kept)
        assert_books_are_right(server, at / "cache")
        assert_said_once(server)
        server.stop()


# ── how it ends ──────────────────────────────────────────────────────────────────────────────

NARROW = ("--ssd-pending-max-size", "4kB", "--gdn-ssd-pending-max-size", "30kB")
"""Room for one block and two checkpoints on their way to a file: most have to wait."""


def blocks_of(chats: Sequence[Chat]) -> int:
    """How many different full blocks the prompts have."""
    ends = [(chat, end) for chat in chats for end in range(BLOCK, len(chat.tokens), BLOCK)]
    return len({(chat.salt, chat.tokens[:end]) for chat, end in ends})


def is_flushed(server: Server, chats: Sequence[Chat]) -> bool:
    files = block_files(server.cache)
    checkpoints = sum("_gdn_sidecars" in path.parts for path in files)
    known = server.stats()["gdn"]["checkpoints"]
    return len(files) - checkpoints >= blocks_of(chats) and checkpoints >= known > 0


def test_a_kill_after_some_idle_seconds_loses_nothing(
    model: Path, chats: list[Chat], tmp_path: Path
) -> None:
    """B44: what had no room to wait for the disk is written when there is nothing else to do."""
    with serve(model, tmp_path, *NARROW) as server:
        ask(server, chats)
        assert until(lambda: server.settled() and is_flushed(server, chats), FLUSH_S)
        server.kill()
    with serve(model, tmp_path) as again:
        assert ask(again, chats) == whole(chats)


def test_a_polite_end_writes_all_that_waited(
    model: Path, chats: list[Chat], tmp_path: Path
) -> None:
    """B44: at once after the last answer, with room for little to be under way."""
    with serve(model, tmp_path, *NARROW) as server:
        ask(server, chats)
        server.stop()
        assert not temporaries(server.cache)
    with serve(model, tmp_path) as again:
        assert ask(again, chats) == whole(chats)


# ── who may use it ───────────────────────────────────────────────────────────────────────────


def test_a_lock_dies_with_its_server(model: Path, chats: list[Chat], tmp_path: Path) -> None:
    """B50: a second one is refused while the first lives, however it ended before."""
    with serve(model, tmp_path) as first:
        ask(first, chats)
        assert until(first.settled)
        with Server(model, tmp_path / "other", "--ssd-cache-dir", str(first.cache)) as second:
            assert second.process.wait(RECOVERY_S) == 4
        assert str(first.process.pid) in second.log
        ask(first, chats)
        first.send(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            first.process.wait(RECOVERY_S)
        with serve(model, tmp_path) as next_one:
            assert ask(next_one, chats) == whole(chats)
