"""Does a served model keep its promises: `python -m bench.acceptance [--url URL] [--json FILE]`.

Asks as outside clients do (curl, the official openai client, sockets that break off) and prints one
table of checks. Without --url it starts a server of its own. Exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import uvloop

from bench.report import machine
from bench.serve import prose, server

NUM_CHATS, NUM_TURNS = 8, 3
LEAVE_S = 1.5
"""Seconds after which a client goes: long enough to be computed for, far shorter than the reply."""

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Check:
    """One promise and what was found."""

    name: str
    is_kept: bool
    figure: str


@dataclass
class Site:
    """A served model and the clients that ask it."""

    url: str
    session: aiohttp.ClientSession
    sdk: openai.AsyncOpenAI

    async def get(self, path: str) -> dict[str, Any]:
        """Return a route's JSON."""
        async with self.session.get(self.url + path) as response:
            return msgspec.json.decode(await response.read())

    async def post(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and JSON of one chat."""
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            return response.status, msgspec.json.decode(await response.read())

    async def idle(self) -> dict[str, Any]:
        """Return the statistics once nothing runs; RuntimeError after a minute."""
        for _ in range(600):
            stats = await self.get("/v1/stats")
            if not stats["running"] and not stats["waiting"] and not stats["steps_in_flight"]:
                return stats
            await asyncio.sleep(0.1)
        raise RuntimeError(f"expected an idle server within a minute, got {stats}")


async def curl_checks(site: Site) -> list[Check]:
    """The README's own command, whole and streamed."""
    checks: list[Check] = []
    for is_stream in (False, True):
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 12, "stream": is_stream}
        process = await asyncio.create_subprocess_exec(
            "curl", "-sS", f"{site.url}/v1/chat/completions", "-H",
            "Content-Type: application/json", "-d", msgspec.json.encode(body).decode(),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out = (await process.communicate())[0]
        is_whole = out.endswith(b"data: [DONE]\n\n") if is_stream else b'"usage"' in out
        is_kept = process.returncode == 0 and is_whole and b"Paris" in out
        name = f"curl, stream {str(is_stream).lower()}: says Paris"
        checks.append(Check(name, is_kept, f"{len(out)} bytes"))
    return checks


async def sdk_checks(site: Site) -> list[Check]:
    """Chat, stream, completions and models through the official openai client."""
    sdk, greedy = site.sdk, {"model": "default", "temperature": 0, "max_tokens": 16}
    chat = sdk.chat.completions.create
    whole = await chat(messages=QUESTION, **greedy)
    text = whole.choices[0].message.content or ""
    stream = await chat(
        messages=QUESTION, stream=True, stream_options={"include_usage": True}, **greedy
    )
    chunks = [chunk async for chunk in stream]
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    usage = chunks[-1].usage
    same_usage = usage is not None and whole.usage is not None
    same_usage = same_usage and usage.total_tokens == whole.usage.total_tokens
    raw = await sdk.completions.create(prompt="The capital of France is", **greedy)
    parts = [
        part.choices[0].text
        async for part in await sdk.completions.create(
            prompt="The capital of France is", stream=True, **greedy
        )
    ]
    models = [model async for model in sdk.models.list()]
    one = await sdk.models.retrieve(models[0].id)
    return [
        Check("openai client: chat says Paris", "Paris" in text, repr(text)),
        Check("openai client: stream equals chat", streamed == text, f"{len(chunks)} chunks"),
        Check("openai client: usage of both equal", same_usage, str(usage and usage.total_tokens)),
        Check("openai client: completions", raw.choices[0].text != "", repr(raw.choices[0].text)),
        Check("openai client: its stream equal", "".join(parts) == raw.choices[0].text, ""),
        Check("openai client: models", one.id == models[0].id, models[0].id),
    ]


async def refusals(site: Site) -> list[Check]:
    """Wrong requests: status, name of the field, and how soon."""
    context = (await site.get("/v1/models"))["data"][0]["context_length"]
    long = [{"role": "user", "content": prose(context + 100, 7)}]
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("temperature -3", {"messages": QUESTION, "temperature": -3}, "temperature"),
        ("role pope", {"messages": [{"role": "pope", "content": "x"}]}, "messages[0].role"),
        (f"prompt over {context} tokens", {"messages": long}, "messages"),
    ]
    checks: list[Check] = []
    for name, body, param in cases:
        began = time.perf_counter()
        status, reply = await site.post(body)
        taken_s = time.perf_counter() - began
        error = reply.get("error", {})
        is_kept = status == 400 and error.get("param") == param and taken_s < 1.0
        if param == "messages":
            is_kept = is_kept and error["code"] == "context_length_exceeded"
            is_kept = is_kept and str(context) in error["message"]
        checks.append(Check(f"{name}: 400 naming {param}", is_kept, f"{1e3 * taken_s:.0f} ms"))
    return checks


async def leaving_clients(site: Site) -> list[Check]:
    """A client that goes during a long prefill, and one that goes during its answer."""
    context = (await site.get("/v1/models"))["data"][0]["context_length"]
    long = [{"role": "user", "content": prose(context // 2, 8)}]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("prefill, not streamed", {"messages": long, "max_tokens": 4}),
        ("prefill, streamed", {"messages": long, "max_tokens": 4, "stream": True}),
        ("answer, streamed", {"messages": QUESTION, "stream": True, "ignore_eos": True}),
    ]
    checks: list[Check] = []
    for name, body in cases:
        before = await site.idle()
        await _ask_and_leave(site, body)
        at_leave = await site.get("/v1/stats")
        after = await site.idle()
        steps = after["steps"] - at_leave["steps"]
        is_kept = after["aborted"] == before["aborted"] + 1 and steps <= 1
        is_kept = is_kept and after["pages"]["in_use"] == 0
        checks.append(Check(f"client leaves in {name}", is_kept, f"{steps} steps launched after"))
    return checks


async def _ask_and_leave(site: Site, body: dict[str, Any]) -> None:
    """Close the connection once the request is being computed and has had a second."""
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(LEAVE_S),
            site.session.post(f"{site.url}/v1/chat/completions", json=body) as response,
        ):
            async for _ in response.content:
                pass


@dataclass
class Turn:
    """One answer of one chat."""

    text: str
    cached_tokens: int
    prompt_tokens: int


async def eight_chats(site: Site, max_tokens: int) -> list[Check]:
    """Chats side by side that share a system prompt, then each alone: same texts, rising reuse."""
    salt = time.time_ns()  # a server that has run before must not have this prompt cached
    system = f"You answer in short sentences. {salt} {prose(60, 5)}."
    await site.idle()
    together = await asyncio.gather(
        *(_chat(site, system, number, max_tokens) for number in range(NUM_CHATS))
    )
    pages = (await site.idle())["pages"]
    alone = [await _chat(site, system, number, max_tokens) for number in range(NUM_CHATS)]
    texts = [[turn.text for turn in chat] for chat in together]
    equal = sum(a == [turn.text for turn in b] for a, b in zip(texts, alone, strict=True))
    rising = sum(_is_rising([turn.cached_tokens for turn in chat]) for chat in together)
    by_turn = [
        f"{sum(chat[i].cached_tokens for chat in together)}"
        f" of {sum(chat[i].prompt_tokens for chat in together)}"
        for i in range(NUM_TURNS)
    ]
    different = len({tuple(chat) for chat in texts})
    is_all_back = pages["in_use"] == 0 and pages["free"] + pages["cached"] == pages["capacity"]
    state = f"{pages['free']} free, {pages['cached']} cached, {pages['in_use']} in use"
    return [
        Check(
            f"{NUM_CHATS} chats at once: each text equals its text alone",
            equal == NUM_CHATS,
            f"{equal} of {NUM_CHATS}, {different} different",
        ),
        Check("cached tokens grow by turn", rising == NUM_CHATS, ", ".join(by_turn)),
        Check("afterwards every page is free or cached", is_all_back, state),
    ]


async def _chat(site: Site, system: str, number: int, max_tokens: int) -> list[Turn]:
    messages: list[Any] = [{"role": "system", "content": system}]
    turns: list[Turn] = []
    for i in range(NUM_TURNS):
        words = prose(12, 100 * number + i)
        messages.append({"role": "user", "content": f"Turn {i}: tell me about {words}"})
        reply = await site.sdk.chat.completions.create(
            model="default", messages=messages, temperature=0, max_tokens=max_tokens
        )
        text = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        usage = reply.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        turns.append(Turn(text, cached, usage.prompt_tokens))
    return turns


def _is_rising(numbers: list[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


async def lag_check(site: Site) -> list[Check]:
    """Lateness of the server's loop over all of the above (its last minute)."""
    lag = (await site.get("/v1/stats"))["loop_lag"]
    figure = f"p50 {lag['p50_ms']:.2f} ms, p99 {lag['p99_ms']:.2f} ms, max {lag['max_ms']:.1f} ms"
    return [Check("loop lag p99 under 5 ms while decoding", lag["p99_ms"] < 5.0, figure)]


async def measure(options: argparse.Namespace) -> int:
    """Run every check, print the table as it grows, return the exit status."""
    facts = ", ".join(f"{name} {value}" for name, value in machine().items())
    print(f"acceptance: {facts}")
    checks: list[Check] = []
    async with AsyncExitStack() as stack:
        url = options.url
        if url is None:
            url = await stack.enter_async_context(server("--model", options.model))
        timeout = aiohttp.ClientTimeout(total=None)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        site = Site(url, session, await stack.enter_async_context(sdk))
        for part in (
            curl_checks(site),
            sdk_checks(site),
            refusals(site),
            eight_chats(site, options.tokens),
            lag_check(site),
            leaving_clients(site),
        ):
            found = await part
            for check in found:
                verdict = "pass" if check.is_kept else "FAIL"
                print(f"  {verdict}  {check.name:<56}  {check.figure}", flush=True)
            checks += found
    num_broken = sum(not check.is_kept for check in checks)
    print(f"{len(checks) - num_broken} of {len(checks)} pass")
    if options.json is not None:
        document = {"title": "acceptance", "facts": machine(), "checks": checks}
        options.json.write_bytes(msgspec.json.encode(document))
    return 1 if num_broken else 0


def main() -> int:
    """Read the command line and check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a server that runs; default: start one")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each chat answer")
    parser.add_argument("--json", type=Path)
    return uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
