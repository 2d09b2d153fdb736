"""A streaming client with a clock: time to first token, gaps between tokens, tokens by usage."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

_DATA = b"data: "


@dataclass
class Timing:
    """One streamed reply as its client saw it. Times in seconds."""

    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    gaps_s: list[float] = field(default_factory=list)

    @property
    def decode_tok_per_s(self) -> float:
        return (self.completion_tokens - 1) / max(self.total_s - self.ttft_s, 1e-9)

    @property
    def prefill_tok_per_s(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / max(self.ttft_s, 1e-9)


async def stream_chat(
    session: aiohttp.ClientSession, url: str, text: str, max_tokens: int, **settings: Any
) -> Timing:
    """Stream one chat completion that runs to `max_tokens`. Raises RuntimeError with the server's
    words.
    """
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    } | settings
    began = time.perf_counter()
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(_DATA) and line[6:12] != b"[DONE]":
                event = msgspec.json.decode(line[6:])
                usage = event.get("usage") or usage
                choices = event.get("choices")
                if choices and choices[0]["delta"].get("content"):
                    arrivals.append(time.perf_counter())
    if not arrivals:
        raise RuntimeError("expected text in the stream, got none")
    details = usage.get("prompt_tokens_details") or {}
    return Timing(
        ttft_s=arrivals[0] - began,
        total_s=arrivals[-1] - began,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens", 0),
        completion_tokens=usage["completion_tokens"],
        gaps_s=[b - a for a, b in itertools.pairwise(arrivals)],
    )


async def concurrent_chats(
    session: aiohttp.ClientSession, url: str, texts: list[str], max_tokens: int, **settings: Any
) -> tuple[list[Timing], float]:
    """Stream several chats at once; return their timings and all tokens a second from the first
    token to the last.
    """
    began = time.perf_counter()
    timings = await asyncio.gather(
        *(stream_chat(session, url, text, max_tokens, **settings) for text in texts)
    )
    first = min(t.ttft_s for t in timings)
    tokens = sum(t.completion_tokens for t in timings)
    return list(timings), tokens / max(time.perf_counter() - began - first, 1e-9)


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all lie at or under; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0
