"""The server as its clients see it: `python -m bench.serve [--model demo] [--json FILE]`.

Starts a server of its own for the model rows (decode, prefill, time to first token, gaps, loop lag
while decoding) and the fake engine for the overhead row.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import uvloop

from bench.client import concurrent_chats, percentile, stream_chat
from bench.overhead import chunk_overheads
from bench.report import Row, publish

_READY = re.compile(rb"ready to serve on .*:(\d+)")
_WORDS = ("river", "stone", "cloud", "seven", "paper", "light", "garden", "north", "copper")


def prose(num_words: int, seed: int) -> str:
    """Text that no other seed shares a beginning with."""
    draw = random.Random(seed)
    return " ".join(draw.choice(_WORDS) for _ in range(num_words))


@asynccontextmanager
async def server(*flags: str) -> AsyncIterator[str]:
    """Run `ft serve` on a free port; yields its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "freetoken", "serve", "--port", "0", *flags,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        while line := await process.stdout.readline():
            if found := _READY.search(line):
                yield f"http://127.0.0.1:{int(found[1])}"
                return
        raise RuntimeError("expected the ready line of the server, got the end of its output")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def model_rows(url: str, prompts: list[int], max_tokens: int) -> list[Row]:
    """Speed of one stream, of four, and of prompts of several lengths (medians of 3)."""
    rows: list[Row] = []
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await stream_chat(session, url, prose(20, 1), 16, temperature=0)
        singles = [
            await stream_chat(session, url, prose(20, 10 + i), max_tokens, temperature=0)
            for i in range(3)
        ]
        gaps_ms = [1e3 * gap for t in singles for gap in t.gaps_s]
        decode = statistics.median(t.decode_tok_per_s for t in singles)
        rows += [
            Row("decode, 1 stream", decode, "tok/s", f"{max_tokens} tokens, greedy"),
            Row("gap between tokens, p50", percentile(gaps_ms, 0.5), "ms"),
            Row("gap between tokens, p99", percentile(gaps_ms, 0.99), "ms"),
        ]
        texts = [prose(20, 20 + i) for i in range(4)]
        _, total = await concurrent_chats(session, url, texts, max_tokens, temperature=0)
        rows.append(Row("decode, 4 streams, total", total, "tok/s"))
        for words in prompts:
            timings = [
                await stream_chat(session, url, prose(words, 1000 * words + i), 4, temperature=0)
                for i in range(3)
            ]
            tokens = timings[0].prompt_tokens
            ttft_ms = 1e3 * statistics.median(t.ttft_s for t in timings)
            prefill = statistics.median(t.prefill_tok_per_s for t in timings)
            rows += [
                Row(f"time to first token, {tokens} tokens", ttft_ms, "ms"),
                Row(f"prefill, {tokens} tokens", prefill, "tok/s"),
            ]
        async with session.get(f"{url}/v1/stats") as response:
            lag = msgspec.json.decode(await response.read())["loop_lag"]
        rows += [
            Row("loop lag, p50", lag["p50_ms"], "ms", "during all of the above"),
            Row("loop lag, p99", lag["p99_ms"], "ms", "target 5"),
        ]
    return rows


async def overhead_rows(num_chunks: int) -> list[Row]:
    """What the server adds to a chunk of the fake engine."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        text = prose(200, 3)
        context = num_chunks + 1000
        reply = {"context": context, "replies": [{"text": text}]}
        script.write_bytes(msgspec.json.encode(reply))
        taken_us = [1e6 * s for s in await chunk_overheads(str(script), num_chunks)]
    note = f"{len(taken_us)} chunks, fake engine"
    return [
        Row("server overhead a chunk, median", percentile(taken_us, 0.5), "us", note),
        Row("server overhead a chunk, mean", sum(taken_us) / len(taken_us), "us"),
        Row("server overhead a chunk, p99", percentile(taken_us, 0.99), "us", "target median 15"),
    ]


async def measure(options: argparse.Namespace) -> None:
    """Measure what was asked for, then print."""
    rows = [] if options.skip_overhead else await overhead_rows(options.chunks)
    if not options.skip_model:
        async with server("--model", options.model, "--dtype", options.dtype) as url:
            rows += await model_rows(url, options.prompts, options.tokens)
    publish("serve", rows, options.json, model=options.model, dtype=options.dtype)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a decode row")
    parser.add_argument("--prompts", type=int, nargs="*", default=[50, 400, 1500], help="words")
    parser.add_argument("--chunks", type=int, default=20000)
    parser.add_argument("--skip-model", action="store_true")
    parser.add_argument("--skip-overhead", action="store_true")
    parser.add_argument("--json", type=Path)
    uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
