"""Every size is resolved to a number, and the same one tomorrow."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from omlx.budget import (
    AUTO_SSD_SHARE,
    Budget,
    MemoryLine,
    cgroup_limit_bytes,
    make_budget,
    memory_lines,
    memory_text,
    memory_warning,
    row_bytes,
)
from omlx.cache.cold_tier import WritePolicy
from omlx.cache.hybrid_cache import LayerConfig, LayerKind, ModelCacheConfig, StateSpec
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


def test_the_floor_is_a_share_of_the_volume_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    volume(monkeypatch, 500 * GB, free=400 * GB)

    assert budget(tmp_path).sizes.ssd_floor_bytes == 25 * GB
    assert budget(tmp_path, ssd_free_space_floor="0").sizes.ssd_floor_bytes == 0
    assert budget(tmp_path, ssd_free_space_floor="3GB").sizes.ssd_floor_bytes == 3 * GB


def test_the_write_policy_is_handed_on(tmp_path: Path) -> None:
    found = budget(tmp_path, ssd_write_policy="selective").sizes

    assert found.ssd_write_policy is WritePolicy.SELECTIVE


# ── line by line ─────────────────────────────────────────────────────────────────────────────


def lines(home: Path, weight_bytes: int = GB, **settings: object) -> tuple[Budget, dict[str, int]]:
    """By what takes it; the model has a context of 1,000 tokens and 1,024 bytes of KV a token."""
    loaded = load_settings(settings, {}, home)
    found = make_budget(loaded, CONFIG, 100 * GB, home)
    takers = memory_lines(found, loaded.settings, CONFIG, weight_bytes, 1000)
    return found, {line.what: line.nbytes for line in takers}


def test_live_kv_is_every_row_at_its_longest(tmp_path: Path) -> None:
    _, found = lines(tmp_path, max_concurrent_requests=4)

    assert found["live KV"] == 4 * 1000 * 1024
    assert found["one transient copy"] == 1000 * 1024


def test_a_lower_max_context_lowers_live_kv_and_a_higher_one_does_not_raise_it(
    tmp_path: Path,
) -> None:
    _, low = lines(tmp_path, max_concurrent_requests=1, max_context=100)
    _, high = lines(tmp_path, max_concurrent_requests=1, max_context=9999)

    assert low["live KV"] == 100 * 1024
    assert high["live KV"] == 1000 * 1024


def test_a_sliding_window_ends_the_growth_of_a_row_and_states_count_once() -> None:
    window = LayerConfig(LayerKind.ROTATING, 2, 64, 64, "float32", window=128)
    state = LayerConfig(LayerKind.RECURRENT, states=(StateSpec("gdn.2.0", (4, 8, 8), "float32"),))

    config = ModelCacheConfig((CONFIG.layers[0], window, state))

    assert row_bytes(config, 1000) == 1024 * 1000 + 1024 * 128 + 4 * 4 * 8 * 8


def test_a_tier_that_is_off_takes_nothing(tmp_path: Path) -> None:
    _, found = lines(tmp_path, cache_enabled=False)

    assert set(found) == {"weights", "live KV", "one transient copy", "reserve"}


def test_the_printed_lines_add_up_to_the_printed_sum(tmp_path: Path) -> None:
    found = budget(tmp_path, memory_budget="50%")
    takers = (MemoryLine("a", 20 * GB, "first"), MemoryLine("b", 5 * GB, "second"))

    assert memory_text(found, takers) == [
        "50.00 GB: 50% of the working set of the device, 100.00 GB",
        " 20.00 GB  a: first",
        "  5.00 GB  b: second",
        " 25.00 GB  in all, at most; 25.00 GB to spare",
    ]
    assert memory_warning(found, takers) is None


def test_more_than_there_is_is_said_with_what_to_lower(tmp_path: Path) -> None:
    found = budget(tmp_path, memory_budget="50%")

    kv = memory_warning(found, (MemoryLine("live KV", 60 * GB, ""),))
    weights = memory_warning(found, (MemoryLine("weights", 60 * GB, ""),))

    assert kv is not None and "exceeded by 10.00 GB; lower max_context" in kv
    assert weights is not None and "smaller model" in weights
    assert memory_text(found, (MemoryLine("x", 60 * GB, ""),))[-1].endswith("10.00 GB too much")


def test_the_limit_of_a_service_or_of_a_group_above_it_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/system.slice/omlx.service\n")
    inner = tmp_path / "system.slice" / "omlx.service"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    unlimited = cgroup_limit_bytes(tmp_path, own)
    (inner.parent / "memory.max").write_text(f"{8 * GB}\n")
    of_slice = cgroup_limit_bytes(tmp_path, own)
    (inner / "memory.max").write_text(f"{4 * GB}\n")

    assert (unlimited, of_slice) == (None, 8 * GB)
    assert cgroup_limit_bytes(tmp_path, own) == 4 * GB


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{2 * GB}\n")

    assert cgroup_limit_bytes(tmp_path, tmp_path / "absent") == 2 * GB
