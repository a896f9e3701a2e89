"""A tier that fails is looked at again, less and less often, and said so once."""

from __future__ import annotations

from omlx.cache.tier_health import LONGEST_RETRY_S, LOOK_S, QUIET_S, TierHealth, TierState


def looks(health: TierHealth, seconds: int) -> list[int]:
    """In which of these seconds it is looked at; each time it does not work yet."""
    found: list[int] = []
    for second in range(1, seconds + 1):
        if health.tick():
            found.append(second)
            if health.state is not TierState.OK:
                health.look_again()
    return found


def test_a_tier_that_works_is_looked_at_all_the_same() -> None:
    """B47: a disk that somebody else fills shows before a write fails."""
    assert looks(TierHealth(on=True), 3 * LOOK_S) == [LOOK_S, 2 * LOOK_S, 3 * LOOK_S]


def test_a_tier_that_is_off_is_left_alone() -> None:
    health = TierHealth(on=False)

    assert health.state is TierState.OFF
    assert looks(health, 100) == []


def test_a_failure_is_looked_at_soon_and_then_less_often() -> None:
    health = TierHealth(on=True)
    health.failed(full=False)

    assert looks(health, 100) == [1, 3, 7, 15, 31, 61, 91]
    assert LONGEST_RETRY_S == 30


def test_more_failures_do_not_put_the_look_off() -> None:
    health = TierHealth(on=True)
    health.failed(full=False)
    health.failed(full=False)

    assert health.tick()


def test_what_works_again_starts_afresh() -> None:
    health = TierHealth(on=True)
    health.failed(full=False)
    looks(health, 40)
    assert health.works()
    assert health.state is TierState.OK
    assert not health.works()

    health.failed(full=True)
    assert health.state is TierState.FULL
    assert looks(health, 3) == [1, 3]


def test_a_failure_is_news_once() -> None:
    health = TierHealth(on=True)

    assert health.failed(full=False)
    assert not health.failed(full=False)


def test_a_disk_that_comes_and_goes_is_not_news_every_second() -> None:
    """B47: at most one warning a minute."""
    health = TierHealth(on=True)
    said = 0
    for _ in range(10 * QUIET_S):
        said += health.failed(full=False)
        health.works()
        health.tick()

    assert said == 10


def test_full_and_broken_are_told_apart() -> None:
    health = TierHealth(on=True)
    health.failed(full=True)
    assert health.state is TierState.FULL
    health.failed(full=False)
    assert health.state is TierState.DEGRADED
