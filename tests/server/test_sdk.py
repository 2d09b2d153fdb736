"""The official openai client as an outside judge, and our own small client."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai import AsyncOpenAI

from freetoken.errors import DeviceError, RequestError
from freetoken.server.client import stream_chat
from tests.server.serving import MODEL, Site, reply, serving


def client(site: Site) -> AsyncOpenAI:
    """A client as users make it."""
    return AsyncOpenAI(base_url=f"{site.url}/v1", api_key="any", max_retries=0)


def test_openai_client_chat_stream_completions_models() -> None:
    """Catches any shape that the official SDK cannot parse."""

    async def main() -> None:
        async with serving(reply("Paris is the answer.")) as site, client(site) as sdk:
            ask = [{"role": "user", "content": "Where?"}]
            whole = await sdk.chat.completions.create(model=MODEL, messages=ask, logprobs=True)
            assert whole.choices[0].message.content == "Paris is the answer."
            assert whole.usage
            assert whole.usage.prompt_tokens_details
            assert whole.choices[0].logprobs
            stream = await sdk.chat.completions.create(
                model=MODEL, messages=ask, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == "Paris is the answer."
            assert chunks[-1].usage
            async with sdk.chat.completions.stream(model=MODEL, messages=ask) as helper:
                final = await helper.get_final_completion()
            assert final.choices[0].message.content == text
            done = await sdk.completions.create(model=MODEL, prompt="Where?", logprobs=1)
            assert done.choices[0].text == "Paris is the ans"
            parts = [
                p async for p in await sdk.completions.create(model=MODEL, prompt="x", stream=True)
            ]
            assert "".join(p.choices[0].text for p in parts) == "Paris is the ans"
            assert [m.id async for m in sdk.models.list()] == [MODEL]
            assert (await sdk.models.retrieve(MODEL)).id == MODEL

    asyncio.run(main())


def test_openai_client_raises_its_own_error_classes() -> None:
    """Catches statuses or bodies that clients cannot tell apart."""

    async def main() -> None:
        async with serving(reply("x", finish="error"), context=64) as site, client(site) as sdk:
            ask = [{"role": "user", "content": "Hi"}]
            create = sdk.chat.completions.create
            with pytest.raises(openai.BadRequestError) as bad:
                await create(model=MODEL, messages=ask, temperature=9)
            assert bad.value.param == "temperature"
            with pytest.raises(openai.NotFoundError) as unknown:
                await create(model="other", messages=ask)
            assert unknown.value.code == "model_not_found"
            long = [{"role": "user", "content": "x" * 99}]
            with pytest.raises(openai.BadRequestError) as full:
                await create(model=MODEL, messages=long, stream=True)
            assert full.value.code == "context_length_exceeded"
            with pytest.raises(openai.APIError, match="error"):
                async for _ in await create(model=MODEL, messages=ask, stream=True):
                    pass

    asyncio.run(main())


def test_own_client_streams_a_chat_greedily() -> None:
    """Catches a first chat that shows nothing."""

    async def main() -> None:
        async with serving(reply("Paris.")) as site:
            texts = [text async for text in stream_chat(site.url, "Where?", max_tokens=9)]
            assert site.engine.params[0].temperature == 0
        assert "".join(texts) == "Paris."

    asyncio.run(main())


def test_own_client_raises_on_refusal_and_on_broken_stream() -> None:
    """Catches a failed chat that looks like an empty answer."""

    async def main() -> None:
        async with serving(reply("Pa", finish="error")) as site:
            with pytest.raises(DeviceError, match="ended the answer"):
                async for _ in stream_chat(site.url, "Where?", max_tokens=9):
                    pass
            with pytest.raises(RequestError, match="400"):
                async for _ in stream_chat(site.url, "Where?", max_tokens=0):
                    pass
        with pytest.raises(DeviceError, match="broken connection"):
            async for _ in stream_chat(site.url, "Where?", max_tokens=9):
                pass

    asyncio.run(main())
