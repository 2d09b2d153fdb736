"""What a request has been given and not yet taken: the hand-over from the step loop to one
consumer.
"""

from __future__ import annotations

import asyncio

from freetoken.types import TokenChunk


class Outbox:
    """One producer (the loop, never waits), one consumer. Bounded by the request's own token limit.

    Chunks that the consumer did not take in time are joined, so a slow one gets fewer, larger
    chunks.
    """

    __slots__ = ("_chunk", "_error", "_waiter")

    def __init__(self) -> None:
        self._chunk: TokenChunk | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put_nowait(self, chunk: TokenChunk) -> None:
        held = self._chunk
        if held is None:
            self._chunk = chunk
        else:
            held.ids += chunk.ids
            if chunk.logprobs is not None:
                held.logprobs = (held.logprobs or []) + chunk.logprobs
            held.finish = chunk.finish
        self._wake()

    def fail(self, error: BaseException) -> None:
        """The next `get` after the chunks already here raises `error`."""
        self._error = error
        self._wake()

    async def get(self) -> TokenChunk:
        """Return what has come since the last call, waiting if nothing has."""
        while self._chunk is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        chunk, self._chunk = self._chunk, None
        return chunk

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
