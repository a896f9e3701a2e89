"""Every size is resolved to a number, and the same one tomorrow."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from omlx.budget import (
    AUTO_SSD_SHARE,
    MemoryLine,
    cgroup_limit_bytes,
    make_budget,
    make_plan,
    memory_lines,
    memory_text,
    memory_warning,
)
from omlx.cache.cold_tier import WritePolicy
from omlx.cache.hybrid_cache import LayerConfig, LayerKind, ModelCacheConfig
from omlx.core.memory import GROWTH_TOKENS, MemoryPlan
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


def lines(
    home: Path, weight_bytes: int = GB, working_set: int = 100 * GB, **settings: object
) -> tuple[MemoryPlan, dict[str, int]]:
    """By what takes it; the model has a context of 1,000 tokens and 1,024 bytes of KV a token."""
    loaded = load_settings(settings, {}, home)
    found = make_budget(loaded, CONFIG, working_set, home)
    plan = make_plan(found, CONFIG, weight_bytes, 128)
    context = min(loaded.settings.max_context or 1000, 1000)
    takers = memory_lines(found, plan, loaded.settings, CONFIG, context)
    return plan, {line.what: line.nbytes for line in takers}


def test_live_kv_is_every_row_at_its_longest_with_room_to_grow(tmp_path: Path) -> None:
    _, found = lines(tmp_path, max_concurrent_requests=4)

    assert found["live KV"] == 4 * (1000 + GROWTH_TOKENS) * 1024


def test_a_lower_max_context_lowers_live_kv_and_a_higher_one_does_not_raise_it(
    tmp_path: Path,
) -> None:
    _, low = lines(tmp_path, max_concurrent_requests=1, max_context=100)
    _, high = lines(tmp_path, max_concurrent_requests=1, max_context=9999)

    assert low["live KV"] == (100 + GROWTH_TOKENS) * 1024
    assert high["live KV"] == (1000 + GROWTH_TOKENS) * 1024


@pytest.mark.parametrize("megabytes", [1, 2, 3, 5, 10, 30, 100])
def test_the_lines_never_promise_more_than_there_is(tmp_path: Path, megabytes: int) -> None:
    total = megabytes * 1_000_000
    plan, found = lines(tmp_path, total // 4, total, memory_budget="100%", hot_cache_max_size="50%")

    assert sum(found.values()) <= plan.total_bytes
    assert set(found) == {"weights", "reserve", "computing", "hot tier", "live KV"} | (
        {"writes that wait"} & set(found)
    )


def test_a_tier_that_is_off_takes_nothing(tmp_path: Path) -> None:
    _, found = lines(tmp_path, cache_enabled=False)

    assert set(found) == {"weights", "reserve", "computing", "live KV"}


def test_the_printed_lines_add_up_to_the_printed_sum(tmp_path: Path) -> None:
    found = budget(tmp_path, memory_budget="50%")
    takers = (MemoryLine("a", 20 * GB, "first"), MemoryLine("b", 5 * GB, "second"))

    assert memory_text(found, takers) == [
        "50.00 GB: 50% of the working set of the device, 100.00 GB",
        " 20.00 GB  a: first",
        "  5.00 GB  b: second",
        " 25.00 GB  in all, at most; 25.00 GB to spare",
    ]


def test_less_than_a_long_request_needs_is_said_with_what_to_do(tmp_path: Path) -> None:
    roomy, _ = lines(tmp_path)
    short, _ = lines(tmp_path, 400_000, 1_000_000, memory_budget="100%")
    none, _ = lines(tmp_path, 990_000, 1_000_000, memory_budget="100%")

    assert memory_warning(roomy, 1000) is None
    warning, nothing = memory_warning(short, 1000), memory_warning(none, 1000)
    assert warning is not None and "not for 1,000; raise memory_budget" in warning
    assert f"room for {short.longest(1000):,} tokens" in warning
    assert nothing is not None and "smaller model" in nothing


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
