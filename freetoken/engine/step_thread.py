"""What runners share: one named thread that takes steps in order, and who owns which slot."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass

from freetoken.engine.request import Chunk, Sequence
from freetoken.types import SamplingParams


@dataclass(slots=True)
class SlotStart:
    """A sequence that takes a slot over with a step."""

    slot: int
    params: SamplingParams
    prompt: list[int]
    said: list[int]
    """Tokens generated before: after a preemption."""


@dataclass(slots=True)
class StepWork:
    """One launched step on its way to the thread."""

    number: int
    chunks: Seq[Chunk]
    starts: list[SlotStart]


_Call = tuple[Callable[[], None], Future[None]]


class StepThread:
    """Owns the runner's thread. `run` is called there with each step in order; it never raises."""

    def __init__(self, max_running: int, run: Callable[[StepWork], None]) -> None:
        self._run = run
        self._owners: list[Sequence | None] = [None] * max_running
        self._queue: queue.SimpleQueue[StepWork | _Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="freetoken-runner", daemon=True)
        self._thread.start()

    def put(self, number: int, chunks: Seq[Chunk]) -> None:
        """Hand a planned step over; returns at once. Called from the loop only."""
        starts: list[SlotStart] = []
        for chunk in chunks:
            sequence = chunk.sequence
            if self._owners[sequence.slot] is not sequence:
                self._owners[sequence.slot] = sequence
                prompt = sequence.tokens[: sequence.num_prompt]
                said = sequence.tokens[sequence.num_prompt :]
                starts.append(SlotStart(sequence.slot, sequence.params, prompt, said))
        self._queue.put(StepWork(number, chunks, starts))

    def call(self, work: Callable[[], None]) -> None:
        """Run `work` in the thread and wait for it: libraries keep handles and memory by thread.
        Raises what it raises. Not from the loop.
        """
        done: Future[None] = Future()
        self._queue.put((work, done))
        done.result()

    async def close(self) -> None:
        """End the thread after the steps it was given."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            if isinstance(work, StepWork):
                self._run(work)
                continue
            call, done = work
            try:
                done.set_result(call())
            except Exception as error:  # noqa: BLE001 - the thread's edge: raised again by call()
                done.set_exception(error)
