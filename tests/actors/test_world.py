"""The whole back of the server: whatever crashes, each request gets its answer or an error, once.

A failing seed runs again with ``pytest tests/actors/test_world.py -k "name and [seed]"``.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace

import pytest

from omlx.actors.messages import (
    ChoiceEnded,
    ClearCache,
    Ended,
    IsScanned,
    ProbeCache,
    Submit,
    TextDelta,
)
from omlx.cache.blocks import BlockHash, pack_tokens
from omlx.cache.cold_tier import WritePolicy
from omlx.core.sequence import Request
from omlx.kernel.stream import Stream
from tests.sim.fake_disk import FakeDisk
from tests.sim.fake_engine import Mishaps, alone
from tests.sim.loop import simulate
from tests.sim.world import ACTORS, Answer, Sizes, World

LONG = (0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 1, 1)
LASTING = (1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 0)


@pytest.fixture(autouse=True)
def only_errors(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "omlx")


def request(prompt: tuple[int, ...], max_tokens: int = 4, salt: str = "") -> Request:
    return replace(Request("r", prompt, max_tokens), salt=salt)


def drawn_request(rng: random.Random) -> Request:
    prompt = LONG[: rng.randint(1, 17)] + (rng.randrange(2),) * rng.randint(0, 6)
    return request(prompt, rng.randint(1, 12), salt=rng.choice(["", "", "s"]))


def check_answer(answer: Answer) -> None:
    wanted = answer.request
    tokens, text, finish_reason = alone(wanted.prompt, wanted.max_tokens)
    assert answer.tokens == tokens[: len(answer.tokens)]
    assert text.startswith(answer.text)
    record = answer.record
    if answer.outcome == "ended":
        assert (answer.tokens, answer.text) == (tokens, text)
        assert record is not None
        assert record.finish_reason == finish_reason
        assert record.generated_tokens == len(tokens)
        assert 0 <= record.cached_tokens <= len(wanted.prompt) - 1
    else:
        assert record is None, "it had ended"
        assert answer.outcome in ("failed", "gone", "left")


# ── anything goes wrong at any time ──────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(120))
def test_each_request_gets_what_it_would_get_alone_or_an_error(seed: int) -> None:
    """K3, K5, K7: crashes of every actor, a disk that is full, slow and damaged, clients who go."""
    rng = random.Random(seed)
    disk = FakeDisk(capacity_bytes=rng.choice([5_000, 20_000, 1 << 40]))
    sizes = Sizes(
        hot=rng.choice([0, 2, 8, 1000]),
        ssd=rng.choice([2, 8, 1000]),
        pending=rng.choice([1, 4, 1000]),
    )
    world = World(seed, disk, sizes, writer_capacity=rng.choice([2, 1024]))
    world.engine.feeds_ahead = rng.random() < 0.5
    damaged = False
    world.read_s, world.write_s = rng.choice([0.001, 0.05, 0.5]), rng.choice([0.001, 0.05, 0.5])
    world.engine.mishaps = Mishaps(rng, *rng.choice([(0.0, 0.0, 0.0), (0.02, 0.01, 0.05)]))

    async def client() -> Answer:
        await asyncio.sleep(rng.uniform(0.0, 20.0))
        leaves_after = rng.choice([10**6, 10**6, rng.randint(1, 5)])
        return await world.ask(drawn_request(rng), leaves_after=leaves_after)

    async def trouble() -> None:
        nonlocal damaged
        for _ in range(rng.randint(0, 8)):
            await asyncio.sleep(rng.expovariate(0.5))
            match rng.choice(["crash", "crash", "damage", "refuse", "clear", "limit"]):
                case "crash":
                    world.crash(rng.choice(ACTORS))
                case "damage":
                    damaged = True
                    disk.damage(rng)
                case "refuse":
                    damaged = True  # what can't be listed is written, and cleared, unseen
                    disk.unreadable = not disk.unreadable
                case "clear":
                    hot, ssd = rng.random() < 0.7, rng.random() < 0.5
                    world.refs["paged_cache"].offer(ClearCache(hot, ssd))
                case _:
                    disk.capacity_bytes = rng.choice([disk.nbytes, 20_000, 1 << 40])

    async def main() -> list[Answer]:
        async with world:
            clients = [asyncio.create_task(client()) for _ in range(20)]
            await trouble()
            answers = await asyncio.gather(*clients)
            disk.unreadable, disk.capacity_bytes = False, 1 << 40
            world.engine.mishaps = Mishaps(rng)
            await world.quiet()
            world.check_at_rest()
            if not damaged:
                world.check_persisted()
            answers.append(await world.ask(request(LONG)))
            assert answers[-1].outcome == "ended", "it serves again"
        return answers

    answers = simulate(main(), limit_s=1_000.0)

    for answer in answers:
        check_answer(answer)


@pytest.mark.parametrize("seed", range(40))
def test_a_server_that_was_killed_at_any_moment_starts_again(seed: int) -> None:
    """K5: only the disk is left, as it was; what it holds is used, and nothing else."""
    rng = random.Random(seed)
    disk = FakeDisk()

    async def first_life() -> None:
        world = World(seed, disk, Sizes(pending=rng.choice([1, 1000])))
        world.write_s = rng.choice([0.01, 0.3])
        async with world:
            clients = [asyncio.create_task(world.ask(drawn_request(rng))) for _ in range(6)]
            await asyncio.sleep(rng.uniform(0.0, 3.0))
            world.supervisor._children.clear()  # killed: nobody is asked to stop
            for client in clients:
                client.cancel()

    async def second_life() -> list[Answer]:
        async with World(seed + 1, disk) as world:
            answers = [await world.ask(drawn_request(rng)) for _ in range(6)]
            await world.quiet()
            world.check_at_rest()
        return answers

    simulate(first_life())
    for answer in simulate(second_life()):
        assert answer.outcome == "ended"
        check_answer(answer)


class Watched(Stream[TextDelta | ChoiceEnded | Ended]):
    """Notes whether the engine's next step has been asked for when a token is written."""

    def __init__(self, capacity: int, world: World) -> None:
        super().__init__(capacity)
        self._world = world
        self.steps_waiting: list[int] = []

    def write(self, item: TextDelta | ChoiceEnded | Ended) -> None:
        queued = self._world.supervisor.mailboxes()
        self.steps_waiting.append(queued["model_runner"].queued + queued["paged_cache"].queued)
        super().write(item)


@pytest.mark.parametrize("seed", range(5))
def test_the_next_step_is_on_its_way_before_the_clients_are_written_to(seed: int) -> None:
    async def main() -> list[int]:
        async with World(seed, FakeDisk()) as world:
            stream = Watched(41, world)
            await world.refs["scheduler"].ask(Submit(request(LASTING, 40), stream))
            async with stream:
                async for _ in stream:
                    pass
        return stream.steps_waiting

    *decoding, _ = simulate(main())
    assert decoding == [1] * 40


# ── one promise each ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ACTORS)
def test_a_crash_costs_no_more_than_it_must(name: str) -> None:
    """A tier or the statistics may fall; the streams end with them only if the engine's part does.

    Those end within a moment, with a reason that may be shown.
    """

    async def main() -> tuple[Answer, float]:
        async with World(0, FakeDisk()) as world:
            running = asyncio.create_task(world.ask(request(LASTING, 40)))
            await asyncio.sleep(0.2)
            crashed_s = asyncio.get_running_loop().time()
            world.crash(name)
            answer = await running
            await asyncio.sleep(1.0)
            again = await world.ask(request(LONG))
            assert again.outcome == "ended"
            check_answer(again)
            await world.quiet()
            world.check_at_rest()
            return answer, answer.ended_s - crashed_s

    answer, waited_s = simulate(main())

    check_answer(answer)
    if name in ("stats", "ssd_writer", "ssd_reader"):
        assert answer.outcome == "ended"
    else:
        assert answer.outcome == "failed"
        assert answer.error == "engine_restarting: the engine is restarting"
        assert waited_s < 5.0


def test_rows_of_a_crashed_scheduler_do_not_meet_those_of_the_next() -> None:
    """K3: a new life begins to count its sequences anew, in an engine without rows."""

    async def main() -> Answer:
        async with World(0, FakeDisk()) as world:
            lost = asyncio.create_task(world.ask(request(LASTING, 40)))
            await asyncio.sleep(0.2)
            assert world.engine.rows, "it decodes"
            world.crash("scheduler")
            await lost
            await asyncio.sleep(1.0)
            return await world.ask(request(LONG, 12))

    answer = simulate(main())

    assert answer.outcome == "ended"
    check_answer(answer)


def test_a_reader_that_is_gone_means_computing_not_failing() -> None:
    """K7: prefixes in files are computed again; nobody gets an error for it."""

    async def main() -> tuple[Answer, Answer]:
        async with World(0, FakeDisk(), Sizes(hot=0)) as world:
            await world.ask(request(LONG))
            await world.quiet()
            world.read_s = 200.0  # no file comes before its reader is given up
            reading = asyncio.create_task(world.ask(request(LONG)))
            await asyncio.sleep(0.5)
            world.crash("ssd_reader")
            first = await world.ask(request(LONG))
            assert (await reading).outcome == "ended"
            world.read_s = 0.01
            await asyncio.sleep(1000.0)  # the threads come back
            return first, await world.ask(request(LONG))

    first, second = simulate(main())

    for answer in (first, second):
        assert answer.outcome == "ended"
        check_answer(answer)
    assert first.record is not None
    assert second.record is not None
    assert first.record.cached_tokens == 0
    assert second.record.cached_ssd == len(LONG) - 1


def test_who_goes_away_stops_costing_anything_within_a_step() -> None:
    """B35."""

    async def main() -> None:
        async with World(0, FakeDisk()) as world:
            world.step_s = 0.02
            left = await world.ask(request(LASTING, 40), leaves_after=3)
            assert left.outcome == "left"
            await asyncio.sleep(0.15)
            assert not world.engine.rows
            assert world.cores[-1].idle

    simulate(main())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("pending", [1, 2, 1000])
def test_stopping_flushes_everything_that_is_dirty(seed: int, pending: int) -> None:
    """B44: however little may wait to be written, and however slow the disk is."""
    disk = FakeDisk()
    prompts = [tuple(int(bit) for bit in f"{n:05b}") * 4 for n in range(3)]

    async def first_life() -> None:
        world = World(seed, disk, Sizes(pending=pending))
        async with world:
            world.write_s = 5.0
            for prompt in prompts:
                await world.ask(request(prompt, 1))
            assert world.cache.files.num_dirty + world.cache.cold.pending_bytes > 0, (
                "it was not slow enough"
            )

    async def second_life() -> list[Answer]:
        async with World(seed, disk) as world:
            return [await world.ask(request(prompt, 1)) for prompt in prompts]

    simulate(first_life())
    for answer in simulate(second_life()):
        assert answer.record is not None
        assert answer.record.cached_tokens == 19
        check_answer(answer)


def test_what_idles_is_written_without_being_asked() -> None:
    """B44: so that a kill later costs nothing."""

    async def main() -> None:
        async with World(0, FakeDisk(), Sizes(pending=4)) as world:
            await world.ask(request(LONG * 3))
            await asyncio.sleep(5.0)
            assert world.cache.files.num_dirty == 0
            assert world.cache.cold.pending_bytes == 0
            assert len(world.disk.files) == len(world.cache.cold.ledger) > 10

    simulate(main())


def test_stopping_finishes_the_streams_that_run() -> None:
    async def main() -> Answer:
        async with World(0, FakeDisk()) as world:
            running = asyncio.create_task(world.ask(request(LASTING, 40)))
            await asyncio.sleep(0.2)
        return await running

    answer = simulate(main())

    assert answer.outcome == "ended"
    check_answer(answer)


def test_a_stream_that_outlasts_the_drain_ends_with_an_error() -> None:
    async def main() -> Answer:
        async with World(0, FakeDisk(), drain_s=1.0) as world:
            world.step_s = 2.0
            running = asyncio.create_task(world.ask(request(LASTING, 40)))
            await asyncio.sleep(5.0)
        return await running

    answer = simulate(main())

    assert answer.error == "server_shutdown: the server is shutting down"
    check_answer(answer)


def test_stopping_does_not_wait_for_a_disk_that_takes_nothing() -> None:
    """K7: what can't be written is left; the stop is not held up by it."""

    async def main() -> float:
        disk = FakeDisk(capacity_bytes=0)
        async with World(0, disk, drain_s=600.0) as world:
            await world.ask(request(LONG))
        return asyncio.get_running_loop().time()

    assert simulate(main()) < 10.0


def test_a_full_disk_costs_nothing_but_the_files() -> None:
    """B47: answers stay right, what is there still hits, and it recovers without a restart."""

    async def main() -> None:
        disk = FakeDisk()
        async with World(0, disk, Sizes(hot=0)) as world:
            await world.ask(request(LONG))
            await world.quiet()
            before = dict(disk.files)
            disk.capacity_bytes = disk.nbytes

            for n in range(5):
                answer = await world.ask(request((n % 2, *LASTING)))
                assert answer.outcome == "ended"
                check_answer(answer)
            assert before.items() <= disk.files.items(), "nothing was purged"
            hit = await world.ask(request(LONG))
            assert hit.record is not None
            assert hit.record.cached_ssd == len(LONG) - 1

            disk.capacity_bytes = 1 << 40
            await world.quiet()
            await world.ask(request(LASTING))
            await world.quiet()
            assert len(disk.files) > len(before)
            world.check_at_rest()

    simulate(main())


def test_a_disk_that_refuses_is_asked_again_but_not_all_the_time() -> None:
    """B47: once in a while, not for each block."""

    async def main() -> int:
        disk = FakeDisk(capacity_bytes=0)
        attempts = 0
        write = disk.write

        def counted(*args: object) -> int:
            nonlocal attempts
            attempts += 1
            return write(*args)  # pyright: ignore[reportArgumentType]

        disk.write = counted
        async with World(0, disk) as world:
            await world.ask(request(LONG * 4))
            await asyncio.sleep(300.0)
        return attempts

    assert simulate(main()) < 60


def test_a_writer_without_room_is_not_asked_again_in_every_step() -> None:
    """Each time costs a step and a copy, while a slow disk has not moved."""

    async def main() -> None:
        async with World(0, FakeDisk(), Sizes(pending=2)) as world:
            world.write_s = 10.0
            await world.ask(request(LONG * 4))
            steps = world.engine.steps
            await asyncio.sleep(60.0)
            assert world.engine.steps - steps < 130
            assert world.cache.files.num_dirty > 0
            world.write_s = 0.01
            await world.quiet()
            assert world.cache.files.num_dirty == 0
            world.check_at_rest()
            world.check_persisted()

    simulate(main())


def test_a_cleared_cache_is_empty_even_of_what_was_on_its_way() -> None:
    """B22: no repeat finds anything, in RAM or in a file that was finished meanwhile."""

    async def main() -> None:
        disk = FakeDisk()
        async with World(0, disk) as world:
            world.write_s = 1.0
            prompts = [tuple(int(bit) for bit in f"{n:05b}") * 4 for n in range(6)]
            for prompt in prompts:
                await world.ask(request(prompt, 1))
            assert world.cache.cold.pending_bytes > 0, "the disk was not slow enough"

            cleared = await world.refs["paged_cache"].ask(ClearCache(hot=True, ssd=True))
            assert cleared.kept_in_use == 0
            await world.quiet()

            for prompt in prompts:
                probed = await world.refs["paged_cache"].ask(ProbeCache(pack_tokens(prompt)))
                assert probed.cached_ram + probed.cached_ssd == 0
            assert not disk.files
            world.check_at_rest()

    simulate(main())


def test_files_given_up_for_room_are_not_written_again_and_again() -> None:
    """A hot tier that is larger than the cold one must not wear the disk out while it idles."""

    async def main() -> None:
        async with World(0, FakeDisk(), Sizes(hot=1000, ssd=4)) as world:
            for n in range(8):
                await world.ask(request(tuple(int(bit) for bit in f"{n:05b}") * 4, 1))
            await world.quiet()
            writes = world.disk.writes
            await asyncio.sleep(1_000.0)
            assert world.disk.writes == writes

    simulate(main())


def test_thousands_of_files_are_removed_even_by_a_slow_disk() -> None:
    """More than the writer's mailbox has room for; none is left behind."""

    async def main() -> None:
        disk = FakeDisk()
        async with World(0, disk, Sizes(ssd=10_000)) as world:
            await world.ask(request(LONG * 300, 1))
            await world.quiet()
            assert len(disk.files) > 1_100
            world.write_s = 0.5
            await world.refs["paged_cache"].ask(ClearCache(hot=True, ssd=True))
            await world.quiet()
            assert not disk.files

    simulate(main())


def test_a_directory_that_could_not_be_listed_is_listed_later() -> None:
    disk = FakeDisk()

    async def first_life() -> None:
        async with World(0, disk) as world:
            await world.ask(request(LONG))

    async def second_life() -> None:
        async with World(0, disk) as world:
            world.crash("ssd_reader")
            world.crash("ssd_reader")
            await world.quiet()
            assert await world.refs["paged_cache"].ask(IsScanned())
            world.check_at_rest()
            answer = await world.ask(request(LONG))
            assert answer.record is not None
            assert answer.record.cached_ssd == len(LONG) - 1

    simulate(first_life())
    simulate(second_life())


# ── who waits for the disk ───────────────────────────────────────────────────────────────────


def test_without_a_ram_tier_an_answer_waits_a_little_for_the_writer() -> None:
    """B67: or two identical prompts back to back would both be computed."""

    async def main() -> None:
        async with World(0, FakeDisk(), Sizes(hot=0, pending=1)) as world:
            world.write_s = 0.1
            await world.ask(request(LONG, 1))
            again = await world.ask(request(LONG, 1))
            assert again.record is not None
            assert again.record.cached_tokens == len(LONG) - 1
            assert world.cache.stats.pending_stops == 0

    simulate(main())


def test_it_does_not_wait_longer_than_two_seconds() -> None:
    async def main() -> None:
        async with World(0, FakeDisk(), Sizes(hot=0, pending=1)) as world:
            world.write_s = 50.0
            loop = asyncio.get_running_loop()
            started = loop.time()
            answer = await world.ask(request(LONG, 1))
            assert answer.outcome == "ended"
            assert 2.0 <= loop.time() - started < 3.0
            await asyncio.sleep(2.0)
            assert world.cache.stats.pending_stops > 0, "and it is counted"

    simulate(main())


@pytest.mark.parametrize("seed", range(5))
def test_through_means_that_what_was_answered_is_on_disk(seed: int) -> None:
    """A kill right after the answer costs nothing."""
    disk = FakeDisk()

    async def first_life() -> None:
        world = World(seed, disk, Sizes(pending=2, policy=WritePolicy.THROUGH), drain_s=0.0)
        async with world:
            world.write_s = 0.3
            await world.ask(request(LONG, 1))
            assert not world.cache.files.pending
            assert world.cache.files.num_dirty == 0
            kept.update(disk.files)

    async def second_life() -> Answer:
        disk.files = kept
        async with World(seed, disk) as world:
            return await world.ask(request(LONG, 1))

    kept: dict[BlockHash, bytes] = {}
    simulate(first_life())
    answer = simulate(second_life())
    assert answer.record is not None
    assert answer.record.cached_tokens == len(LONG) - 1


def test_through_does_not_wait_for_a_disk_that_takes_nothing() -> None:
    async def main() -> None:
        disk = FakeDisk(capacity_bytes=0)
        async with World(0, disk, Sizes(policy=WritePolicy.THROUGH)) as world:
            loop = asyncio.get_running_loop()
            started = loop.time()
            assert (await world.ask(request(LONG, 1))).outcome == "ended"
            assert loop.time() - started < 5.0

    simulate(main())


def test_an_idle_server_writes_everything_within_five_seconds() -> None:
    """B44: so that a later kill costs no more than that."""

    async def main() -> None:
        async with World(0, FakeDisk(), Sizes(pending=4)) as world:
            for number in range(8):
                await world.ask(request((number % 2, number // 2 % 2, number // 4) * 20, 1))
            assert world.cache.files.num_dirty > 20
            await asyncio.sleep(5.0)
            assert world.cache.files.num_dirty == 0
            assert world.cache.cold.pending_bytes == 0

    simulate(main())


# ── a disk that is silent ────────────────────────────────────────────────────────────────────


def test_a_disk_that_does_not_answer_is_computed_around_and_reported() -> None:
    """K7: the answer comes by the reader's deadline, and the files serve again afterwards."""

    async def main() -> tuple[Answer, Answer, bool]:
        async with World(0, FakeDisk(), Sizes(hot=0)) as world:
            await world.ask(request(LONG))
            await world.quiet()
            files = set(world.disk.files)
            world.read_s = 200.0
            started_s = asyncio.get_running_loop().time()
            hung = await world.ask(request(LONG))
            assert hung.ended_s - started_s < 15.0
            assert files <= set(world.disk.files), "no file was given up"
            reported = not world.cache.cold.writable
            world.read_s = 0.01
            await world.quiet()
            await world.quiet()
            await world.quiet()
            await world.quiet()
            return hung, await world.ask(request(LONG)), reported

    hung, again, reported = simulate(main())

    for answer in (hung, again):
        assert answer.outcome == "ended"
        check_answer(answer)
    assert hung.record is not None
    assert again.record is not None
    assert hung.record.cached_tokens == 0
    assert again.record.cached_ssd == len(LONG) - 1
    assert reported, "the tier does not work while it is silent"


def test_who_waits_for_a_slot_has_its_files_read_meanwhile() -> None:
    """With its slot it has its prefix at once, however slow the disk is."""

    async def main() -> Answer:
        async with World(0, FakeDisk(), Sizes(hot=0)) as world:
            await world.ask(request(LONG))
            await world.quiet()
            world.step_s, world.read_s = 0.2, 3.0
            lasting = [asyncio.create_task(world.ask(request(LASTING, 40))) for _ in range(3)]
            await asyncio.sleep(1.0)
            waited = await world.ask(request(LONG))
            await asyncio.gather(*lasting)
            return waited

    waited = simulate(main())

    check_answer(waited)
    assert waited.record is not None
    assert waited.record.queue_ms > 3_000, "there was no slot"
    assert waited.record.cached_ssd == len(LONG) - 1
    assert waited.record.restore_ms < 1_500, "it is some steps, and no file"
