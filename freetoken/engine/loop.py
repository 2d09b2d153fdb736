"""The coroutine that drives the steps: plan, launch, await, publish, with at most `runner.depth`
steps in flight.

The overlap: step n+1 is planned and launched while step n runs, on the bet that no sequence of n
ends; its input token is taken from the runner's own state. Then n is awaited and published. A
sequence that did end gets its token of n+1 thrown away. This file is the one writer of engine
state; everything it calls on the scheduler is a plain function.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from freetoken.engine.request import Chunk, Sequence
from freetoken.engine.runner import Runner
from freetoken.engine.scheduler import Scheduler
from freetoken.types import StepHook, TokenChunk

Deliver = Callable[[Sequence, TokenChunk], None]


class Pace:
    """How many prompt tokens a step may hold so that a running stream's next token is not late.

    Learns seconds per prompt token from finished steps (exponential mean over about 8 steps).
    """

    def __init__(self, max_prefill_tokens: int, gap_s: float) -> None:
        self._max = max_prefill_tokens
        self._gap_s = gap_s
        self._token_s = 0.0

    def learn(self, prefill_tokens: int, seconds: float) -> None:
        if (
            prefill_tokens >= 16
        ):  # a few tokens' time is the fixed cost of a step, not the price of a token
            token_s = seconds / prefill_tokens
            self._token_s = (
                token_s if self._token_s == 0.0 else 0.875 * self._token_s + 0.125 * token_s
            )

    def budget(self, *, is_decoding: bool) -> int:
        """Prompt tokens for the next step; 64 before the first measurement, never below 16."""
        if not is_decoding:
            return self._max
        if self._token_s == 0.0:
            return min(self._max, 64)
        return max(16, min(self._max, int(self._gap_s / self._token_s)))


class StepLoop:
    """Owns the order of steps. `run` is one task of the caller's group; it ends only by
    cancellation or by a fault.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, pace: Pace, deliver: Deliver) -> None:
        self.hooks: list[StepHook] = []
        self.steps = 0
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self._scheduler = scheduler
        self._runner = runner
        self._pace = pace
        self._deliver = deliver
        self._in_flight: deque[tuple[int, list[Chunk]]] = deque()
        self._work = asyncio.Event()
        self._boundary: asyncio.Future[int | None] | None = None
        self._is_over = False

    def wake(self) -> None:
        """There may be something to plan: a request came or left."""
        self._work.set()

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    async def run(self) -> None:
        """Drive steps until cancelled. Raises what the runner and the hooks raise."""
        try:
            await self._drive()
        finally:
            self._is_over = True
            self._announce(None)

    async def _drive(self) -> None:
        while True:
            while len(self._in_flight) < self._runner.depth and self._launch():
                pass
            if self._in_flight:
                await self._finish_one()
            else:
                self._work.clear()
                await self._work.wait()

    async def boundaries(self) -> AsyncGenerator[int, None]:
        """Yield the number of each finished step, to any number of listeners; a slow one misses
        steps, never delays them. Ends with the steps themselves.
        """
        while not self._is_over:
            if self._boundary is None:
                self._boundary = asyncio.get_running_loop().create_future()
            number = await asyncio.shield(self._boundary)
            if number is not None:
                yield number

    def _launch(self) -> bool:
        budget = self._pace.budget(is_decoding=self._scheduler.is_decoding)
        chunks = self._scheduler.plan(budget)
        if not chunks:
            return False
        self.steps += 1
        self._runner.launch(self.steps, chunks)
        self._in_flight.append((self.steps, chunks))
        return True

    async def _finish_one(self) -> None:
        number, chunks = self._in_flight[0]
        result = await self._runner.wait(number)
        self._in_flight.popleft()
        # A chunk whose client had left cost nothing; its tokens would make all others look cheap.
        computed = zip(chunks, result.sampled, strict=True)
        prefill_tokens = sum(c.length for c, s in computed if c.is_prefill and not s.skipped)
        self._account(prefill_tokens, result.seconds)
        if prefill_tokens:
            self._pace.learn(prefill_tokens, result.seconds)
        for sequence, chunk in self._scheduler.publish(chunks, result.sampled):
            self._deliver(sequence, chunk)
        for hook in self.hooks:
            await hook(number)
        self._announce(number)

    def _announce(self, number: int | None) -> None:
        if self._boundary is not None:
            self._boundary.set_result(number)
            self._boundary = None

    def _account(self, prefill_tokens: int, seconds: float) -> None:
        if prefill_tokens:
            self.prefill_s += seconds
        else:
            self.decode_s += seconds
