"""The smallest client of our own API: one greedy streamed chat. Uses nothing that an outside client
could not use.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec

from freetoken.errors import DeviceError, RequestError
from freetoken.server.sse import DONE

_CONNECT_S = 10
_DATA = b"data: "


async def stream_chat(base_url: str, prompt: str, *, max_tokens: int) -> AsyncGenerator[str, None]:
    """Yield the answer's text as it arrives.

    Raises RequestError if the server refuses the chat, DeviceError if the stream breaks off.
    """
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
    }
    url = f"{base_url}/v1/chat/completions"
    # No limit on the whole: a long prefill is no error.
    limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=limits) as session,
            session.post(url, data=msgspec.json.encode(body)) as response,
        ):
            if response.status != 200:
                raise RequestError(
                    f"expected an answer, got {response.status}: {await response.text()}"
                )
            async for line in response.content:
                if line.rstrip() == DONE.rstrip():
                    return
                if line.startswith(_DATA) and (text := _text(line.removeprefix(_DATA))):
                    yield text
    except aiohttp.ClientError as error:
        raise DeviceError(
            f"expected an answer from {url}, got a broken connection: {error}"
        ) from error
    raise DeviceError(
        f"expected an answer that ends with [DONE], got its beginning only, from {url}"
    )


def _text(payload: bytes) -> str:
    chunk: dict[str, Any] = msgspec.json.decode(payload)
    if "error" in chunk:
        raise DeviceError(f"the server ended the answer: {chunk['error']['message']}")
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
