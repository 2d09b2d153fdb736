"""What a decode step is told, in memory that a captured graph reads: filled on the host, copied in
one piece, the same addresses every step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from freetoken.engine.request import Chunk
from freetoken.kernels.prefill_attention import PagedRuns
from freetoken.models.cuda_forward import MAX_BATCH, CudaRows

_RING = 4
"""Staging buffers. Two steps may be in flight and a third being filled; one is spare."""

_FROM_SLOT = -1
"""Stands for a token that only the device knows: what the slot sampled last."""


class DecodeBatch:
    """Owns the inputs of decode steps of 1 to MAX_BATCH rows. Row i of every buffer is sequence i.

    last_ids    [slots] int64         the token each slot sampled last
    slot_pages  [slots, pages] int32  page table of each slot; grows with its sequence
    """

    def __init__(
        self, max_running: int, max_pages: int, page_tokens: int, device: torch.device
    ) -> None:
        self.last_ids = torch.zeros(max_running, dtype=torch.int64, device=device)
        self.slot_pages = torch.zeros(max_running, max_pages, dtype=torch.int32, device=device)
        self._page_tokens = page_tokens
        self._num_pages = [0] * max_running
        shape = (5, MAX_BATCH)  # token or _FROM_SLOT, slot, position, write slot, kv length
        self._fields = torch.zeros(shape, dtype=torch.int64, device=device)
        self._staging = [torch.zeros(shape, dtype=torch.int64).pin_memory() for _ in range(_RING)]
        self._next = 0

    def forget(self, slot: int) -> None:
        """The slot has a new sequence: its page table starts over."""
        self._num_pages[slot] = 0

    def fill(self, chunks: Seq[Chunk]) -> None:
        """Stage the rows of a step and enqueue their copies on the current stream."""
        staged = self._staging[self._next]
        self._next = (self._next + 1) % _RING
        values = staged.numpy()
        for row, chunk in enumerate(chunks):
            page, offset = divmod(chunk.start, self._page_tokens)
            token = chunk.tokens[0] if chunk.tokens else _FROM_SLOT
            write_slot = chunk.pages[page] * self._page_tokens + offset
            values[:, row] = token, chunk.sequence.slot, chunk.start, write_slot, chunk.start + 1
            self.extend_pages(chunk)
        self._fields.copy_(staged, non_blocking=True)

    def extend_pages(self, chunk: Chunk) -> None:
        """Bring the device's page table of a sequence up to the chunk's."""
        slot, known = chunk.sequence.slot, self._num_pages[chunk.sequence.slot]
        if known < len(chunk.pages):
            fresh = torch.as_tensor(np.array(chunk.pages[known:], np.int32)).pin_memory()
            self.slot_pages[slot, known : len(chunk.pages)].copy_(fresh, non_blocking=True)
            self._num_pages[slot] = len(chunk.pages)

    def slots(self, rows: int) -> Tensor:
        """[rows] int64, the slot of each row."""
        return self._fields[1, :rows]

    def rows(self, rows: int) -> CudaRows:
        """The forward pass's view of the first `rows` rows; may be captured."""
        token, slot, position, write_slot, kv_len = self._fields[:, :rows]
        tokens = torch.where(token >= 0, token, self.last_ids[slot])
        q_ends = torch.arange(1, rows + 1, dtype=torch.int32, device=token.device)
        pages = self.slot_pages.index_select(0, slot)
        runs = PagedRuns(q_ends, kv_len.to(torch.int32), pages, self._page_tokens)
        return CudaRows(tokens, position, write_slot, runs, slot)


def prefill_rows(chunks: Seq[Chunk], batch: DecodeBatch, page_tokens: int) -> CudaRows:
    """Lay chunks of any length end to end on the device; enqueues copies on the current stream."""
    device = batch.last_ids.device
    ends = np.cumsum([c.length for c in chunks])
    positions = np.concatenate([np.arange(c.start, c.start + c.length) for c in chunks])
    tables = [np.asarray(c.pages, np.int64) for c in chunks]
    write_slots = np.concatenate(
        [
            table[(where := np.arange(c.start, c.start + c.length)) // page_tokens] * page_tokens
            + where % page_tokens
            for c, table in zip(chunks, tables, strict=True)
        ]
    )
    tokens = np.concatenate([np.asarray(c.tokens or [_FROM_SLOT], np.int64) for c in chunks])
    for chunk in chunks:
        batch.extend_pages(chunk)
    slots = _to_device([c.sequence.slot for c in chunks], np.int64, device)
    width = max(len(c.pages) for c in chunks)
    token_ids = _to_device(tokens, np.int64, device)
    unknown = [int(e) - 1 for c, e in zip(chunks, ends, strict=True) if not c.tokens]
    if unknown:
        owners = [c.sequence.slot for c in chunks if not c.tokens]
        rows = _to_device(unknown, np.int64, device)
        token_ids[rows] = batch.last_ids[_to_device(owners, np.int64, device)]
    runs = PagedRuns(
        _to_device(ends, np.int32, device),
        _to_device([c.start + c.length for c in chunks], np.int32, device),
        batch.slot_pages[:, :width].index_select(0, slots),
        page_tokens,
    )
    sample_rows = [int(e) - 1 for c, e in zip(chunks, ends, strict=True) if c.samples]
    return CudaRows(
        token_ids,
        _to_device(positions, np.int64, device),
        _to_device(write_slots, np.int64, device),
        runs,
        _to_device(sample_rows, np.int64, device),
    )


def warm_rows(tokens: int, batch: DecodeBatch, page_tokens: int) -> CudaRows:
    """Rows of one made-up sequence, to compile kernels with; all in the first page."""
    device = batch.last_ids.device
    pages = torch.zeros(1, -(-tokens // page_tokens), dtype=torch.int32, device=device)
    ends = _to_device([tokens], np.int32, device)
    where = torch.arange(tokens, device=device)
    runs = PagedRuns(ends, ends, pages, page_tokens)
    return CudaRows(torch.zeros_like(where), where, where % page_tokens, runs, where[-1:])


def _to_device(values: object, dtype: type, device: torch.device) -> Tensor:
    """A small host array on the device, without waiting."""
    staged = torch.as_tensor(np.asarray(values, dtype)).pin_memory()
    return staged.to(device, non_blocking=True)
