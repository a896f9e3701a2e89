"""What a reader and a writer of one stream may count on."""

from __future__ import annotations

import asyncio

import pytest

from omlx.kernel.stream import Stream
from tests.sim.loop import simulate


def test_the_reader_gets_what_was_written_in_order_and_then_the_end() -> None:
    async def main() -> None:
        stream: Stream[int] = Stream(capacity=2)
        stream.write(1)
        stream.write(2)
        stream.end()
        async with stream:
            assert [item async for item in stream] == [1, 2]
        assert not stream.cancelled

    simulate(main())


def test_an_error_reaches_the_reader_after_what_was_written() -> None:
    async def main() -> None:
        stream: Stream[int] = Stream(capacity=1)
        stream.write(1)
        stream.end(RuntimeError("engine gone"))
        async with stream:
            assert await anext(stream) == 1
            with pytest.raises(RuntimeError, match="engine gone"):
                await anext(stream)

    simulate(main())


def test_a_reader_that_leaves_early_cancels() -> None:
    async def main() -> None:
        stream: Stream[int] = Stream(capacity=2)
        stream.write(1)

        async def read() -> None:
            async with stream:
                async for _ in stream:
                    pass

        reader = asyncio.create_task(read())
        await asyncio.sleep(1)
        assert not stream.cancelled
        reader.cancel()
        await asyncio.wait({reader})
        assert stream.cancelled

    simulate(main())


def test_the_agreed_capacity_always_leaves_room_for_the_end() -> None:
    async def main() -> None:
        stream: Stream[int] = Stream(capacity=1)
        stream.write(1)
        with pytest.raises(AssertionError, match="agreed capacity"):
            stream.write(2)
        stream.end()

    simulate(main())


def test_the_first_end_is_the_one_that_counts() -> None:
    async def main() -> None:
        stream: Stream[int] = Stream(capacity=0)
        stream.end()
        stream.end(RuntimeError("too late"))
        async with stream:
            assert [item async for item in stream] == []
        with pytest.raises(AssertionError, match="written after its end"):
            stream.write(1)

    simulate(main())
