"""Equal contents have one name, changed contents another, unreadable ones a new one each time."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from omlx.models.fingerprint import fingerprint

WEIGHTS = "model.safetensors"
NUM_VALUES = 1_000_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"rope_theta": 10000}')
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "generation_config.json").write_text("{}")
    save_file({"a": np.arange(NUM_VALUES, dtype=np.float32)}, path / WEIGHTS)
    return path


def overwrite(file: Path, offset: int, data: bytes) -> None:
    """Change bytes in place, keeping size and time."""
    state = file.stat()
    with file.open("r+b") as stream:
        stream.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        stream.write(data)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


def test_it_is_32_hex_digits_and_stays(model: Path) -> None:
    assert re.fullmatch("[0-9a-f]{32}", fingerprint(model))
    assert fingerprint(model) == fingerprint(model)


def test_it_does_not_depend_on_where_the_directory_lies(model: Path, tmp_path: Path) -> None:
    before = fingerprint(model)
    moved = model.rename(tmp_path / "moved")

    assert fingerprint(moved) == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_small_file_is_noticed_even_at_the_same_size_and_time(
    name: str, model: Path
) -> None:
    before = fingerprint(model)

    overwrite(model / name, 1, b"X")

    assert fingerprint(model) != before


@pytest.mark.parametrize("offset", [12, -1, -4096])
def test_the_header_and_the_ends_of_the_weights_are_always_read(offset: int, model: Path) -> None:
    before = fingerprint(model)

    overwrite(model / WEIGHTS, offset, b"\x7f")

    assert fingerprint(model) != before


def test_other_weights_of_the_same_size_and_time_are_noticed(model: Path) -> None:
    before = fingerprint(model)
    middle = np.full(NUM_VALUES // 10, 0.5, np.float32).tobytes()

    overwrite(model / WEIGHTS, NUM_VALUES * 2, middle)

    assert fingerprint(model) != before


def test_a_touch_of_the_weights_costs_misses(model: Path) -> None:
    before = fingerprint(model)

    os.utime(model / WEIGHTS, ns=(1, 1))

    assert fingerprint(model) != before


def test_an_added_shard_or_a_new_name_is_noticed(model: Path) -> None:
    before = fingerprint(model)

    (model / WEIGHTS).rename(model / "model-00001-of-00001.safetensors")
    renamed = fingerprint(model)
    save_file({"b": np.zeros(1, np.float32)}, model / "model-00002-of-00002.safetensors")

    assert len({before, renamed, fingerprint(model)}) == 3


def test_what_no_kv_depends_on_changes_nothing(model: Path) -> None:
    before = fingerprint(model)

    (model / "generation_config.json").write_text('{"temperature": 1}')
    (model / "README.md").write_text("hello")
    os.utime(model / "config.json", ns=(1, 1))

    assert fingerprint(model) == before


def test_an_unreadable_directory_never_has_the_same_name_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        names = {fingerprint(tmp_path / "none") for _ in range(3)}

    assert len(names) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)
    assert len(caplog.records) == 3


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, 4096, 4097, 70_000])
def test_a_file_of_any_size_is_named(size: int, model: Path) -> None:
    (model / WEIGHTS).write_bytes(b"\x08" * size)

    assert fingerprint(model) == fingerprint(model)
