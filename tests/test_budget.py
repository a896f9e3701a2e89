"""Every size is resolved to a number, and the same one tomorrow."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from omlx.budget import AUTO_SSD_SHARE, make_budget
from omlx.cache.hybrid_cache import LayerConfig, LayerKind, ModelCacheConfig
from omlx.settings import load_settings

GB = 1_000_000_000
CONFIG = ModelCacheConfig((LayerConfig(LayerKind.KV, 2, 64, 64, "float32"),))


def budget(home: Path, **settings: object):
    return make_budget(load_settings(settings, {}, home), CONFIG, 100 * GB, home)


def volume(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    status = SimpleNamespace(f_frsize=1, f_blocks=total, f_bavail=free, f_bfree=free)
    monkeypatch.setattr(os, "statvfs", lambda _path: status)


def test_the_ssd_limit_does_not_depend_on_the_free_space_of_the_day(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """B58: a fuller disk tomorrow does not make a restart delete blocks."""
    volume(monkeypatch, 500 * GB, free=400 * GB)
    roomy = budget(tmp_path)
    volume(monkeypatch, 500 * GB, free=60 * GB)

    assert budget(tmp_path).sizes.ssd_limit_bytes == roomy.sizes.ssd_limit_bytes
    assert roomy.sizes.ssd_limit_bytes == int(AUTO_SSD_SHARE * 500 * GB)


def test_a_limit_set_by_hand_is_taken_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    volume(monkeypatch, 500 * GB, free=400 * GB)

    assert budget(tmp_path, ssd_cache_max_size="200GB").sizes.ssd_limit_bytes == 200 * GB
    assert budget(tmp_path, ssd_cache_max_size="50%").sizes.ssd_limit_bytes == 250 * GB


def test_the_hot_tier_is_a_share_of_the_memory_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    volume(monkeypatch, 500 * GB, free=400 * GB)

    found = budget(tmp_path, memory_budget="50%", hot_cache_max_size="20%")

    assert found.total_bytes == 50 * GB
    assert found.sizes.hot_limit_bytes == 10 * GB
    assert budget(tmp_path, cache_enabled=False).sizes.hot_limit_bytes == 0
