"""Which ids a GPU step takes: the likeliest ones where all rows are greedy, the sampler's
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.engine.penalties import RowSettings
from freetoken.engine.request import Chunk
from freetoken.engine.sampler import Sampler
from freetoken.engine.step_thread import SlotStart
from freetoken.engine.uniform import uniform
from freetoken.types import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Chosen:
    """A step's ids of some rows, still on the device.

    ids       [rows] int64
    is_sound  [rows] bool
    slots     [rows] the slot of each row
    """

    ids: Tensor
    is_sound: Tensor
    slots: list[int]
    logprobs: list[TokenLogprob | None]


class Chooser:
    """Owns sampling settings by slot, and the sampler. Used by the runner thread."""

    def __init__(self, max_running: int, vocab: int, device: torch.device) -> None:
        self._sampler = Sampler(max_running, vocab, device)
        self._settings: dict[int, RowSettings] = {}
        self._vocab = vocab
        self._device = device

    def start(self, start: SlotStart) -> None:
        """A sequence takes a slot over."""
        row = RowSettings.of(start.params, self._vocab, self._device)
        self._settings[start.slot] = row
        self._sampler.start(start.slot, row, start.prompt, start.said)

    def choose(self, chunks: list[Chunk], logits: Tensor, likeliest: Tensor) -> Chosen:
        """Sample each row. Waits for the device only where log-probabilities are wanted.

        logits     [rows, vocab] float32
        likeliest  [rows] int64
        """
        slots = [c.sequence.slot for c in chunks]
        rows = [self._settings[slot] for slot in slots]
        if all(_is_plain_greedy(row) for row in rows):
            is_sound = logits.gather(1, likeliest[:, None])[:, 0].isfinite()
            return Chosen(likeliest, is_sound, slots, [None] * len(rows))
        draws = [uniform(c.sequence.seed, c.start + c.length) for c in chunks]
        staged = torch.tensor(draws, dtype=torch.float64).pin_memory()
        uniforms = staged.to(self._device, non_blocking=True)
        output = self._sampler.sample(logits, rows, slots, uniforms)
        return Chosen(output.ids, output.is_sound, slots, output.token_logprobs(rows))

    def warm(self, logits: Tensor) -> None:
        """Run the sampling kernels once for logits [rows, vocab]."""
        for params in (
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.05),
            SamplingParams(temperature=1.0, top_p=0.9),
        ):
            row = RowSettings.of(params, self._vocab, self._device)
            uniforms = torch.full((1,), 0.5, dtype=torch.float64, device=self._device)
            self._sampler.sample(logits[:1], [row], [0], uniforms)


def _is_plain_greedy(row: RowSettings) -> bool:
    return (
        row.temperature == 0.0
        and not row.has_penalties
        and row.bias is None
        and row.logprobs is None
    )
