"""What flows in a stream besides events: keep-alive comments, and back-pressure of slow readers."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing

import aiohttp

from tests.server.serving import chat, reply, serving

CHAT = "/v1/chat/completions"


def test_keep_alive_comments_flow_before_the_first_token() -> None:
    """Catches proxies and clients giving up during a long prefill."""

    async def main() -> None:
        async with serving(reply("done"), keep_alive_s=0.01) as site:
            site.runner.is_open.clear()
            async with site.session.post(site.url + CHAT, json=chat(stream=True)) as response:
                assert response.status == 200
                first = await response.content.readuntil(b"\n\n")
                assert b'"role":"assistant"' in first
                for _ in range(3):
                    assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
                site.runner.open()
                rest = await response.read()
        assert rest.endswith(b"data: [DONE]\n\n")

    asyncio.run(main())


def test_no_keep_alive_while_tokens_flow() -> None:
    """Catches comments mixed into a running stream."""

    async def main() -> None:
        async with (
            serving(reply("x" * 300), keep_alive_s=5) as site,
            site.session.post(site.url + CHAT, json=chat(stream=True)) as response,
        ):
            assert b"keep-alive" not in await response.read()

    asyncio.run(main())


def test_slow_reader_gets_everything_in_fewer_frames() -> None:
    """Catches text lost or the engine held up when a client reads slowly."""

    async def main() -> None:
        text = "0123456789" * 3000
        async with serving(reply(text), reply("quick"), context=40000, num_pages=4096) as site:
            limits = aiohttp.ClientTimeout(total=15)
            async with (
                aiohttp.ClientSession(timeout=limits, read_bufsize=2**10) as slow,
                slow.post(site.url + CHAT, json=chat(stream=True)) as response,
            ):
                await response.content.readuntil(b"\n\n")
                async with aclosing(site.engine.steps()) as steps:
                    while site.engine.statistics().running:  # not held up by us
                        await anext(steps)
                status, body = await site.post(CHAT, chat())
                assert (status, body["choices"][0]["message"]["content"]) == (200, "quick")
                raw = (await response.read()).decode()
        pieces = re.findall(r'"content":"([^"]*)"', raw)
        assert "".join(pieces) == text
        assert len(pieces) < len(text)

    asyncio.run(main())
