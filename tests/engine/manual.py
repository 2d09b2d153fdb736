"""A runner whose steps end when the test says so, and a way to open an engine on it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from freetoken.device.completion import Completion
from freetoken.engine.engine import AsyncEngine, EngineLimits
from freetoken.engine.request import Chunk, Sampled, StepResult
from freetoken.engine.runner import Runner
from freetoken.errors import DeviceError
from freetoken.types import ModelCard, SamplingParams, TokenChunk

EOS = 2
VOCAB = 1000


def next_token(tokens_before: int) -> int:
    """The token this model always says at a position: never EOS, different at neighbouring
    positions.
    """
    return 100 + tokens_before % 800


class ManualRunner:
    """Samples `next_token` (or an override by position). Steps end by `finish_step`, or by
    themselves if `is_free`.
    """

    def __init__(
        self, depth: int = 2, *, is_free: bool = False, overrides: dict[int, int] | None = None
    ) -> None:
        self.depth = depth
        self.launched: list[list[Chunk]] = []
        self.seen_tokens: list[list[int]] = []
        self.is_closed = False
        self.failure: DeviceError | None = None
        self._overrides = overrides or {}
        self._is_free = is_free
        self._pending: deque[int] = deque()
        self._completion = Completion()

    def warm(self, max_prefill_tokens: int) -> None:
        """Nothing to warm."""

    def launch(self, number: int, chunks: Sequence[Chunk]) -> None:
        assert number == len(self.launched) + 1
        self.launched.append(list(chunks))
        self.seen_tokens += [list(c.tokens) for c in chunks]
        if self._is_free:
            self._completion.signal(number)
        else:
            self._pending.append(number)

    def finish_step(self) -> None:
        self._completion.signal(self._pending.popleft())

    async def wait(self, number: int) -> StepResult:
        await self._completion.wait(number, 10.0)
        if self.failure is not None:
            raise self.failure
        return StepResult([self._sample(c) for c in self.launched[number - 1]], 0.001)

    async def close(self) -> None:
        self.is_closed = True
        self._completion.close()

    def _sample(self, chunk: Chunk) -> Sampled:
        if chunk.sequence.finish is not None:
            return Sampled([], skipped=True)
        position = chunk.start + chunk.length
        return Sampled(
            [self._overrides.get(position, next_token(position))] if chunk.samples else []
        )


@asynccontextmanager
async def running(
    runner: Runner, *, context: int = 64, pages: int = 16, page_tokens: int = 4, **limits: int
) -> AsyncIterator[AsyncEngine]:
    """An engine whose `run` is a task of a group; at the end it is cancelled and no page may be
    lost.
    """
    card = ModelCard(id="m", context=context, vocab=VOCAB, eos_ids=frozenset({EOS}))
    engine = AsyncEngine(card, runner, EngineLimits(pages, page_tokens, **limits))
    try:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(engine.run(), name="engine")
            try:
                yield engine
            finally:
                task.cancel()
    finally:
        await engine.close()


async def collect(stream: AsyncGenerator[TokenChunk, None]) -> tuple[list[int], str | None, int]:
    """All ids, the finish, and the cached tokens of a stream."""
    ids: list[int] = []
    finish, cached = None, 0
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            ids += chunk.ids
            finish, cached = chunk.finish, chunk.cached_tokens
    return ids, finish, cached


async def said(
    engine: AsyncEngine, prompt: Sequence[int], max_tokens: int, name: str = "r"
) -> list[int]:
    """Ids of one greedy request."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return (await collect(engine.generate(prompt, params, request_id=name)))[0]


def expected(prompt_tokens: int, count: int) -> list[int]:
    """What `next_token` says after a prompt."""
    return [next_token(prompt_tokens + i) for i in range(count)]


async def settle(turns: int = 20) -> None:
    """Let everything that can run without the runner run."""
    for _ in range(turns):
        await asyncio.sleep(0)


def is_all_returned(engine: AsyncEngine) -> bool:
    """Every page is free or cached, and none got lost."""
    counts = engine.statistics().pages
    return counts.in_use == 0 and counts.free + counts.cached == counts.capacity
