"""A sequence (one client call's tokens in the engine) and what one step does to it. Token ids only;
no text, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.kvcache.pages import Lease
from freetoken.types import Finish, SamplingParams, TokenLogprob


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence from admission to its last token. The engine's loop is the only writer."""

    request_id: str
    tokens: list[int]
    """Prompt, then every published token."""
    num_prompt: int
    params: SamplingParams
    """With max_tokens set: the engine resolves it before admission."""
    seed: int
    slot: int = -1
    """Row of the runner's per-sequence state; -1 while waiting."""
    lease: Lease | None = None
    prefill_end: int = 0
    """Tokens that count as prefill: the prompt, or after a preemption everything known then."""
    launched: int = 0
    """Positions whose KV a launched step writes. computed <= launched."""
    computed: int = 0
    """Positions whose KV is surely in memory: their step was published."""
    flights: int = 0
    """Launched steps that hold this sequence; its pages may return only at 0."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was found at the first admission; a preemption does not change it."""
    is_restarted: bool = False
    """It was preempted: it finds its own pages in the cache, which are nobody's saving."""
    behind: Sequence | None = None
    """While waiting: a running sequence that computes a beginning of this one's tokens."""
    behind_tokens: int = 0
    """Its tokens that are worth waiting for, in whole pages."""
    finish: Finish | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the neighbour still computes what this one can take over from it."""
        first = self.behind
        return (
            first is not None
            and first.finish is None
            and first.lease is not None
            and first.computed < self.behind_tokens
        )

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt


@dataclass(slots=True)
class Chunk:
    """One sequence's part of one step: positions start .. start + length, at the moment of
    planning.

    The token at `start` may still be in flight (sampled by the step before): then `tokens` is
    empty, length is 1, and the runner takes it from its own state at `slot`.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    tokens: list[int]
    pages: list[int]
    """The page table when the step was planned, in order; covers start + length."""

    @property
    def is_prefill(self) -> bool:
        return self.start < self.sequence.prefill_end


@dataclass(slots=True)
class Sampled:
    """What a step gave one chunk. `skipped`: the sequence had ended before the step ran; nothing
    was computed.
    """

    ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: Finish | None = None
    """Set only by runners that know an end of their own (scripts)."""
    skipped: bool = False


@dataclass(slots=True)
class StepResult:
    """All chunks' results in the step's order, and how long the runner worked on it."""

    sampled: list[Sampled]
    seconds: float
