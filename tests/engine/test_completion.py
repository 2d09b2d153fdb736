"""Sequence numbers turned into futures."""

from __future__ import annotations

import asyncio
import threading

import pytest

from freetoken.device.completion import Completion
from freetoken.device.poll_watch import PollWatch


def test_waiters_resolve_in_order_up_to_the_number_reached() -> None:
    """A step published before the one ahead of it."""

    async def main() -> None:
        order: list[int] = []

        async def wait(number: int) -> None:
            await completion.wait(number, 5.0)
            order.append(number)

        with Completion() as completion:
            async with asyncio.TaskGroup() as tasks:
                waiting = [tasks.create_task(wait(n)) for n in (1, 2, 3)]
                await asyncio.sleep(0)
                writer = threading.Thread(target=completion.signal, args=(2,))
                writer.start()
                await asyncio.wait(waiting[:2])
                assert (order, waiting[2].done()) == ([1, 2], False)
                writer.join()
                completion.signal(3)
            assert order == [1, 2, 3]
            await completion.wait(3, 5.0)

    asyncio.run(main())


def test_cancelled_waiter_leaves_the_others_in_order() -> None:
    """A client that leaves shifts everybody's completion by one."""

    async def main() -> None:
        with Completion() as completion:
            async with asyncio.TaskGroup() as tasks:
                first = tasks.create_task(completion.wait(1, 5.0))
                second = tasks.create_task(completion.wait(2, 5.0))
                await asyncio.sleep(0)
                first.cancel()
                completion.signal(1)
                await asyncio.sleep(0.001)
                assert not second.done()
                completion.signal(2)

    asyncio.run(main())


def test_number_that_never_comes_is_a_timeout() -> None:
    """A lost device hangs the server for ever."""

    async def main() -> None:
        with Completion() as completion:
            with pytest.raises(TimeoutError):
                await completion.wait(1, 0.001)
            completion.signal(1)
            await completion.wait(1, 1.0)

    asyncio.run(main())


def test_signal_after_close_does_nothing() -> None:
    """A late writer writes into somebody else's descriptor."""

    async def main() -> None:
        completion = Completion()
        completion.close()
        completion.close()
        completion.signal(1)

    asyncio.run(main())


def test_polled_word_resolves_waiters_without_the_native_library() -> None:
    """A machine without a compiler never hears from its device."""

    async def main() -> None:
        word = memoryview(bytearray(8)).cast("Q")
        with Completion(word) as completion:
            watch = PollWatch(word, completion.eventfd)
            try:
                for number in range(1, 20):
                    watch.arm(number)
                    word[0] = number
                    await completion.wait(number, 5.0)
            finally:
                watch.close()

    asyncio.run(main())
