"""Block files on a real disk: for us alone, whole or not at all, and nothing else is touched."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlx.actors.block_files import (
    BLOCKS,
    BlockFiles,
    CacheDirectoryLocked,
    CacheDirectoryUnusable,
    DirectoryLock,
)
from omlx.cache.block_file import HostTensor, Identity, Unreadable
from omlx.cache.blocks import chain_hash, pack_tokens, root_hash
from omlx.cache.hybrid_cache import LayerConfig, LayerKind, ModelCacheConfig
from omlx.core.plan import HostBlock

CONFIG = ModelCacheConfig(
    (LayerConfig(LayerKind.KV, kv_heads=1, key_dim=2, value_dim=2, dtype="float16"),)
)
NAMESPACE = "0123456789abcdef"
COUNT = 4


def identity(seed: int = 0, namespace: str = NAMESPACE) -> Identity:
    root, tokens = root_hash(namespace), pack_tokens([seed] * COUNT)
    return Identity(namespace, chain_hash(root, tokens), root, tokens)


def payload(seed: int = 0) -> HostBlock:
    return tuple(
        HostTensor(spec.name, spec.dtype, spec.shape(COUNT), memoryview(bytes([seed + i]) * 16))
        for i, spec in enumerate(CONFIG.tensors)
    )


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def files(tmp_path: Path) -> BlockFiles:
    made = BlockFiles(tmp_path, NAMESPACE, CONFIG, COUNT)
    made.prepare()
    return made


def below(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


def test_what_was_written_is_read_and_listed(files: BlockFiles) -> None:
    size = files.write(identity(), payload())

    assert [bytes(t.data) for t in files.read(identity())] == [bytes(t.data) for t in payload()]
    (found,) = files.scan()
    assert (found.identity, found.nbytes) == (identity(), size)
    assert files.path(identity().block_hash).stat().st_size == size


def test_the_path_is_made_of_digests_alone(files: BlockFiles, tmp_path: Path) -> None:
    """B41."""
    files.write(identity(), payload())

    name = identity().block_hash.hex()
    assert below(tmp_path) == [f"{BLOCKS}/{NAMESPACE}/{name[:2]}/{name}.safetensors"]


def test_nobody_else_may_look(files: BlockFiles, tmp_path: Path) -> None:
    """B53: whatever the umask, and after the folder was removed under a running server as well."""
    files.write(identity(0), payload())
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    files.write(identity(1), payload())

    for path in tmp_path.rglob("*"):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_write_that_fails_leaves_nothing_behind(
    files: BlockFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B47."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "writev", full)

    with pytest.raises(OSError, match="no space left"):
        files.write(identity(), payload())
    assert below(tmp_path) == []


def test_a_write_in_small_pieces_is_whole(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "writev", lambda fd, parts: os.write(fd, parts[0][:7]))

    size = files.write(identity(), payload())

    monkeypatch.undo()
    assert files.path(identity().block_hash).stat().st_size == size
    assert files.read(identity())


def test_a_block_is_replaced_at_once(files: BlockFiles) -> None:
    files.write(identity(), payload(0))
    files.write(identity(), payload(7))

    assert bytes(files.read(identity())[0].data) == bytes(payload(7)[0].data)


def test_removing_what_is_gone_does_nothing(files: BlockFiles) -> None:
    files.write(identity(), payload())

    files.remove(identity().block_hash)
    files.remove(identity().block_hash)

    assert list(files.scan()) == []
    with pytest.raises(FileNotFoundError):
        files.read(identity())


def test_reading_makes_a_file_recent(files: BlockFiles) -> None:
    """B59: the order survives a restart."""
    files.write(identity(), payload())
    os.utime(files.path(identity().block_hash), (1.0, 1.0))

    files.read(identity())

    (found,) = files.scan()
    assert abs(found.used_at - time.time()) < 60


# ── damage ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"\xff" * 4096])
def test_a_file_of_rubbish_is_a_miss_and_goes_at_the_next_start(
    files: BlockFiles, content: bytes
) -> None:
    """B46."""
    files.write(identity(), payload())
    files.path(identity().block_hash).write_bytes(content)

    with pytest.raises(Unreadable):
        files.read(identity())
    assert list(files.scan()) == []
    assert not files.path(identity().block_hash).exists()


def test_nothing_is_read_of_a_file_that_is_far_too_long(files: BlockFiles) -> None:
    files.write(identity(), payload())
    os.truncate(files.path(identity().block_hash), 1 << 40)

    with pytest.raises(Unreadable, match="far more than the block"):
        files.read(identity())


def test_a_file_under_another_blocks_name_goes(files: BlockFiles) -> None:
    """B29."""
    files.write(identity(0), payload())
    target = files.path(identity(1).block_hash)
    target.parent.mkdir(exist_ok=True)
    files.path(identity(0).block_hash).rename(target)

    with pytest.raises(Unreadable, match="another block"):
        files.read(identity(1))
    assert list(files.scan()) == []
    assert not target.exists()


# ── neighbours ───────────────────────────────────────────────────────────────────────────────


def test_another_models_files_are_left_alone(files: BlockFiles, tmp_path: Path) -> None:
    """B43."""
    other = BlockFiles(tmp_path, "f" * 16, CONFIG, COUNT)
    other.prepare()
    other.write(identity(0, "f" * 16), payload())
    files.write(identity(0), payload())

    files.prepare()

    assert [found.identity for found in files.scan()] == [identity(0)]
    assert [found.identity for found in other.scan()] == [identity(0, "f" * 16)]


def test_what_a_former_process_left_half_done_is_swept(files: BlockFiles) -> None:
    """B43, B46: even one with our own number, as every server in a container has."""
    files.write(identity(), payload())
    folder = files.path(identity().block_hash).parent
    name = identity().block_hash.hex()
    left = folder / f".{name}.{os.getpid()}-{'0' * 16}.{'1' * 16}.tmp"
    left.write_bytes(b"half")

    files.prepare()

    assert not left.exists()
    assert len(list(files.scan())) == 1


def test_what_we_are_writing_is_not_swept(
    files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B43: the files are listed again while the writer works."""
    writev = os.writev

    def sweep_meanwhile(fd: int, parts: list[memoryview]) -> int:
        files.prepare()
        assert list(files.scan()) == []
        return writev(fd, parts)

    monkeypatch.setattr(os, "writev", sweep_meanwhile)

    files.write(identity(), payload())

    assert files.read(identity())


def test_names_that_are_not_ours_are_never_touched(files: BlockFiles, tmp_path: Path) -> None:
    """K5."""
    files.write(identity(), payload())
    folder = files.path(identity().block_hash).parent
    names = ["notes.txt", ".hidden.tmp", "abc.safetensors", f"{'g' * 64}.safetensors"]
    for name in names:
        (folder / name).write_bytes(b"theirs")
    (tmp_path / BLOCKS / NAMESPACE / "not-hex").mkdir()

    files.prepare()

    assert len(list(files.scan())) == 1
    assert all((folder / name).read_bytes() == b"theirs" for name in names)


def test_links_are_not_followed(files: BlockFiles, tmp_path: Path) -> None:
    """K5: neither to files nor to folders elsewhere."""
    outside = tmp_path / "outside"
    outside.mkdir()
    files.write(identity(), payload())
    path = files.path(identity().block_hash)
    (outside / path.name).write_bytes(b"theirs")
    path.unlink()
    path.symlink_to(outside / path.name)
    other = next(n for n in ("00", "01") if n != path.parent.name)
    (path.parent.parent / other).symlink_to(outside)

    assert list(files.scan()) == []
    with pytest.raises(OSError, match=r"symbolic|link"):
        files.read(identity())
    assert (outside / path.name).read_bytes() == b"theirs"


# ── one server a directory ───────────────────────────────────────────────────────────────────


def test_a_second_server_is_kept_out_and_told_by_whom(tmp_path: Path) -> None:
    """B50."""
    lock = DirectoryLock(tmp_path / "cache")

    with pytest.raises(CacheDirectoryLocked, match=f"used by process {os.getpid()}"):
        DirectoryLock(tmp_path / "cache")

    lock.release()
    DirectoryLock(tmp_path / "cache").release()


def test_what_a_dead_server_wrote_into_the_lock_does_not_matter(tmp_path: Path) -> None:
    """B50: the kernel knows who holds it, not the number in the file."""
    (tmp_path / "lock").write_text("1\n")

    DirectoryLock(tmp_path).release()

    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(CacheDirectoryUnusable, match="file/cache can't be used"):
        DirectoryLock(tmp_path / "file" / "cache")
