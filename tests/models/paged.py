"""A small paged loop around a decoder: scattered pages, unwritten slots full of NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from freetoken.kvcache.pool import KvPool
from freetoken.layers.step import StepInput
from freetoken.models.decoder import Decoder
from freetoken.models.load import load_decoder, open_checkpoint
from freetoken.native import Native

PAGE_TOKENS = 4


def opened(path: Path, dtype: torch.dtype = torch.float32, native: Native | None = None) -> Decoder:
    """Load a checkpoint on the CPU."""
    checkpoint = open_checkpoint(path, native)
    cpu = torch.device("cpu")
    decoder = load_decoder(checkpoint, dtype, cpu, lambda _done, _total: None, native)
    checkpoint.close()
    return decoder


@dataclass
class Sequence:
    """A sequence's pages and how many of its tokens are in them."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class Loop:
    """Owns a pool and hands out its pages in random order."""

    def __init__(self, decoder: Decoder, num_pages: int = 96) -> None:
        self.decoder = decoder
        self.pool = KvPool(decoder.spec.kv_layers(), num_pages, PAGE_TOKENS, decoder.dtype)
        for tensor in (*self.pool.k, *self.pool.v):
            tensor.fill_(float("nan"))
        self.free = random.Random(3).sample(range(num_pages), num_pages)

    def fork(self, sequence: Sequence, length: int) -> Sequence:
        """Start another sequence on the full pages that hold the first `length` tokens."""
        assert length % PAGE_TOKENS == 0
        assert length <= sequence.length
        return Sequence(sequence.pages[: length // PAGE_TOKENS], length)

    def step(
        self,
        runs: list[tuple[Sequence, list[int]]],
        *,
        every_row: bool = False,
        no_row: bool = False,
    ) -> list[Tensor]:
        """Run one step; return each run's logits: of every row, of its last, or of none."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        ends: list[int] = []
        rows: list[int] = []
        counts: list[int] = []
        for sequence, new in runs:
            start = sequence.length
            sequence.length += len(new)
            while len(sequence.pages) * PAGE_TOKENS < sequence.length:
                sequence.pages.append(self.free.pop())
            where = range(start, sequence.length)
            tokens += new
            positions += where
            slots += [
                sequence.pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in where
            ]
            ends.append(len(tokens))
            wanted = len(new) if every_row else 0 if no_row else 1
            counts.append(wanted)
            rows += range(len(tokens) - wanted, len(tokens))
        width = max(len(sequence.pages) for sequence, _ in runs)
        table = [sequence.pages + [0] * (width - len(sequence.pages)) for sequence, _ in runs]
        logits = self.decoder.forward(
            StepInput(
                tokens=torch.tensor(tokens),
                positions=torch.tensor(positions),
                write_slots=torch.tensor(slots),
                q_ends=ends,
                kv_lens=[sequence.length for sequence, _ in runs],
                page_table=torch.tensor(table, dtype=torch.int32),
                page_tokens=PAGE_TOKENS,
                sample_rows=torch.tensor(rows, dtype=torch.int64),
            ),
            self.pool,
        )
        return list(logits.split(counts))

    def greedy(self, prompts: list[list[int]], num_new: int) -> list[list[int]]:
        """Continue prompts together, each prefilled in one run."""
        sequences = [Sequence() for _ in prompts]
        new = [list(prompt) for prompt in prompts]
        found: list[list[int]] = [[] for _ in prompts]
        for _ in range(num_new):
            logits = self.step(list(zip(sequences, new, strict=True)))
            new = [[int(row[-1].argmax())] for row in logits]
            for ids, token in zip(found, new, strict=True):
                ids.extend(token)
        return found
