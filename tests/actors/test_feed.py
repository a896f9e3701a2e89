"""A reader that is slow, gone or back again holds nobody up and costs a bounded amount."""

from __future__ import annotations

import pytest

from omlx.actors.feed import FRAMES_MAX, KEPT_MAX, READERS_MAX, UNREAD_MAX, Feeds, TooManyReaders
from omlx.kernel.stream import Stream


async def ids_and_data(feed: Stream[str], count: int) -> list[tuple[int, str]]:
    lines = [(await anext(feed)).split("\n") for _ in range(count)]
    return [(int(line[1].removeprefix("id: ")), line[2].removeprefix("data: ")) for line in lines]


async def test_ids_grow_across_restarts_and_a_snapshot_takes_none() -> None:
    sooner = Feeds(1_000_000)
    feed = sooner.open("{}", None)
    sooner.publish("stats", "{}")
    later = Feeds(2_000_000).open("{}", after=1_000_001)

    ids = [event_id for event_id, _ in await ids_and_data(feed, 2)]

    assert ids == [1_000_000, 1_000_001]
    assert (await ids_and_data(later, 1))[0][0] == 1_000_001


async def test_an_id_from_the_future_is_no_id() -> None:
    feeds = Feeds(10)
    feeds.publish("request", "1", keep=True)

    feed = feeds.open("{}", after=99)
    feeds.publish("stats", "{}")

    assert [event_id for event_id, _ in await ids_and_data(feed, 2)] == [11, 12]


async def test_no_more_readers_than_the_bound() -> None:
    feeds = Feeds(0)
    for _ in range(READERS_MAX):
        feeds.open("{}", None)

    with pytest.raises(TooManyReaders):
        feeds.open("{}", None)


async def test_a_reader_that_falls_behind_loses_the_oldest() -> None:
    feeds = Feeds(0)
    feed = feeds.open("{}", None)
    for number in range(FRAMES_MAX + 5):
        feeds.publish("stats", str(number))

    frames = await ids_and_data(feed, FRAMES_MAX)

    assert [data for _, data in frames] == [str(n) for n in range(5, FRAMES_MAX + 5)]


async def test_a_reader_that_reads_nothing_is_let_go() -> None:
    feeds = Feeds(0)
    feed = feeds.open("{}", None)
    for _ in range(FRAMES_MAX + UNREAD_MAX + 1):
        feeds.publish("stats", "{}")

    assert len(feeds) == 0
    assert len([frame async for frame in feed]) == FRAMES_MAX


async def test_what_is_kept_for_readers_that_come_back_is_bounded() -> None:
    feeds = Feeds(0)
    for number in range(KEPT_MAX + 7):
        feeds.publish("request", str(number), keep=True)

    feed = feeds.open("{}", after=1)
    feeds.end()

    assert len([frame async for frame in feed]) == 1 + KEPT_MAX
