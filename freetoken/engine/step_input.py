"""A planned step as tensors."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from freetoken.engine.request import Chunk
from freetoken.layers.step import StepInput


def build_step(chunks: Seq[Chunk], last_ids: Tensor, page_tokens: int) -> StepInput:
    """Lay the chunks end to end (see StepInput).

    last_ids  [max_running] int64  the token each slot sampled last, for chunks whose token the host
    does not know yet
    """
    lengths = [c.length for c in chunks]
    ends = np.cumsum(lengths)
    table = np.zeros((len(chunks), max(len(c.pages) for c in chunks)), np.int32)
    tokens = np.zeros(int(ends[-1]), np.int64)
    positions = np.empty_like(tokens)
    write_slots = np.empty_like(tokens)
    pending: list[tuple[int, int]] = []
    for i, (chunk, end) in enumerate(zip(chunks, ends.tolist(), strict=True)):
        table[i, : len(chunk.pages)] = chunk.pages
        rows = slice(end - chunk.length, end)
        where = np.arange(chunk.start, chunk.start + chunk.length)
        positions[rows] = where
        write_slots[rows] = (
            table[i, where // page_tokens].astype(np.int64) * page_tokens + where % page_tokens
        )
        if chunk.tokens:
            tokens[rows] = chunk.tokens
        else:
            pending.append((end - 1, chunk.sequence.slot))
    token_ids = torch.as_tensor(tokens)
    if pending:
        rows_of, slots = zip(*pending, strict=True)
        token_ids[list(rows_of)] = last_ids[list(slots)]
    return StepInput(
        tokens=token_ids,
        positions=torch.as_tensor(positions),
        write_slots=torch.as_tensor(write_slots),
        q_ends=ends.tolist(),
        kv_lens=[c.start + c.length for c in chunks],
        page_table=torch.as_tensor(table),
        page_tokens=page_tokens,
        sample_rows=torch.tensor(
            [e - 1 for c, e in zip(chunks, ends.tolist(), strict=True) if c.samples],
            dtype=torch.int64,
        ),
    )


def warm_step(tokens: int, page_tokens: int) -> StepInput:
    """Rows of one made-up sequence in the first page, which nobody has written yet."""
    where = torch.arange(tokens)
    pages = torch.zeros(1, -(-tokens // page_tokens), dtype=torch.int32)
    return StepInput(
        tokens=torch.zeros_like(where),
        positions=where,
        write_slots=where % page_tokens,
        q_ends=[tokens],
        kv_lens=[tokens],
        page_table=pages,
        page_tokens=page_tokens,
        sample_rows=where[-1:],
    )
