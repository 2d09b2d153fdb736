"""The thread that turns a written word into an event of the loop."""

from __future__ import annotations

import asyncio
import ctypes
import time

from freetoken.device.completion import Completion
from freetoken.native import Watch, open_library


def test_watched_word_resolves_waiters_in_order() -> None:
    """A device that finished is not noticed, or a step is announced before the one ahead of it."""
    library = open_library()
    assert library is not None
    cell = (ctypes.c_uint64 * 1)(0)

    async def main() -> None:
        with Completion(memoryview(cell).cast("B").cast("Q")) as completion:
            watch = Watch(library, ctypes.addressof(cell), completion.eventfd)
            try:
                for number in range(1, 200):
                    watch.arm(number)
                    waiting = completion.wait(number, 5.0)
                    cell[0] = number
                    await waiting
                    assert watch.seen_ns() <= time.monotonic_ns()
            finally:
                watch.close()
                watch.close()

    asyncio.run(main())


def test_watch_that_waits_for_ever_can_be_closed() -> None:
    """A lost device keeps the process from ending."""
    library = open_library()
    assert library is not None
    cell = ctypes.c_uint64(0)

    async def main() -> None:
        with Completion() as completion:
            watch = Watch(library, ctypes.addressof(cell), completion.eventfd)
            watch.arm(1)
            watch.close()

    asyncio.run(main())
