"""Sampling on a GPU: every setting of every row lies in device memory, so that a captured graph can
sample; tables for penalties and bias are kept by slot.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freetoken.engine.request import Chunk
from freetoken.engine.staging import Staging
from freetoken.engine.step_thread import SlotStart
from freetoken.engine.uniform import uniform
from freetoken.kernels.sample_rows import SampleSettings, make_scratch, sample_rows
from freetoken.types import SamplingParams, TokenLogprob

_FIELDS = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float64,
    "min_p": np.float32,
    "uniforms": np.float64,
    "repetition": np.float32,
    "presence": np.float32,
    "frequency": np.float32,
    "slots": np.int32,
    "bias_rows": np.int32,
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """A step's ids of some rows, still on the device.

    ids       [rows] int64
    is_sound  [rows] int8
    slots     [rows] the slot of each row
    """

    ids: Tensor
    is_sound: Tensor
    slots: list[int]
    logprobs: list[TokenLogprob | None]


class ChoiceTables:
    """Owns what sampling remembers by slot, and the kernels' scratch.

    outputs    [slots, vocab] int32  how often each token was generated
    in_prompt  [slots, vocab] bool
    bias       [slots, vocab] float32
    """

    def __init__(self, max_running: int, vocab: int, device: torch.device) -> None:
        self.outputs = torch.zeros(max_running, vocab, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(max_running, vocab, dtype=torch.bool, device=device)
        self.bias = torch.zeros(max_running, vocab, dtype=torch.float32, device=device)
        self.scratch = make_scratch(max_running, vocab, device)
        self.params = [SamplingParams(temperature=0.0)] * max_running
        self.vocab = vocab
        self.device = device

    def start(self, start: SlotStart) -> None:
        """A sequence takes a slot over. Enqueues table writes only if its settings need them."""
        slot, params = start.slot, start.params
        self.params[slot] = params
        if params.has_penalties:
            self.in_prompt[slot] = False
            self.in_prompt[slot, self._ids(start.prompt)] = True
            counts = np.bincount(np.asarray(start.said, np.int64), minlength=self.vocab)
            staged = torch.as_tensor(counts.astype(np.int32)).pin_memory()
            self.outputs[slot].copy_(staged, non_blocking=True)
        if params.logit_bias:
            self.bias[slot] = 0.0
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
            values = values.pin_memory().to(self.device, non_blocking=True)
            self.bias[slot, self._ids(list(params.logit_bias))] = values

    def _ids(self, tokens: Seq[int]) -> Tensor:
        staged = torch.as_tensor(np.asarray(tokens, np.int64)).pin_memory()
        return staged.to(self.device, non_blocking=True)


class RowChooser:
    """Samples up to `max_rows` rows: one for the rows of decode graphs, one for the rest."""

    def __init__(self, tables: ChoiceTables, max_rows: int) -> None:
        self._tables = tables
        self._staging = Staging(_FIELDS, max_rows, tables.device)

    def stage(self, chunks: Seq[Chunk]) -> bool:
        """Enqueue the settings of a step's rows. True if some row draws."""
        fields = self._staging.begin()
        draws = False
        for row, chunk in enumerate(chunks):
            sequence = chunk.sequence
            params = self._tables.params[sequence.slot]
            is_greedy = params.is_greedy
            draws = draws or not is_greedy
            fields["temperature"][row] = 0.0 if is_greedy else params.temperature
            fields["top_k"][row] = max(params.top_k, 0)
            fields["top_p"][row] = params.top_p
            fields["min_p"][row] = params.min_p
            fields["uniforms"][row] = uniform(sequence.seed, chunk.start + chunk.length)
            fields["repetition"][row] = params.repetition_penalty
            fields["presence"][row] = params.presence_penalty
            fields["frequency"][row] = params.frequency_penalty
            fields["slots"][row] = sequence.slot if params.has_penalties else -1
            fields["bias_rows"][row] = sequence.slot if params.logit_bias else -1
        self._staging.send()
        return draws

    def sample(self, logits: Tensor, *, draws: bool) -> tuple[Tensor, Tensor]:
        """Enqueue the choice for logits [rows, vocab] float32; may be captured.

        Out: ids [rows] int64, is_sound [rows] int8
        """
        rows = logits.shape[0]
        fields = {name: tensor[:rows] for name, tensor in self._staging.device.items()}
        tables = self._tables
        settings = SampleSettings(
            **fields, outputs=tables.outputs, in_prompt=tables.in_prompt, bias=tables.bias
        )
        ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
        is_sound = torch.empty(rows, dtype=torch.int8, device=logits.device)
        scratch = tables.scratch
        sample_rows(logits, settings, ids=ids, is_sound=is_sound, scratch=scratch, draws=draws)
        return ids, is_sound

    def chosen(self, chunks: Seq[Chunk], logits: Tensor, ids: Tensor, is_sound: Tensor) -> Chosen:
        """Collect a step's choice. Waits for the device only where log-probabilities are wanted."""
        slots = [c.sequence.slot for c in chunks]
        params = [self._tables.params[slot] for slot in slots]
        return Chosen(ids, is_sound, slots, _logprobs(logits, ids, params))


def _logprobs(
    logits: Tensor, ids: Tensor, params: list[SamplingParams]
) -> list[TokenLogprob | None]:
    """The model's own log-probabilities of rows that want them."""
    wanted = [i for i, p in enumerate(params) if p.logprobs is not None]
    out: list[TokenLogprob | None] = [None] * len(params)
    for row in wanted:
        shares = logits[row].log_softmax(-1)
        # Sorted by value, equal ones by lowest id.
        values, tokens = shares.sort(descending=True, stable=True)
        count = params[row].logprobs or 0
        top = [(int(t), float(v)) for t, v in zip(tokens[:count], values[:count], strict=True)]
        token = int(ids[row])
        out[row] = TokenLogprob(token, float(shares[token]), tuple(top))
    return out
