"""A runner that replays scripted token ids under the real scheduler, pages and step loop.

Everything above the runner is the real thing: limits, stop tokens, aborts, page accounting and
statistics behave as with a model, which is what makes it worth testing a client against.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from freetoken.device.completion import Completion
from freetoken.engine.request import Chunk, Sampled, Sequence, StepResult
from freetoken.types import TokenLogprob

_WAIT_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """What one request is answered. `delay_s` is the time of each step that holds it, prefill steps
    too.
    """

    ids: tuple[int, ...]
    tokens_per_step: int = 1
    delay_s: float = 0.0
    finish: Literal["stop", "length", "error"] = "stop"


@dataclass(slots=True)
class _Playing:
    reply: ScriptedReply
    position: int = 0


@dataclass(slots=True)
class _Launched:
    chunks: Seq[Chunk]
    delay_s: float
    playing: list[_Playing] = field(default_factory=list[_Playing])


class ScriptRunner:
    """Replies are taken in the order in which sequences are first computed; the last one repeats.

    A request with ignore_eos gets its reply over and over until max_tokens. Must be made inside the
    running loop.
    """

    def __init__(self, replies: Seq[ScriptedReply]) -> None:
        assert replies
        self._replies = replies
        self._num_taken = 0
        self._playing: dict[Sequence, _Playing] = {}
        self._steps: dict[int, _Launched] = {}
        self._completion = Completion()
        self._ready_at = 0.0
        self._num_done = 0

    @property
    def depth(self) -> int:
        """2 as on a device; 1 if a step may yield several tokens, since the next step then depends
        on how many.
        """
        return 2 if all(r.tokens_per_step == 1 for r in self._replies) else 1

    def warm(self, max_prefill_tokens: int) -> None:
        """Nothing is slow the first time."""

    def launch(self, number: int, chunks: Seq[Chunk]) -> None:
        playing = [self._play(chunk.sequence) for chunk in chunks]
        delay_s = max(p.reply.delay_s for p in playing)
        self._steps[number] = _Launched(chunks, delay_s, playing)
        loop = asyncio.get_running_loop()
        self._ready_at = max(self._ready_at, loop.time()) + delay_s
        # A step without delay still ends after the delayed one before it.
        if self._ready_at > loop.time():
            loop.call_at(self._ready_at, self._signal, number)
        else:
            self._signal(number)

    async def wait(self, number: int) -> StepResult:
        await self._completion.wait(number, _WAIT_LIMIT_S)
        step = self._steps.pop(number)
        sampled = [self._sample(c, p) for c, p in zip(step.chunks, step.playing, strict=True)]
        return StepResult(sampled, step.delay_s)

    async def close(self) -> None:
        self._completion.close()

    def _signal(self, number: int) -> None:
        # Timers of one moment fire in any order; a completion's number must not fall.
        self._num_done = max(self._num_done, number)
        self._completion.signal(self._num_done)

    def _play(self, sequence: Sequence) -> _Playing:
        for ended in [s for s in self._playing if s.finish is not None]:
            del self._playing[ended]
        playing = self._playing.get(sequence)
        if playing is None:
            reply = self._replies[min(self._num_taken, len(self._replies) - 1)]
            self._num_taken += 1
            playing = self._playing[sequence] = _Playing(reply)
        return playing

    def _sample(self, chunk: Chunk, playing: _Playing) -> Sampled:
        sequence, reply = chunk.sequence, playing.reply
        if sequence.finish is not None:
            return Sampled([], skipped=True)
        if not chunk.samples:
            return Sampled([])
        ids = list(reply.ids[playing.position : playing.position + reply.tokens_per_step])
        playing.position += len(ids)
        finish = None
        if playing.position >= len(reply.ids):
            if sequence.params.ignore_eos and reply.ids:
                playing.position = 0
            else:
                finish = reply.finish
        logprobs = (
            [TokenLogprob(t, 0.0, ((t, 0.0),)) for t in ids]
            if sequence.params.logprobs is not None
            else None
        )
        return Sampled(ids, logprobs, finish)
