"""One streamed reply: status line, frames, keep-alive comments, an error as last event. Knows no
protocol fields.

Frames reach the socket in the order of `send` calls. Back-pressure is here and nowhere else: `send`
waits while the socket's buffer is full, and what the engine produces meanwhile is joined into one
larger delta.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Reverse proxies of the nginx kind hold streams back unless told so.
    "X-Accel-Buffering": "no",
}


class EventStream:
    """Owns one response. `opening` goes out with the headers, before any other frame."""

    def __init__(self, request: web.Request, keep_alive_s: float, opening: bytes) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._request = request
        self._keep_alive_s = keep_alive_s
        self._opening = opening
        self._time = asyncio.get_running_loop().time
        self._sent_at = self._time()
        self._is_writing = False

    @property
    def is_open(self) -> bool:
        """True once the status line is out: errors can then only be events."""
        return self.response.prepared

    async def open(self) -> None:
        """Send headers and the opening frames, unless that has happened."""
        if not self.response.prepared:
            await self.response.prepare(self._request)
            await self.send(self._opening)

    async def send(self, frames: bytes) -> None:
        """Write whole frames. Raises ConnectionResetError if the client has gone."""
        if not self.response.prepared:
            await self.open()
        self._is_writing = True
        await self.response.write(frames)
        self._is_writing = False
        self._sent_at = self._time()

    async def fail(self, payload: bytes) -> None:
        """Send one last event and end the stream without [DONE], so that clients cannot take it for
        complete.
        """
        await self.send(b"data: " + payload + b"\n\n")
        await self.response.write_eof()

    async def close(self) -> None:
        """End the stream as complete."""
        await self.send(DONE)
        await self.response.write_eof()

    async def keep_alive(self) -> None:
        """Send a comment whenever nothing else was sent for `keep_alive_s`; a task beside the
        senders, until cancelled.
        """
        while True:
            await asyncio.sleep(self._sent_at + self._keep_alive_s - self._time())
            if not self._is_writing and self._time() - self._sent_at >= self._keep_alive_s:
                await self.send(KEEP_ALIVE)
            elif self._is_writing:
                self._sent_at = self._time()
