"""A client that leaves stops costing anything: streams, whole replies, queued and prefilling
requests.

The server runs with production's flags; aiohttp's own test server would turn cancellation on by
itself and hide a missing flag.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.server.serving import Site, chat, reply, serving

CHAT = "/v1/chat/completions"
LONG = reply("x" * 500)


@asynccontextmanager
async def sent(site: Site, body: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """Send a chat over a bare socket, which the block's end closes hard."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(head.encode() + data)
    try:
        yield reader
    finally:
        writer.transport.abort()


async def expect_gone(site: Site, num_left: int = 1) -> None:
    """After the streams were closed, at most the steps in flight pass before everything is free."""
    for _ in range(num_left):
        await site.engine.left.get()
    steps = site.engine.statistics().steps
    site.runner.open()
    if site.engine.statistics().running:
        await site.idle()
    statistics = site.engine.statistics()
    assert statistics.steps <= steps + 1
    assert statistics.aborted == num_left
    assert (statistics.running, statistics.waiting, statistics.pages.in_use) == (0, 0, 0)
    status, body = await site.post(CHAT, chat(max_tokens=2))
    assert (status, body["usage"]["completion_tokens"]) == (200, 2)


def test_client_leaves_stream_after_first_token() -> None:
    """H02 (a): decoding goes on to max_tokens after the client left; pages stay taken."""

    async def main() -> None:
        async with serving(LONG) as site:
            site.runner.is_open.clear()
            async with sent(site, chat(stream=True)) as reader:
                await reader.readuntil(b'"role":"assistant"')
                site.runner.permits.release()
                await reader.readuntil(b'"content":"x"')
            await expect_gone(site)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_client_leaves_during_decode(stream: bool) -> None:
    """H02 (b): the same without a stream, where nothing is ever written that could fail."""

    async def main() -> None:
        async with serving(LONG) as site:
            site.runner.is_open.clear()
            async with sent(site, chat(stream=stream)):
                await site.engine.came.get()
                site.runner.permits.release()
                await anext(site.engine.steps())
            await expect_gone(site)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_client_leaves_while_queued(stream: bool) -> None:
    """H02 (c): a request that still waits must leave the queue and not be computed later."""

    async def main() -> None:
        async with serving(LONG, max_running=1) as site:
            site.runner.is_open.clear()
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(site.post(CHAT, chat(max_tokens=4)))
                first = await site.engine.came.get()
                async with sent(site, chat(stream=stream)):
                    second = await site.engine.came.get()
                    assert site.engine.statistics().waiting >= 1
                assert await site.engine.left.get() == second
                assert site.engine.statistics().waiting == 0
                site.runner.open()
            assert running.result()[1]["usage"]["completion_tokens"] == 4
            assert await site.engine.left.get() == first
            assert site.engine.statistics().aborted == 1
            assert site.engine.statistics().pages.in_use == 0

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_client_leaves_during_chunked_prefill(stream: bool) -> None:
    """H02 (d): the rest of a long prompt must not be computed for nobody."""

    async def main() -> None:
        async with serving(LONG, max_prefill_tokens=64) as site:
            site.runner.is_open.clear()
            async with sent(site, chat("y" * 1000, stream=stream)):
                await site.engine.came.get()
                site.runner.permits.release()
                await anext(site.engine.steps())
                assert site.engine.statistics().decode_tokens == 0
            await expect_gone(site)

    asyncio.run(main())


def test_client_leaves_and_server_aborts_too() -> None:
    """H02 (e): disconnect and abort together: one abort is counted, nothing is raised."""

    async def main() -> None:
        async with serving(LONG) as site:
            site.runner.is_open.clear()
            async with sent(site, chat(stream=True)) as reader:
                await reader.readuntil(b'"role":"assistant"')
                request_id = await site.engine.came.get()
                assert site.engine.abort(request_id)
                assert not site.engine.abort(request_id)
            await expect_gone(site)
            assert not site.engine.abort(request_id)

    asyncio.run(main())


def test_client_leaves_all_choices_end() -> None:
    """Catches choices of one call that go on when their client has left."""

    async def main() -> None:
        async with serving(LONG) as site:
            site.runner.is_open.clear()
            async with sent(site, chat(stream=True, n=4)):
                for _ in range(4):
                    await site.engine.came.get()
            await expect_gone(site, num_left=4)

    asyncio.run(main())


def test_client_leaves_neighbour_goes_on() -> None:
    """Catches an abort that takes a neighbour's stream with it."""

    async def main() -> None:
        async with serving(LONG) as site:
            site.runner.is_open.clear()
            async with asyncio.TaskGroup() as tasks:
                stays = tasks.create_task(site.post(CHAT, chat()))
                await site.engine.came.get()
                async with sent(site, chat(stream=True)):
                    gone = await site.engine.came.get()
                assert await site.engine.left.get() == gone
                site.runner.open()
            assert stays.result()[1]["choices"][0]["message"]["content"] == "x" * 500

    asyncio.run(main())


def test_client_leaves_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Catches an error log for every client that presses Esc."""

    async def main() -> None:
        async with serving(LONG) as site:
            async with sent(site, chat(stream=True)) as reader:
                await reader.readuntil(b'"content":"x"')
            await site.engine.left.get()

    asyncio.run(main())
    assert [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")] == []
