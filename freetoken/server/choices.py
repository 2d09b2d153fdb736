"""The replies of one call: n sequences side by side, streamed or collected. Knows no field of any
protocol.

A choice's task pulls deltas and writes frames itself: nothing is queued here, and when the socket
is full the engine joins what it has meanwhile. Leaving a stream, for whatever reason, closes the
generator, which aborts the sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from freetoken.chat.text_model import TextDelta, TextModel
from freetoken.errors import DeviceError, NotReady
from freetoken.server.sse import EventStream
from freetoken.types import Finish, SamplingParams, TokenLogprob


@dataclass(slots=True)
class Choice:
    """One sequence of a call and what it has produced."""

    index: int
    request_id: str
    """Unique in the engine: the call's id and the index."""
    prompt: list[int]
    params: SamplingParams
    finish: Finish | None = None
    num_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    """Filled by `collect` only."""
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    """Collected: all of them. Streamed: those whose text is still held back."""


class Frames(Protocol):
    """A protocol's way to write deltas as stream frames."""

    def delta(self, choice: Choice, delta: TextDelta) -> bytes:
        """Return the frames of one delta, finish included; empty if nothing is to be sent yet."""
        ...

    def ending(self, choices: Sequence[Choice]) -> bytes:
        """Return what follows the last delta of the last choice."""
        ...


def check_room(model: TextModel, choices: Sequence[Choice]) -> None:
    """Raise what the engine says against any choice, before a status line is sent."""
    for choice in choices:
        model.engine.check(len(choice.prompt), choice.params)


async def collect(model: TextModel, choices: Sequence[Choice]) -> None:
    """Run all choices to their end and fill them in. Raises the first error of any; the others are
    aborted.
    """
    if len(choices) == 1:
        return await _collect_one(model, choices[0])
    async with asyncio.TaskGroup() as group:
        for choice in choices:
            group.create_task(_collect_one(model, choice), name=choice.request_id)
    return None


async def stream(
    model: TextModel, choices: Sequence[Choice], frames: Frames, events: EventStream
) -> None:
    """Run all choices and send their deltas as they come. Raises the first error of any; the others
    are aborted.

    The status line goes out when every choice was admitted, so that a refusal is still a real
    status.
    """
    async with asyncio.TaskGroup() as outer:
        keep_alive = outer.create_task(
            events.keep_alive(), name=f"{choices[0].request_id} keep-alive"
        )
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_stream_one(model, c, frames, events), name=c.request_id)
                for c in choices
            ]
            await asyncio.sleep(0)  # each task runs up to its first wait, which is past admission
            if not any(task.done() and task.exception() for task in tasks):
                await events.open()
        keep_alive.cancel()
    await events.send(frames.ending(choices))
    await events.close()


async def _collect_one(model: TextModel, choice: Choice) -> None:
    parts: list[str] = []
    async with aclosing(
        model.stream(choice.prompt, choice.params, request_id=choice.request_id)
    ) as deltas:
        async for delta in deltas:
            parts.append(delta.text)
            _count(choice, delta)
            if delta.logprobs:
                choice.logprobs += delta.logprobs
    choice.text = "".join(parts)
    _check_ended(choice)


async def _stream_one(
    model: TextModel, choice: Choice, frames: Frames, events: EventStream
) -> None:
    write, send = frames.delta, events.send
    async with aclosing(
        model.stream(choice.prompt, choice.params, request_id=choice.request_id)
    ) as deltas:
        async for delta in deltas:
            _count(choice, delta)
            if data := write(choice, delta):
                await send(data)
    _check_ended(choice)


def _count(choice: Choice, delta: TextDelta) -> None:
    choice.num_tokens += len(delta.ids)
    finish = delta.finish
    if finish is not None:
        choice.finish = finish
        choice.cached_tokens = delta.cached_tokens
        if finish == "abort":
            raise NotReady("the server is closing; the reply was cut off", retry_after_s=5)
        if finish == "error":
            raise DeviceError("the reply ended with an error in the engine")


def _check_ended(choice: Choice) -> None:
    if choice.finish is None:
        raise DeviceError(f"the reply {choice.request_id!r} ended without a reason")
