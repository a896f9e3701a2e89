"""Every request is counted once, told to every reader, and still there after a restart."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from omlx.actors.feed import READERS_MAX
from omlx.actors.stats import Stats, to_json
from omlx.actors.stats_messages import (
    CacheReport,
    EngineReport,
    Feed,
    FindRequest,
    ModelServed,
    ReadHistory,
    RecentRequests,
    RequestEnded,
    RequestRejected,
    Snapshot,
)
from omlx.core.history import Kept
from omlx.core.usage import CacheGauges, EngineGauges, GdnGauges, ModelFacts, Totals
from omlx.kernel.mailbox import Ref
from omlx.kernel.message import Message
from omlx.kernel.stream import Stream
from tests.kernel.stage import Stage
from tests.sim.loop import simulate
from tests.sim.records import record, running_row

START = 1_700_000_000.0


class FakeStore:
    """Keeps the totals in memory; the disk may be full, or slow."""

    def __init__(self, totals: Totals | None = None) -> None:
        self.kept = totals or Totals()
        self.saves: list[float] = []
        self.full = False
        self.takes_s = 0.0

    async def load(self) -> Totals:
        return replace(self.kept)

    async def save(self, totals: Totals) -> None:
        self.saves.append(wall())
        await asyncio.sleep(self.takes_s)
        if self.full:
            raise OSError("no space left")
        self.kept = replace(totals)


def wall() -> float:
    return START + asyncio.get_running_loop().time()


def play(
    scene: Callable[[Ref[Any]], Awaitable[None]],
    store: FakeStore | None = None,
    seed: int = 0,
    history: FakeHistory | None = None,
) -> FakeStore:
    """Run ``scene`` against the actor under a supervisor; the store as it is after the stop."""
    kept = store or FakeStore()

    async def main() -> None:
        stage = Stage(seed)
        stats = stage.spawn(
            lambda: Stats(kept, GdnGauges(storage="embedded"), wall, history),
            "stats",
            Stats.capacity,
        )
        async with stage:
            await scene(stats)

    simulate(main())
    return kept


def parsed(frame: str) -> tuple[str, int, Any]:
    event, event_id, data, *rest = frame.split("\n")
    assert rest == ["", ""], "a frame ends with one empty line"
    return (
        event.removeprefix("event: "),
        int(event_id.removeprefix("id: ")),
        json.loads(data.removeprefix("data: ")),
    )


async def snapshot(stats: Ref[Any]) -> dict[str, Any]:
    return json.loads(await stats.ask(Snapshot()))


@pytest.mark.parametrize("seed", range(5))
def test_the_snapshot_holds_what_was_told(seed: int) -> None:
    async def scene(stats: Ref[Any]) -> None:
        await stats.tell(ModelServed(ModelFacts(id="demo", kv_layers=4, block_size=16)))
        await stats.tell(CacheReport(CacheGauges(hits=3, rejected_files=(("version", 2),))))
        await stats.tell(EngineReport(EngineGauges(running=1), (running_row(),)))
        await stats.tell(RequestEnded(record(cached_tokens=0)))
        await stats.tell(RequestEnded(record(cached_tokens=96)))
        await stats.tell(RequestRejected())

        found = await snapshot(stats)

        assert found["session"] == {
            "processed_tokens": 200,
            "cached_tokens": 96,
            "efficiency": 0.48,
            "generated_tokens": 40,
            "attribution_stripped": 0,
            "unfinished_tokens": 0,
            "saved_ms": -2,
            "requests": {"completed": 2, "failed": 0, "cancelled": 0, "rejected": 1},
        }
        assert found["alltime"] == found["session"]
        assert found["cache"]["rejected_files"] == {"version": 2}
        assert found["gdn"]["storage"] == "embedded"
        assert found["model"]["layers"] == {"kv": 4, "rotating": 0, "recurrent": 0}
        assert found["running"][0]["computed_tokens"] == 100

    play(scene, seed=seed)


def test_totals_of_earlier_runs_go_into_alltime_only() -> None:
    async def scene(stats: Ref[Any]) -> None:
        await stats.tell(RequestEnded(record()))

        found = await snapshot(stats)

        assert found["session"]["processed_tokens"] == 100
        assert found["alltime"]["processed_tokens"] == 1100

    store = play(scene, FakeStore(Totals(processed_tokens=1000, cached_tokens=5, completed=3)))

    assert (store.kept.processed_tokens, store.kept.completed) == (1100, 4)


def test_totals_are_saved_every_ten_seconds_when_they_changed_and_at_the_end() -> None:
    async def scene(stats: Ref[Any]) -> None:
        await asyncio.sleep(25)
        await stats.tell(RequestEnded(record()))
        await asyncio.sleep(40)
        await stats.tell(RequestRejected())

    store = play(scene)

    assert store.saves == [START + 30, START + 65]
    assert store.kept.rejected == 1


def test_a_slow_disk_holds_nobody_up_and_gets_one_save_at_a_time() -> None:
    store = FakeStore()
    store.takes_s = 35.0

    async def scene(stats: Ref[Any]) -> None:
        for _ in range(32):
            await stats.tell(RequestEnded(record()))
            async with asyncio.timeout(0.1):
                await stats.ask(Snapshot())
            await asyncio.sleep(1)

        assert store.saves == [START + 10]
        store.takes_s = 0.0

    play(scene, store)

    assert store.kept.completed == 32


def test_a_full_disk_is_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    store.full = True

    async def scene(stats: Ref[Any]) -> None:
        await stats.tell(RequestEnded(record()))
        await asyncio.sleep(31)
        store.full = False
        await asyncio.sleep(10)

    play(scene, store)

    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(store.saves) == 4
    assert len(warnings) == 1 and "no space left" in warnings[0].getMessage()
    assert store.kept.completed == 1


def test_a_crash_loses_no_alltime_total() -> None:
    async def scene(stats: Ref[Any]) -> None:
        await stats.tell(RequestEnded(record()))
        await stats.tell(Message())  # one that it cannot handle: a bug
        await asyncio.sleep(1)

        found = await snapshot(stats)

        assert found["session"]["processed_tokens"] == 0
        assert found["alltime"]["processed_tokens"] == 100

    play(scene)


def test_requests_are_listed_newest_first_and_found_by_id() -> None:
    async def scene(stats: Ref[Any]) -> None:
        await stats.tell(RequestEnded(record(id="a")))
        await stats.tell(RequestEnded(record(id="b", error="step_failed", finish_reason=None)))
        await stats.tell(EngineReport(EngineGauges(), (running_row(id="c"),)))

        rows = json.loads(await stats.ask(RecentRequests(10)))["requests"]
        first = json.loads(await stats.ask(RecentRequests(1)))["requests"]
        found = json.loads(await stats.ask(FindRequest("a")) or "null")

        assert [(row["id"], row["state"]) for row in rows] == [
            ("c", "prefill"),
            ("b", "failed"),
            ("a", "completed"),
        ]
        assert first == rows[:1]
        assert found == rows[2]
        assert await stats.ask(FindRequest("d")) is None

    play(scene)


def test_history_is_what_ended_when() -> None:
    async def scene(stats: Ref[Any]) -> None:
        await asyncio.sleep(5)
        await stats.tell(RequestEnded(record()))
        await asyncio.sleep(2)

        found = json.loads(await stats.ask(ReadHistory("1s")))

        assert (found["res"], found["start"]) == ("1s", START)
        assert found["columns"][:5] == ["time", "computed", "cached", "generated", "requests"]
        assert found["rows"][5][:5] == [START + 5, 52, 48, 20, 1]
        assert len(found["rows"]) == 8

    play(scene)


# ── the history's file ───────────────────────────────────────────────────────────────────────


class FakeHistory:
    """Keeps the history in memory; the disk may be full, or out of reach."""

    def __init__(self) -> None:
        self.kept: list[Kept] = []
        self.full = False

    async def load(self) -> Kept:
        if self.full:
            raise OSError("no such disk")
        rows = {(width, row[0]): row for kept in self.kept for width, row in kept.rows}
        return Kept(
            tuple((width, row) for (width, _), row in rows.items()),
            tuple(mark for kept in self.kept for mark in kept.marks),
            next((kept.speeds for kept in reversed(self.kept) if kept.speeds), ()),
        )

    async def save(self, changed: Kept) -> None:
        if self.full:
            raise OSError("no space left")
        self.kept.append(changed)


async def charted(stats: Ref[Any]) -> int:
    rows = json.loads(await stats.ask(ReadHistory("1m")))["rows"]
    return sum(row[4] for row in rows)


def test_the_charts_go_on_where_they_were_after_a_restart() -> None:
    history = FakeHistory()

    async def first(stats: Ref[Any]) -> None:
        await stats.tell(ModelServed(ModelFacts(id="demo", namespace="00")))
        await stats.tell(RequestEnded(record(cached_tokens=0, engine_ms=5000.0)))

    async def second(stats: Ref[Any]) -> None:
        await stats.tell(ModelServed(ModelFacts(id="demo", namespace="00")))
        await stats.tell(RequestEnded(record(prompt_tokens=100, cached_tokens=96)))

        found = await snapshot(stats)
        marks = json.loads(await stats.ask(ReadHistory("1m")))["marks"]

        assert await charted(stats) == 2
        assert found["24h"]["processed_tokens"] == 200
        assert found["session"]["processed_tokens"] == 100
        assert found["session"]["saved_ms"] > 4000  # the speed was measured by the first
        assert [what for _, what in marks] == ["model", "model"]

    play(first, history=history)
    play(second, history=history)


def test_a_history_that_cannot_be_written_is_written_later() -> None:
    history = FakeHistory()
    history.full = True

    async def scene(stats: Ref[Any]) -> None:
        await stats.tell(RequestEnded(record()))
        await asyncio.sleep(25)
        assert await charted(stats) == 1
        history.full = False
        await stats.tell(RequestEnded(record()))
        await asyncio.sleep(10)
        assert len(history.kept) == 1

    play(scene, history=history)

    rows = [row for kept in history.kept for width, row in kept.rows if width == 60]
    assert sum(row[4] for row in rows) == 2


def test_an_idle_server_writes_nothing() -> None:
    history = FakeHistory()

    async def scene(stats: Ref[Any]) -> None:
        await asyncio.sleep(100)

    play(scene, history=history)

    assert history.kept == []


# ── feeds ────────────────────────────────────────────────────────────────────────────────────


async def read(feed: Stream[str], count: int) -> list[tuple[str, int, Any]]:
    return [parsed(await anext(feed)) for _ in range(count)]


def test_a_feed_begins_with_stats_and_goes_on_each_second() -> None:
    async def scene(stats: Ref[Any]) -> None:
        async with await stats.ask(Feed()) as feed:
            await stats.tell(RequestEnded(record(id="a")))
            frames = await read(feed, 4)

            assert [event for event, _, _ in frames] == ["stats", "request", "stats", "stats"]
            assert frames[0][2]["session"]["processed_tokens"] == 0
            assert frames[1][2]["id"] == "a"
            assert frames[2][2]["session"]["processed_tokens"] == 100
            ids = [event_id for _, event_id, _ in frames]
            assert ids == sorted(set(ids))

    play(scene)


def test_a_reader_that_comes_back_gets_what_it_missed() -> None:
    async def scene(stats: Ref[Any]) -> None:
        async with await stats.ask(Feed()) as feed:
            await stats.tell(RequestEnded(record(id="seen")))
            (_, seen, _) = (await read(feed, 2))[1]
        await stats.tell(RequestEnded(record(id="missed")))

        async with await stats.ask(Feed(after=seen)) as feed:
            frames = await read(feed, 3)

        assert [event for event, _, _ in frames] == ["stats", "request", "stats"]
        assert frames[1][2]["id"] == "missed"
        assert frames[0][1] <= seen < frames[1][1] < frames[2][1]

    play(scene)


def test_a_reader_that_left_is_forgotten_and_all_others_end_with_the_actor() -> None:
    ended: list[str] = []
    readers: list[asyncio.Future[None]] = []

    async def stay(stats: Ref[Any]) -> None:
        async with await stats.ask(Feed()) as feed:
            async for _ in feed:
                pass
            ended.append("end")

    async def scene(stats: Ref[Any]) -> None:
        for _ in range(READERS_MAX * 2):
            async with await stats.ask(Feed()):
                pass
        for _ in range(3):
            readers.append(asyncio.ensure_future(stay(stats)))
        await asyncio.sleep(3)

    play(scene)

    assert ended == ["end"] * 3


# ── the log ──────────────────────────────────────────────────────────────────────────────────


def test_each_ended_request_is_one_log_line_that_cannot_be_forged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    evil = record(client="x\r\nERROR forged\x1b[2J\u2028", model="m\nn", error="boom\n")

    async def scene(stats: Ref[Any]) -> None:
        await stats.tell(RequestEnded(evil))

    play(scene)

    lines = [r.getMessage() for r in caplog.records if r.name == "omlx.actors.stats"]
    assert len(lines) == 1
    assert lines[0].isprintable()
    assert "prompt_tokens=100 cached_tokens=48" in lines[0]


def test_json_means_nothing_as_html() -> None:
    text = to_json({"client": "<script>1</script>&"})

    assert not {"<", ">", "&"} & set(text)
    assert json.loads(text) == {"client": "<script>1</script>&"}
