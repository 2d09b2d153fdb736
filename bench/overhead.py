"""What the server adds to each streamed chunk, with the fake engine and a client in another
process.

Measured where the engine hands a chunk over: from there until the server asks for the next one lie
detokenizing, stop strings, JSON, the HTTP frame and the write to the socket.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

from freetoken.assembly import assemble
from freetoken.chat.text_model import TextModel
from freetoken.config import load_config
from freetoken.engine.engine import AsyncEngine
from freetoken.server.application import ServerState, build_application, start
from freetoken.types import Ids, Progress, SamplingParams, TokenChunk

_CLIENT = """
import asyncio, aiohttp, sys
async def main():
    url, body = sys.argv[1], sys.argv[2].encode()
    async with aiohttp.ClientSession() as session:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as r:
            n = 0
            async for data in r.content.iter_any():
                n += data.count(b'"content":')
            print(n)
asyncio.run(main())
"""


class TimedEngine(AsyncEngine):
    """An engine that notes how long its consumer took over each chunk. Wraps a running one."""

    def __init__(self, engine: AsyncEngine) -> None:  # the wrapped engine is already complete
        self.card = engine.card
        self.fault = None
        self.engine = engine
        self.taken_s: list[float] = []

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        self.engine.check(prompt_tokens, params)

    async def generate(
        self, prompt: Ids, params: SamplingParams, *, request_id: str
    ) -> AsyncGenerator[TokenChunk, None]:
        clock, taken_s = time.perf_counter, self.taken_s
        stream = self.engine.generate(prompt, params, request_id=request_id)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                began = clock()
                yield chunk
                taken_s.append(clock() - began)


async def chunk_overheads(script: str, num_chunks: int) -> list[float]:
    """Stream one reply of `num_chunks` tokens to a client process; return seconds a chunk."""
    config = load_config({"model.fake": script, "server.port": 0})
    async with AsyncExitStack() as stack:
        assembly = await stack.enter_async_context(assemble(config, Progress(), lambda: False))
        engine = TimedEngine(assembly.engine)
        text = TextModel(engine, assembly.text.tokenizer, assembly.text.template)
        app = build_application(ServerState(Progress("ok"), text), config.server)
        runner, port = await start(app, "127.0.0.1", 0)
        stack.push_async_callback(runner.cleanup)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        steps = tasks.create_task(assembly.engine.run(), name="engine")
        body = (
            '{"model":"default","messages":[{"role":"user","content":"x"}],"stream":true,'
            f'"ignore_eos":true,"max_tokens":{num_chunks}}}'
        )
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CLIENT, url, body, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await client.communicate()
        steps.cancel()
        if int(out) < num_chunks // 2:
            raise RuntimeError(f"expected {num_chunks} chunks at the client, got {out!r}")
    return engine.taken_s
