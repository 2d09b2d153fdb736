"""How a finished step wakes the event loop: a rising sequence number and an eventfd.

The writer publishes the number of the last finished step in a word of memory and adds to the
eventfd; the loop drains it and resolves the futures up to that number, in order. On a CPU the
runner's thread does both. On a GPU the step's last kernel writes the word and the native watcher
adds to the eventfd. Nobody blocks and no driver callback takes the interpreter lock.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from types import TracebackType


class Completion:
    """Owns one eventfd of one loop. `signal` may be called from any thread, the rest from the loop.

    word  8 bytes of memory that outlives this object, 0 at first: a memoryview of format "Q".
          None: plain memory of its own.
    """

    def __init__(self, word: memoryview | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._word = memoryview(bytearray(8)).cast("Q") if word is None else word
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._loop.add_reader(self._fd, self._drain)

    @property
    def eventfd(self) -> int:
        """The descriptor that a native writer adds to after it wrote the word."""
        return self._fd

    def signal(self, number: int) -> None:
        """Say that every step up to `number` is finished. One writer at a time; numbers never fall.
        Ignored once closed.
        """
        if self._fd >= 0:
            self._word[0] = number
            os.eventfd_write(self._fd, 1)

    async def wait(self, number: int, limit_s: float) -> None:
        """Return when `number` is reached; numbers are awaited in rising order.

        Raises TimeoutError after `limit_s` seconds. Always yields to the loop once, so that a
        writer that is always early cannot keep other tasks from running. A waiter that is
        cancelled leaves the order of the others as it was.
        """
        if self._word[0] >= number:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((number, future))
        async with asyncio.timeout(limit_s):
            await future

    def close(self) -> None:
        """Forget the descriptor; waiters left are cancelled. The writer must have stopped. Closing
        twice does nothing.
        """
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1
        for _, future in self._waiters:
            future.cancel()
        self._waiters.clear()

    def __enter__(self) -> Completion:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _drain(self) -> None:
        os.eventfd_read(self._fd)
        reached = self._word[0]
        while self._waiters and self._waiters[0][0] <= reached:
            _, future = self._waiters.popleft()
            if not future.done():
                future.set_result(None)
