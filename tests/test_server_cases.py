"""The SSD tier over the lives of a server: limits, order, other models, temporaries, and the end.

Between two lives files are made older, younger or unusable; the next life is asked over HTTP, and
what it leaves of them is looked at.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest

from tests.cachefiles import of_format
from tests.process import (
    Server,
    block_files,
    cached,
    files_under,
    said,
    temporaries,
    until,
    user,
    writer_of,
)
from tests.tiny import LOOP

pytestmark = pytest.mark.slow

ModelPath = Callable[[str], Path]

WITHIN_S = 10.0
"""A limit holds so soon after a start."""
BLOCK_FILE_BYTES = 16_384
"""More than any file of these models has."""
YEAR_2099, YEAR_1970 = 4_070_908_800, 1_000
SMALL = ("--paged-cache-block-size", "16", "--gdn-checkpoint-interval", "64")
THROUGH = ("--ssd-write-policy", "through")
"""What an answer left is in files when it is there."""
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


def serve(model: Path, home: Path, *options: str) -> Server:
    return Server(model, home, *SMALL, *options).wait_ready()


def limited(nbytes: int) -> tuple[str, str]:
    return "--ssd-cache-max-size", f"{nbytes}B"


def ask(server: Server, salt: str, length: int = 400, max_tokens: int = 2) -> dict[str, Any]:
    """A prompt of about ``length`` tokens. Other salts share nothing with it."""
    text = ("lorem ipsum dolor sit amet, " * (1 + length // 28))[:length]
    return server.chat(user(text), max_tokens=max_tokens, cache_salt=salt)


def is_whole(answer: dict[str, Any]) -> bool:
    return cached(answer) == answer["usage"]["prompt_tokens"] - 1


def du(cache: Path) -> int:
    """Of everything under the root but the lock."""
    sizes = files_under(cache)
    sizes.pop(cache / "lock", None)
    return sum(sizes.values())


def counts_what_is_there(server: Server) -> bool:
    lock = (server.cache / "lock").stat().st_size
    return server.stats()["cache"]["ssd_bytes"] - du(server.cache) in (0, lock)


def numbers(pattern: str, log: str) -> list[int]:
    """The groups of the one line that has this pattern."""
    (found,) = re.finditer(pattern, log)
    return [int(group) for group in found.groups()]


def files_by_life(
    model: Path, home: Path, salts: Sequence[str], *options: str
) -> dict[str, dict[Path, int]]:
    """A life in which each salt is asked once; the files that each left."""
    found: dict[str, dict[Path, int]] = {}
    with serve(model, home, *THROUGH, *options) as server:
        before: Mapping[Path, int] = block_files(server.cache)
        for salt in salts:
            ask(server, salt)
            after = block_files(server.cache)
            found[salt] = {path: size for path, size in after.items() if path not in before}
            before = after
        server.stop()
    left = block_files(home / "cache")
    return {salt: {p: left[p] for p in paths if p in left} for salt, paths in found.items()}


# ── how it ends ──────────────────────────────────────────────────────────────────────────────


@SIGNALS
def test_the_last_thing_a_server_does_is_to_write_what_waits(
    number: signal.Signals, model_path: ModelPath, tmp_path: Path
) -> None:
    """B44: with a queue of a few bytes, right after the answer; the log counts what it was."""
    narrow = ("--ssd-pending-max-size", "1B", "--gdn-ssd-pending-max-size", "1B")
    with serve(model_path("qwen3_5"), tmp_path, *narrow) as server:
        answer = ask(server, "a", length=1500)
        written = len(block_files(server.cache))
        server.send(number)
        code = server.process.wait(60)
        flushed, dropped = numbers(r"flushed=(\d+) dropped=(\d+)", server.log)
        found = block_files(server.cache)
    with serve(model_path("qwen3_5"), tmp_path) as again:
        later = ask(again, "a", length=1500)

    blocks = answer["usage"]["prompt_tokens"] // 16
    assert code == 0
    assert written < blocks <= len(found), "some had to wait, and none was lost"
    assert dropped == 0
    assert flushed > 0
    assert not temporaries(tmp_path)
    assert is_whole(later)


@SIGNALS
def test_a_second_signal_ends_it_at_once_and_what_is_lost_is_counted(
    number: signal.Signals, model_path: ModelPath, tmp_path: Path
) -> None:
    """B44: a stream runs, and nothing can be written, as no byte of the volume may be used."""
    unwritable = ("--ssd-free-space-floor", "100%", "--drain-timeout-s", "600")
    with serve(model_path("tape"), tmp_path, *unwritable) as server:
        blocks = ask(server, "a")["usage"]["prompt_tokens"] // 16
        endless = {"chat_template_kwargs": {"opening": LOOP[0]}, "max_tokens": 1900}
        with server.open(user("go on"), stream=True, **endless) as stream:
            stream.readline()
            server.send(number)
            assert until(lambda: "stopping: " in server.log)
            server.send(number)
            try:
                rest = stream.read()
            except IncompleteRead as cut:
                rest = cut.partial
        server.process.wait(60)
        flushed, dropped = numbers(r"flushed=(\d+) dropped=(\d+)", server.log)

    assert not re.search(rb'"finish_reason": *"', rest), "no reason is made up"
    assert "Traceback" not in server.log
    assert flushed == 0
    assert dropped >= blocks
    assert not block_files(server.cache)


# ── the limit ────────────────────────────────────────────────────────────────────────────────


def test_a_halved_limit_is_announced_and_takes_what_is_of_no_use_first(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """B55, B58: one model filled 90 %, another wrote half as much, a third of that is of an old
    format."""
    files_by_life(model_path("llama"), tmp_path, ["a", "b", "c"])
    cache = tmp_path / "cache"
    limit = du(cache) * 10 // 9
    with serve(model_path("qwen3_5"), tmp_path, *THROUGH, *limited(limit)) as server:
        number = 0
        while sum(_of_namespace(server).values()) < limit // 2:
            ask(server, f"b{number}", length=100)
            number += 1
            assert until(lambda: du(cache) <= limit + BLOCK_FILE_BYTES)
        own = sorted(_of_namespace(server))
        server.stop()
    assert du(cache) <= limit + BLOCK_FILE_BYTES
    # Leaves only, so that what stays is still a chain.
    old = [path for path in own if "_gdn_sidecars" in path.parts][::2]
    for path in old:
        of_format(path, "2")
    useful = {path for path in own if path not in old}
    before = set(block_files(cache))

    # Room for what is of use, and for little else.
    half = sum(path.stat().st_size for path in useful) + BLOCK_FILE_BYTES
    with serve(model_path("qwen3_5"), tmp_path, *limited(half)) as server:
        assert until(lambda: du(cache) <= half + BLOCK_FILE_BYTES, WITHIN_S)
        assert until(lambda: counts_what_is_there(server))
        removed, removed_bytes = numbers(r"(\d+) files of ([\d]+) bytes", server.log)
        assert useful <= set(block_files(cache))
        assert removed == len(before) - len(block_files(cache)) > 0
        assert removed_bytes > 0
        assert server.stats()["cache"]["ssd_bytes"] <= half
        server.stop()


def _of_namespace(server: Server) -> dict[Path, int]:
    name = server.stats()["model"]["namespace"]
    files = block_files(server.cache)
    return {path: size for path, size in files.items() if name in path.parts}


def test_after_a_kill_every_byte_is_counted_before_the_first_request(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """B56: the limit holds from then on, and what is there is not written again."""
    model, cache = model_path("qwen3_5"), tmp_path / "cache"
    with serve(model, tmp_path, *THROUGH) as server:
        for salt in "abc":
            ask(server, salt)
        assert until(lambda: counts_what_is_there(server))
        server.kill()
    lying = du(cache)
    limit = lying * 100 // 95

    with serve(model, tmp_path, *THROUGH, *limited(limit)) as server:
        assert until(lambda: server.stats()["cache"]["ssd_bytes"] > 0)
        assert counts_what_is_there(server)
        assert du(cache) == lying
        assert is_whole(ask(server, "c"))
        assert du(cache) == lying, "storing what is there adds nothing"
        for salt in "de":
            ask(server, salt)
            assert until(lambda: du(cache) <= limit)
        server.stop()
    assert du(cache) <= limit


# ── the order ────────────────────────────────────────────────────────────────────────────────


def test_a_time_in_the_future_makes_no_file_immortal(model_path: ModelPath, tmp_path: Path) -> None:
    """B59: over a restart, 1970 is the oldest and 2099 no more than the latest."""
    model, cache = model_path("llama"), tmp_path / "cache"
    files = files_by_life(model, tmp_path, ["future", "middle", "past"])
    for salt, at in (("future", YEAR_2099), ("past", YEAR_1970)):
        for path in files[salt]:
            os.utime(path, (at, at))
    names = {salt: set(paths) for salt, paths in files.items()}
    sizes = {sum(paths.values()) for paths in files.values()}
    assert all(len(paths) > 4 for paths in files.values())
    assert len(sizes) == 1, "each weighs as much as another"

    # What is set aside for headers is somewhat more than they take.
    limit = 3 * sizes.pop() + 2 * BLOCK_FILE_BYTES
    with serve(model, tmp_path, *THROUGH, *limited(limit)) as server:
        ask(server, "middle")
        ask(server, "new")
        assert until(lambda: du(cache) <= limit)
        after_one = set(block_files(cache))
        ask(server, "newer")
        assert until(lambda: du(cache) <= limit)
        after_two = set(block_files(cache))
        server.stop()

    assert names["future"] | names["middle"] <= after_one
    assert not names["past"] <= after_one
    assert names["middle"] <= after_two
    assert not names["future"] <= after_two


# ── who else is there ────────────────────────────────────────────────────────────────────────


def test_another_model_costs_the_first_none_of_its_files(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """B43."""
    first, second = model_path("qwen3_5"), model_path("llama")
    left = files_by_life(first, tmp_path, ["a", "b"])
    contents = {path: path.read_bytes() for paths in left.values() for path in paths}
    files_by_life(second, tmp_path, ["a", "b"])

    assert {path: path.read_bytes() for path in contents} == contents
    with serve(first, tmp_path) as again:
        assert is_whole(ask(again, "a"))
        assert is_whole(ask(again, "b"))
        again.stop()


def test_what_a_dead_writer_left_is_swept_and_what_a_living_one_writes_is_counted(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """B46: and a file whose name reached the disk before its bytes did is a miss."""
    model, cache = model_path("llama"), tmp_path / "cache"
    with serve(model, tmp_path) as server:
        cold = ask(server, "a")
        server.stop()
    left = block_files(cache)
    some = next(iter(left))
    stale = [some.with_name(f".{some.stem}.{99_000 + n}-{n:016x}.{n:016x}.tmp") for n in range(50)]
    living = some.with_name(f".{some.stem}.98999-{0:016x}.{0:016x}.tmp")
    for path in (*stale, living):
        path.touch(0o600)
        os.truncate(path, 10_000_000)
        os.utime(path, (YEAR_1970, YEAR_1970))
    later = time.time() + 86_400
    os.utime(living, (later, later))
    zeroed = max(left, key=lambda path: path.stat().st_mtime_ns)
    zeroed.write_bytes(bytes(left[zeroed]))
    assert all(writer_of(path) >= 98_999 for path in temporaries(cache))

    with serve(model, tmp_path) as server:
        assert until(lambda: temporaries(cache) == [living])
        assert until(lambda: server.stats()["cache"]["ssd_bytes"] > living.stat().st_size)
        assert until(lambda: counts_what_is_there(server))
        answer = ask(server, "a")
        assert not is_whole(answer)
        assert until(lambda: server.stats()["cache"]["rejected_files"].get("corrupt") == 1)
        server.stop()
    assert said(answer) == said(cold)
