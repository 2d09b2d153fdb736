"""Per-slot token counts and the changes of logits that need them: repetition, presence and
frequency penalties, and logit bias.

Token ids and tensors only. The tables stay on the device and are made when the first request with a
penalty starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.errors import RequestError
from freetoken.types import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class RowSettings:
    """SamplingParams as one row of a step needs them, made once a request."""

    temperature: float
    """0 if greedy."""
    top_k: int
    """0 keeps all; never more than the vocabulary."""
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float
    has_penalties: bool
    bias_ids: Tensor | None
    """[n] int64, on the device; None without a bias."""
    bias: Tensor | None
    """[n] float32."""
    logprobs: int | None

    @classmethod
    def of(cls, params: SamplingParams, vocab: int, device: torch.device) -> RowSettings:
        """Translate checked settings. Raises RequestError if a biased token is not in the
        vocabulary.
        """
        for token in params.logit_bias:
            if not 0 <= token < vocab:
                raise RequestError(
                    f"expected token ids from 0 to {vocab - 1}, got {token}; remove it",
                    param=f"logit_bias.{token}",
                )
        bias_ids = bias = None
        if params.logit_bias:
            bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
            bias = torch.tensor(
                list(params.logit_bias.values()), dtype=torch.float32, device=device
            )
        return cls(
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=params.top_k if 0 < params.top_k < vocab else 0,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            has_penalties=params.has_penalties,
            bias_ids=bias_ids,
            bias=bias,
            logprobs=None if params.logprobs is None else min(params.logprobs, vocab),
        )


class TokenCounts:
    """Owns the counts of every slot; the runner's thread is the only writer."""

    def __init__(self, num_slots: int, vocab: int, device: torch.device) -> None:
        self._shape = (num_slots, vocab)
        self._device = device
        self._outputs: Tensor | None = None
        """[slots, vocab] int32: how often each token was generated."""
        self._seen: dict[int, Tensor] = {}
        """Per slot the tokens of prompt and output, [capacity] int64; some may stand there twice.
        """
        self._num_seen: dict[int, int] = {}

    def start(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Begin a sequence in a slot with the tokens it has so far."""
        if self._outputs is None:
            self._outputs = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        counts, ids = self._outputs[slot].zero_(), self._ids(output)
        counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        known = sorted({*prompt, *output})
        self._seen[slot] = self._ids(known)
        self._num_seen[slot] = len(known)

    def add(self, slots: Sequence[int], ids: Tensor) -> None:
        """Count one generated token for each of some different slots. ids [len(slots)] int64."""
        assert self._outputs is not None
        self._outputs[self._ids(slots), ids] += 1
        for i, slot in enumerate(slots):
            num_seen, seen = self._num_seen[slot], self._seen[slot]
            if num_seen == len(seen):
                self._seen[slot] = seen = torch.cat([seen, seen.new_zeros(num_seen + 64)])
            seen[num_seen] = ids[i]
            self._num_seen[slot] = num_seen + 1

    def penalize(self, logits: Tensor, row: RowSettings, slot: int) -> Tensor:
        """Return the logits [vocab] of a slot's next token with its penalties, as new memory.

        Touches the tokens seen and no others; one that stands there twice is written twice with the
        same value.
        """
        assert self._outputs is not None
        ids = self._seen[slot][: self._num_seen[slot]]
        x, counts = logits[ids], self._outputs[slot][ids]
        x = torch.where(x > 0, x / row.repetition, x * row.repetition)
        x = x - row.presence * (counts > 0) - row.frequency * counts
        return logits.index_copy(0, ids, x)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64, device=self._device)
