"""``omlx cache`` sees every file, touches no foreign one, and removes only under the lock."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omlx.cache.blocks import root_hash
from omlx.cli import main
from omlx.disk.layout import BLOCKS, SIDECARS
from tests.cachefiles import (
    BLOCK_SIZE,
    NAMESPACE,
    OTHER_NAMESPACE,
    CacheFiles,
    checkpoint_with,
    of_format,
    states_payload,
    with_nan,
)

DEAD = f"12345-{'0' * 16}"
"""The owner of a temporary that nobody writes any more."""


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Tool = Callable[..., Said]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def made(root: Path) -> CacheFiles:
    return CacheFiles(root)


@pytest.fixture
def tool(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Tool:
    """``omlx cache ACTION`` on the directory of the test."""
    for variable in [name for name in os.environ if name.startswith("OMLX_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("OMLX_HOME", str(tmp_path / "home"))

    def run(*arguments: str, where: Path = root) -> Said:
        code = main(["cache", *arguments, "--ssd-cache-dir", str(where)])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return run


def below(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Everything that is there: when it was used, and what is in it."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() and not path.is_symlink() else None,
        )
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


def temporary(made: CacheFiles, name: bytes) -> Path:
    folder = made.path(name).parent  # pyright: ignore[reportArgumentType]
    path = folder / f".{name.hex()}.{DEAD}.{'1' * 16}.tmp"
    path.write_bytes(b"half")
    return path


# ── stats ────────────────────────────────────────────────────────────────────────────────────


def test_every_namespace_is_told_with_what_it_holds(tool: Tool, made: CacheFiles) -> None:
    chain = made.chain(3)
    made.checkpoint(chain[0])
    made.block(chain[2], 77, embedded=True)
    CacheFiles(made.root, OTHER_NAMESPACE).chain(1)
    for second, path in enumerate(sorted(made.root.rglob("*.safetensors"))):
        os.utime(path, (1000.0 + second, 1000.0 + second))

    first, second = tool("stats", "--json").json["namespaces"]

    paths = [p for p in made.root.rglob("*.safetensors") if NAMESPACE in str(p)]
    assert first == {
        "namespace": NAMESPACE,
        "layers": "1 kv, 1 recurrent",
        "block_size": BLOCK_SIZE,
        "codecs": ["int8"],
        "files": 5,
        "blocks": 4,
        "checkpoints": 2,
        "tokens": 4 * BLOCK_SIZE,
        "bytes": sum(path.stat().st_size for path in paths),
        "oldest_use": min(path.stat().st_mtime for path in paths),
        "newest_use": max(path.stat().st_mtime for path in paths),
        "incompatible_files": 0,
        "incompatible_bytes": 0,
        "unreadable_files": 0,
        "temporary_files": 0,
        "temporary_bytes": 0,
    }
    assert (second["namespace"], second["files"]) == (OTHER_NAMESPACE, 1)


def test_what_is_of_no_use_is_told_apart(tool: Tool, made: CacheFiles) -> None:
    chain = made.chain(3)
    temporary(made, chain[0])
    of_format(made.path(chain[1]), "2")
    made.path(chain[2]).write_bytes(b"rubbish")
    (made.root / "notes.txt").write_bytes(b"theirs")
    (made.root / "lock").write_bytes(b"1\n")
    (made.root / BLOCKS / "elsewhere").mkdir()
    (made.root / BLOCKS / "elsewhere" / "deep.txt").write_bytes(b"theirs too")

    stats = tool("stats", "--json").json

    (found,) = stats["namespaces"]
    assert (found["files"], found["blocks"], found["unreadable_files"]) == (3, 1, 1)
    assert found["incompatible_files"] == 1
    assert found["incompatible_bytes"] == made.path(chain[1]).stat().st_size
    assert (found["temporary_files"], found["temporary_bytes"]) == (1, 4)
    assert (stats["foreign_files"], stats["foreign_bytes"]) == (2, 16)
    assert stats["total_bytes"] == sum(
        path.stat().st_size for path in made.root.rglob("*") if path.is_file()
    )
    assert stats["free_bytes"] > 0


def test_people_read_the_same_as_a_table(tool: Tool, made: CacheFiles) -> None:
    chain = made.chain(2)
    temporary(made, chain[0])

    said = tool("stats")

    assert said.code == 0
    assert NAMESPACE in said.out and "1 kv, 1 recurrent" in said.out
    assert "3 files of ours" in said.out
    assert "1 temporaries" in said.out
    assert "free on the volume" in said.out
    assert "\x1b" not in said.out


def test_an_empty_directory_is_no_error(tool: Tool, root: Path) -> None:
    root.mkdir()

    assert tool("stats").code == tool("ls").code == tool("verify").code == 0
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("action", ["stats", "verify", "ls", "clear"])
def test_a_directory_that_is_not_there_is_named_and_not_made(
    tool: Tool, root: Path, action: str
) -> None:
    said = tool(action)

    assert said.code == 2
    assert str(root) in said.err and said.err.count("\n") == 1
    assert not root.exists()


# ── ls ───────────────────────────────────────────────────────────────────────────────────────


def test_files_are_listed_chain_by_chain_the_last_used_first(tool: Tool, made: CacheFiles) -> None:
    old, new = made.chain(2, seed=0), made.chain(2, seed=10)
    state = made.checkpoint(new[0])
    for age, name in enumerate([*new, *old]):
        os.utime(made.path(name), (5000.0 - age, 5000.0 - age))
    os.utime(made.path(state, checkpoint=True), (1.0, 1.0))

    listed = tool("ls", "--json").json["files"]

    assert [one["hash"] for one in listed] == [name.hex() for name in (*new, *old, state)]
    assert [one["kind"] for one in listed] == ["block"] * 4 + ["checkpoint"]
    assert listed[1]["parent"] == new[0].hex()
    assert {one["tokens"] for one in listed} == {BLOCK_SIZE, 3}


def test_a_line_a_file_for_people(tool: Tool, made: CacheFiles) -> None:
    head = made.block(root_hash(NAMESPACE), 1, embedded=True)
    os.utime(made.path(head), (1000.0, 1000.0))

    heading, line = tool("ls").out.splitlines()

    assert heading.split()[:3] == ["namespace", "hash", "kind"]
    assert line.split()[:4] == [
        NAMESPACE,
        head.hex()[:12],
        "block+state",
        root_hash(NAMESPACE).hex()[:12],
    ]
    assert line.endswith(" d")


def test_one_namespace_can_be_asked_for(tool: Tool, made: CacheFiles) -> None:
    made.chain(1)
    (other,) = CacheFiles(made.root, OTHER_NAMESPACE).chain(1)

    listed = tool("ls", "--json", "--namespace", OTHER_NAMESPACE).json["files"]

    assert [one["hash"] for one in listed] == [other.hex()]


def test_a_namespace_is_refused_that_could_be_a_path(tool: Tool, made: CacheFiles) -> None:
    made.chain(1)

    assert tool("clear", "--namespace", "../..").code == 2
    assert len(below(made.root)) == 1


def test_nobody_who_reads_on_is_no_error(made: CacheFiles, tmp_path: Path) -> None:
    """As with ``| head -1``."""
    made.chain(3)
    run = subprocess.Popen(
        [sys.executable, "-m", "omlx", "cache", "ls", "--ssd-cache-dir", str(made.root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMLX_HOME": str(tmp_path)},
    )
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()

    assert run.stderr.read() == b""
    assert run.wait() == 0
    run.stderr.close()


# ── verify ───────────────────────────────────────────────────────────────────────────────────


def test_sound_files_of_every_kind_are_sound(tool: Tool, made: CacheFiles) -> None:
    chain = made.chain(2)
    for number, codec in enumerate(("fp32", "bf16", "int8", "rht_int8", "rht_int16")):
        CacheFiles(made.root, codec=codec).checkpoint(chain[0], seed=number)
        CacheFiles(made.root, codec=codec).block(chain[1], 20 + number, embedded=True)

    said = tool("verify", "--json")

    assert said.code == 0
    assert said.json["files"] == 12
    assert said.json["bytes"] == sum(len(data or b"") for _, data in below(made.root).values())
    assert said.json["corrupt"] == said.json["orphans"] == said.json["unreadable"] == []
    assert said.json["unreachable_files"] == said.json["incompatible_files"] == 0
    assert said.json["complete"]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def move(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)


def to_another_name(path: Path) -> None:
    move(path, path.with_name(path.name[:2] + "0" * 62 + ".safetensors"))


def to_another_namespace(path: Path) -> None:
    parts = [OTHER_NAMESPACE if part == NAMESPACE else part for part in path.parts]
    move(path, Path(*parts))


def among_the_checkpoints(path: Path) -> None:
    move(path, path.parents[1] / SIDECARS / path.parent.name / path.name)


def with_other_parent(path: Path) -> None:
    content = path.read_bytes()
    was = b'"parent_hash":"' + root_hash(NAMESPACE).hex().encode()
    assert was in content
    path.write_bytes(content.replace(was, b'"parent_hash":"' + b"0" * 64))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b""), "too few for a header"),
        (lambda path: path.write_bytes(bytes(4096)), "header is damaged"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "the file has"),
        (lambda path: os.truncate(path, path.stat().st_size + 1), "the file has"),
        (lambda path: os.truncate(path, 1 << 40), "far more than a block"),
        (lambda path: flip(path, -1), "does not match its checksum"),
        (lambda path: flip(path, 8), "header is damaged"),
        (to_another_name, "name is not the block's"),
        (to_another_namespace, "another namespace"),
        (among_the_checkpoints, "a block among the checkpoints"),
        (with_other_parent, "not the hash of its tokens"),
    ],
)
def test_each_kind_of_damage_is_found_and_named(
    tool: Tool, made: CacheFiles, damage: Callable[[Path], Any], reason: str
) -> None:
    (name,) = made.chain(1)
    made.chain(1, seed=50)
    damage(made.path(name))

    said = tool("verify", "--json")

    assert said.code == 1
    (bad,) = said.json["corrupt"]
    assert reason in bad["reason"]
    assert (made.root / bad["file"]).exists()
    assert said.json["files"] == 2


def test_a_checkpoint_must_decode_as_well(tool: Tool, made: CacheFiles) -> None:
    """Its bytes are those that were written, and still it is no state."""
    (head,) = made.chain(1)
    identity = made.checkpoint_identity(head)
    made.checkpoint(head)
    path = made.path(identity.block_hash, checkpoint=True)
    path.write_bytes(checkpoint_with(with_nan(states_payload()[1]), identity))

    said = tool("verify", "--json")

    assert said.code == 1
    (bad,) = said.json["corrupt"]
    assert "not finite" in bad["reason"]


def test_people_are_told_which_why_and_how_fast(tool: Tool, made: CacheFiles) -> None:
    (name,) = made.chain(1)
    flip(made.path(name), -1)

    said = tool("verify")

    bad, summary = said.out.splitlines()
    assert said.code == 1
    assert bad.startswith("corrupt") and name.hex() in bad and "checksum" in bad
    assert "MB/s" in summary and "1 corrupt" in summary


def test_a_block_without_its_parent_is_unreachable_and_not_corrupt(
    tool: Tool, made: CacheFiles
) -> None:
    chain = made.chain(4)
    made.path(chain[1]).unlink()

    said = tool("verify", "--json")

    assert said.code == 0
    (orphan,) = said.json["orphans"]
    assert chain[2].hex() in orphan["file"]
    assert chain[1].hex()[:12] in orphan["reason"]
    assert said.json["unreachable_files"] == 2
    assert said.json["corrupt"] == []


def test_what_hangs_on_a_corrupt_block_is_unreachable(tool: Tool, made: CacheFiles) -> None:
    chain = made.chain(2)
    flip(made.path(chain[0]), -1)

    assert tool("verify", "--json").json["unreachable_files"] == 1


def test_another_version_of_the_format_is_not_corrupt(tool: Tool, made: CacheFiles) -> None:
    (name,) = made.chain(1)
    of_format(made.path(name), "2")

    said = tool("verify", "--json")

    assert said.code == 0
    assert (said.json["incompatible_files"], said.json["corrupt"]) == (1, [])


def test_looking_changes_nothing(tool: Tool, made: CacheFiles) -> None:
    """Nor does it make a file recent, or the lock."""
    chain = made.chain(3)
    made.checkpoint(chain[0])
    temporary(made, chain[0])
    flip(made.path(chain[1]), -1)
    made.path(chain[2]).write_bytes(b"")
    before = below(made.root)

    for action in ("stats", "verify", "ls"):
        tool(action)

    assert below(made.root) == before


def test_corrupt_files_go_when_they_are_to_and_nothing_else(tool: Tool, made: CacheFiles) -> None:
    chain = made.chain(4)
    temporary(made, chain[0])
    of_format(made.path(chain[3]), "2")
    flip(made.path(chain[1]), -1)
    before = below(made.root)

    said = tool("verify", "--remove", "--json")

    assert said.code == 1
    assert said.json["removed"] == 1
    gone = before.keys() - below(made.root).keys()
    assert gone == {str(made.path(chain[1]).relative_to(made.root))}


def test_what_the_system_cannot_read_is_not_called_corrupt(
    tool: Tool, made: CacheFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = made.chain(1)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    said = tool("verify", "--remove", "--json")

    assert said.code == 1
    assert said.json["corrupt"] == []
    assert [bad["reason"] for bad in said.json["unreadable"]] == ["Input/output error"]
    assert made.path(name).exists()


# ── a running server's directory ─────────────────────────────────────────────────────────────

HOLD = """
import sys, signal
from pathlib import Path
from omlx.disk.directory import CacheDirectory
CacheDirectory(Path(sys.argv[1])).acquire()
print("locked", flush=True)
signal.pause()
"""


@pytest.fixture
def holder(made: CacheFiles) -> Iterator[int]:
    """Another process that has the directory's lock; its number."""
    made.chain(2)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(made.root)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process.pid
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_a_locked_directory_can_be_looked_at(tool: Tool, holder: int) -> None:
    assert tool("stats", "--json").json["files"] == 2
    assert len(tool("ls", "--json").json["files"]) == 2
    assert tool("verify").code == 0


@pytest.mark.parametrize("arguments", [("clear", "--yes"), ("verify", "--remove")])
def test_nothing_of_a_locked_directory_is_removed(
    tool: Tool, made: CacheFiles, holder: int, arguments: tuple[str, ...]
) -> None:
    flip(next(made.root.rglob("*.safetensors")), -1)
    before = below(made.root)

    said = tool(*arguments)

    assert said.code == 4
    assert f"process {holder}" in said.err and said.err.count("\n") == 1
    assert below(made.root) == before


# ── clear ────────────────────────────────────────────────────────────────────────────────────


def test_everything_that_is_ours_goes_and_says_how_much(tool: Tool, made: CacheFiles) -> None:
    chain = made.chain(3)
    made.checkpoint(chain[0])
    temporary(made, chain[1])
    of_format(made.path(chain[2]), "2")
    CacheFiles(made.root, OTHER_NAMESPACE).chain(2)
    nbytes = sum(len(data or b"") for _, data in below(made.root).values())

    said = tool("clear", "--json")

    assert said.code == 0
    assert (said.json["files"], said.json["bytes"]) == (7, nbytes)
    assert [path.name for path in made.root.iterdir()] == ["lock"]


def test_another_namespace_stays(tool: Tool, made: CacheFiles) -> None:
    made.chain(2)
    CacheFiles(made.root, OTHER_NAMESPACE).chain(2)

    said = tool("clear", "--namespace", NAMESPACE)

    assert said.code == 0
    assert [path.name for path in (made.root / BLOCKS).iterdir()] == [OTHER_NAMESPACE]
    assert len(list(made.root.rglob("*.safetensors"))) == 2


def test_foreign_names_are_never_touched(tool: Tool, made: CacheFiles) -> None:
    (name,) = made.chain(1)
    folder = made.path(name).parent
    shard = folder.name
    theirs = [
        made.root / "notes.txt",
        made.root / f"{name.hex()}.safetensors",
        made.root / BLOCKS / "README",
        made.root / BLOCKS / "0123456789ABCDEF" / shard / f"{name.hex()}.safetensors",
        folder / "abc.safetensors",
        folder / f"{'g' * 64}.safetensors",
        folder / f"{name.hex().upper()}.safetensors",
        folder / f"{name.hex()}.safetensors.bak",
        folder / f".{name.hex()}.tmp",
        folder / "new\nline.safetensors",
        folder / f"{'z' if shard == '00' else '00'}{name.hex()[2:]}.safetensors",
        folder / SIDECARS / shard / f"{name.hex()}.safetensors",
        folder.parent / SIDECARS / SIDECARS / shard / f"{name.hex()}.safetensors",
        folder.parent / "zz" / f"{name.hex()}.safetensors",
    ]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"theirs")

    said = tool("clear", "--json")

    assert (said.json["files"], said.json["foreign_files"]) == (1, len(theirs))
    assert [path for path in theirs if path.read_bytes() != b"theirs"] == []
    assert not made.path(name).exists()


def test_a_folder_under_a_blocks_name_stays(tool: Tool, made: CacheFiles) -> None:
    (name,) = made.chain(1)
    path = made.path(name)
    path.unlink()
    path.mkdir()
    (path / "theirs").write_bytes(b"theirs")

    assert tool("clear", "--json").json["files"] == 0
    assert (path / "theirs").read_bytes() == b"theirs"


def test_no_link_is_followed(tool: Tool, made: CacheFiles, tmp_path: Path) -> None:
    name, other = made.chain(2)
    outside = tmp_path / "outside"
    made.path(name).parent.rename(outside)
    made.path(name).parent.symlink_to(outside)
    target = tmp_path / "target"
    made.path(other).rename(target)
    made.path(other).symlink_to(target)
    (made.root / BLOCKS / OTHER_NAMESPACE).symlink_to(tmp_path)

    said = tool("clear", "--json")

    assert said.json["files"] == 0
    assert (outside / made.path(name).name).exists() and target.exists()
    assert made.path(name).parent.is_symlink() and made.path(other).is_symlink()


def test_blocks_that_lie_behind_a_link_are_not_ours(
    tool: Tool, made: CacheFiles, tmp_path: Path
) -> None:
    made.chain(1)
    (made.root / BLOCKS).rename(tmp_path / "elsewhere")
    (made.root / BLOCKS).symlink_to(tmp_path / "elsewhere")

    assert tool("stats", "--json").json["files"] == 0
    assert tool("clear").code in (0, 2)
    assert len(list((tmp_path / "elsewhere").rglob("*.safetensors"))) == 1


def test_a_folder_that_was_never_a_cache_gets_no_lock(tool: Tool, tmp_path: Path) -> None:
    """A file of that name in it would be emptied."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "lock").write_text("combination")

    said = tool("clear", where=folder)

    assert said.code == 2
    assert "no cache directory" in said.err
    assert (folder / "lock").read_text() == "combination"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "arguments", "left"),
    [
        ("n\n", (), 2),
        ("\n", (), 2),
        ("", (), 2),
        ("y\n", (), 0),
        ("Yes\n", (), 0),
        ("n\n", ("--yes",), 0),
    ],
)
def test_a_person_is_asked_first(
    tool: Tool,
    made: CacheFiles,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    arguments: tuple[str, ...],
    left: int,
) -> None:
    made.chain(2)
    monkeypatch.setattr(sys, "stdin", Terminal(answer))

    said = tool("clear", *arguments)

    assert said.code == 0
    assert ("2 cache files" in said.err) == (not arguments)
    assert len(list(made.root.rglob("*.safetensors"))) == left


# ── the command ──────────────────────────────────────────────────────────────────────────────


def test_it_runs_where_mlx_does_not(made: CacheFiles, tmp_path: Path) -> None:
    made.chain(1)
    script = (
        "import sys; sys.modules['mlx'] = sys.modules['mlx.core'] = None\n"
        "from omlx import blas; blas.backend = lambda: None\n"
        "from omlx.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    for action in ("stats", "verify", "ls", "clear"):
        run = subprocess.run(
            [sys.executable, "-c", script, "cache", action, "--ssd-cache-dir", str(made.root)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMLX_HOME": str(tmp_path)},
        )
        assert (run.returncode, run.stderr) == (0, ""), action


@pytest.mark.parametrize(
    "arguments",
    [
        ("clear", "--tier", "hot"),
        ("stats", "--url", "http://127.0.0.1:1"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tool: Tool, made: CacheFiles, arguments: tuple[str, ...]
) -> None:
    made.chain(1)

    said = tool(*arguments)

    assert said.code == 2
    assert said.err.count("\n") == 1
    assert len(below(made.root)) == 1


def test_without_an_action_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 2

    shown = capsys.readouterr().out
    assert all(action in shown for action in ("stats", "verify", "ls", "clear"))
