"""The engine's boundary: token ids in, token ids out, inside the caller's own event loop. No text,
no HTTP, no torch.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from freetoken.engine.loop import Pace, StepLoop
from freetoken.engine.outbox import Outbox
from freetoken.engine.request import Sequence
from freetoken.engine.runner import Runner
from freetoken.engine.scheduler import Scheduler
from freetoken.errors import CapacityError, ContextTooLong, DeviceError, NotReady, RequestError
from freetoken.kvcache.pages import PageCache
from freetoken.types import EngineStatistics, Ids, ModelCard, SamplingParams, StepHook, TokenChunk


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Plain values that shape an engine."""

    num_pages: int
    page_tokens: int
    max_running: int = 8
    max_queue: int = 256
    """Requests that may wait; one more is answered 429."""
    max_prefill_tokens: int = 512
    """Prompt tokens of one step. Half: more steps, worse matrix shapes. Double: a client that
    leaves costs twice as long.
    """
    gap_s: float = 0.25
    """Longest pause of a running stream that somebody else's prompt may cause."""
    reuse: bool = True


class AsyncEngine:
    """Owns requests, scheduler and step loop. One instance a model; use from the loop that runs
    `run`.
    """

    def __init__(self, card: ModelCard, runner: Runner, limits: EngineLimits) -> None:
        self.card = card
        self.fault: BaseException | None = None
        self._limits = limits
        self._runner = runner
        pages = PageCache(limits.num_pages, limits.page_tokens, reuse=limits.reuse)
        self._scheduler = Scheduler(pages, limits.page_tokens, limits.max_running, card.eos_ids)
        self._loop = StepLoop(
            self._scheduler, runner, Pace(limits.max_prefill_tokens, limits.gap_s), self._deliver
        )
        self._live: dict[str, tuple[Sequence, Outbox]] = {}
        self._is_closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def run(self) -> None:
        """Drive the engine until cancelled; one task of the caller's group. A fault ends every
        request, then is raised.
        """
        try:
            await self._loop.run()
        except BaseException as error:
            self._fail_all(error)
            raise

    def warm(self) -> None:
        """Compile and touch what the first request would wait for. Blocks; before `run`."""
        self._runner.warm(self._limits.max_prefill_tokens)

    async def close(self) -> None:
        """Free the runner, after `run` has ended. Whoever made the engine calls it once."""
        if self.fault is None:
            self._fail_all(asyncio.CancelledError())  # `run` was cancelled before its first turn
        await self._runner.close()

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        """Raise RequestError or CapacityError if such a request cannot be taken now. Plain and
        cheap.
        """
        if isinstance(self.fault, NotReady):
            raise NotReady(str(self.fault), retry_after_s=5)
        if self.fault is not None:
            raise DeviceError(f"the engine stopped after a fault: {self.fault}; restart the server")
        if self._is_closing:
            raise NotReady("the server is closing and takes no new requests", retry_after_s=5)
        if prompt_tokens < 1:
            raise RequestError(
                "expected at least 1 prompt token, got none", param="prompt", code="empty_prompt"
            )
        if prompt_tokens >= self.card.context:
            raise ContextTooLong(prompt_tokens, self.card.context)
        if params.max_tokens is not None and params.max_tokens < 1:
            raise RequestError(
                f"expected max_tokens of at least 1, got {params.max_tokens}", param="max_tokens"
            )
        for token in (*params.logit_bias, *params.stop_token_ids):
            if not 0 <= token < self.card.vocab:
                param = "logit_bias" if token in params.logit_bias else "stop_token_ids"
                raise RequestError(
                    f"expected token ids from 0 to {self.card.vocab - 1}, got {token}", param=param
                )
        if len(self._live) >= self._limits.max_running + self._limits.max_queue:
            raise CapacityError(
                f"the queue is full: {len(self._live)} requests are here and"
                f" {self._limits.max_running} run at a time; send it again later",
                retry_after_s=2,
            )

    async def generate(
        self, prompt: Ids, params: SamplingParams, *, request_id: str
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield chunks of one sequence as steps end. See TokenEngine. `request_id` must not be one
        that still runs.
        """
        self.check(len(prompt), params)
        self._check_ids(prompt, request_id)
        outbox = Outbox()
        sequence = self._admit(list(prompt), params, request_id, outbox)
        try:
            while True:
                chunk = await outbox.get()
                if chunk.finish == "error":
                    raise DeviceError(f"the reply of request {request_id!r} ended with an error")
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._drop(sequence)

    def abort(self, request_id: str) -> bool:
        """Mark a request as unwanted. Its consumer gets a last chunk with finish "abort"; its pages
        return after the step in flight.
        """
        entry = self._live.get(request_id)
        if entry is None or entry[0].finish is not None:
            return False
        sequence, outbox = entry
        self._scheduler.abort(sequence)
        outbox.put_nowait(TokenChunk([], finish="abort"))
        self._loop.wake()
        return True

    def statistics(self) -> EngineStatistics:
        """One frozen picture of the counters and of the state now."""
        scheduler, loop, counters = self._scheduler, self._loop, self._scheduler.counters
        return EngineStatistics(
            steps=loop.steps,
            steps_in_flight=loop.steps_in_flight,
            requests=counters.requests,
            finished=counters.finished,
            aborted=counters.aborted,
            failed=counters.failed,
            preempted=counters.preempted,
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=counters.decode_tokens,
            prefill_s=loop.prefill_s,
            decode_s=loop.decode_s,
            pages=scheduler.pages.counts(),
        )

    def steps(self) -> AsyncGenerator[int, None]:
        """Await step boundaries: yields the number of each finished step."""
        return self._loop.boundaries()

    def add_hook(self, hook: StepHook) -> None:
        """Await `hook(step)` after every step, before the next one is planned."""
        self._loop.hooks.append(hook)

    async def drain(self, deadline_s: float) -> bool:
        """Refuse new requests and wait for those here; abort what is left at the deadline. True if
        none had to be aborted.
        """
        self._is_closing = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            for request_id in list(self._live):
                self.abort(request_id)
            return False
        return True

    def _check_ids(self, prompt: Ids, request_id: str) -> None:
        if request_id in self._live:
            raise RequestError(
                f"expected a new request id, got {request_id!r}, which still runs",
                param="request_id",
            )
        if min(prompt) < 0 or max(prompt) >= self.card.vocab:
            bad = next(t for t in prompt if not 0 <= t < self.card.vocab)
            raise RequestError(
                f"expected token ids from 0 to {self.card.vocab - 1}, got {bad}", param="prompt"
            )

    def _admit(
        self, prompt: list[int], params: SamplingParams, request_id: str, outbox: Outbox
    ) -> Sequence:
        room = self.card.context - len(prompt)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        sequence = Sequence(
            request_id, prompt, len(prompt), replace(params, max_tokens=limit), seed
        )
        self._live[request_id] = (sequence, outbox)
        self._idle.clear()
        self._scheduler.add(sequence)
        self._loop.wake()
        return sequence

    def _deliver(self, sequence: Sequence, chunk: TokenChunk) -> None:
        entry = self._live.get(sequence.request_id)
        if entry is not None and entry[0] is sequence:
            entry[1].put_nowait(chunk)

    def _drop(self, sequence: Sequence) -> None:
        """The consumer is done with a sequence, or gone: forget it, and end it if it still runs."""
        self._scheduler.abort(sequence, "abort" if self.fault is None else "error")
        self._loop.wake()
        del self._live[sequence.request_id]
        if not self._live:
            self._idle.set()

    def _fail_all(self, error: BaseException) -> None:
        is_cancelled = isinstance(error, asyncio.CancelledError)
        self.fault = NotReady("the engine was closed") if is_cancelled else error
        for _, outbox in self._live.values():
            outbox.fail(
                self.fault
                if is_cancelled
                else DeviceError(f"the engine stopped after a fault: {error}")
            )
