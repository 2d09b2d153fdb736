"""Values that cross layers: sampling settings, token chunks, statistics. Plain data: no torch, no
HTTP, no JSON.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Finish = Literal["stop", "length", "abort", "error"]
"""Why a sequence ended: an end token or stop string; its token limit; its client; a fault."""

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence is continued. Ranges are checked at the door (server, embed), not here."""

    max_tokens: int | None = None
    """Most new tokens; None means to the end of the context. The engine clamps it to what is left.
    """
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    """Keep the k likeliest tokens; -1 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """Same seed, prompt and settings give the same tokens whatever else runs. None draws one."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    stop: tuple[str, ...] = ()
    """Stop strings; the text layer cuts at them, the engine never sees text."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log-probabilities. k >= 0: the sampled token's and the k likeliest."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken. Temperatures under 1e-5 are greedy: its
        share is 1 to within fp32 anyway, and logits / temperature may overflow.
        """
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether a token's chance depends on how often it was there before."""
        given = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return given != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities (natural, of the model's own distribution, before any sampling setting) at
    one position.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class TokenChunk:
    """What one step added to one sequence. `finish` is set on the last chunk only, which may carry
    no ids.
    """

    ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: Finish | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused; the same in every chunk of a sequence."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a client may know of the served model."""

    id: str
    context: int
    """Usable tokens, prompt and reply together: the model's limit or the KV capacity, whichever is
    less.
    """
    vocab: int
    eos_ids: frozenset[int]
    created: int = 0
    """Unix seconds."""
    description: str = ""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """KV pages by state; free + cached + in_use == capacity at every moment."""

    capacity: int
    free: int
    cached: int
    """Held by the prefix tree and by nobody else: given up when pages run short."""
    in_use: int
    page_tokens: int


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counters since start and the state now, as one frozen picture."""

    steps: int = 0
    steps_in_flight: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    preempted: int = 0
    waiting: int = 0
    running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    pages: PageCounts = PageCounts(0, 0, 0, 0, 0)


Phase = Literal["starting", "loading", "ok", "error"]


@dataclass(slots=True)
class Progress:
    """Where a start stands. One writer (the loader); `/health` and progress bars read it."""

    phase: Phase = "starting"
    step: str = ""
    """What is being done now, for a person."""
    done_bytes: int = 0
    total_bytes: int = 0
    error: str = ""


class TokenEngine(Protocol):
    """The engine as everything above it sees it: token ids in, token ids out, inside the caller's
    loop.
    """

    @property
    def card(self) -> ModelCard: ...

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        """Raise RequestError (ContextTooLong) or CapacityError if such a request cannot be taken
        now.
        """
        ...

    def generate(
        self, prompt: Ids, params: SamplingParams, *, request_id: str
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield chunks as steps end. Raises what `check` raises, DeviceError if the engine dies.
        Closing it aborts.
        """
        ...

    def abort(self, request_id: str) -> bool:
        """Mark a request as unwanted; its pages return after the step in flight. False if unknown
        or ended.
        """
        ...

    def statistics(self) -> EngineStatistics: ...

    @property
    def fault(self) -> BaseException | None:
        """What killed the engine, or None while it lives."""
        ...

    async def drain(self, deadline_s: float) -> bool:
        """Refuse new requests, wait for running ones; abort the rest at the deadline. True if all
        ended by themselves.
        """
        ...


StepHook = Callable[[int], Awaitable[None]]
"""A caller's coroutine run between two steps; it gets the step number."""
