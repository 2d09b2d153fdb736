"""What a GPU step is told about its rows: tokens, positions, pages. Decode rows lie at fixed
addresses that a captured graph reads; prompt rows are laid out anew for each step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from freetoken.engine.request import Chunk
from freetoken.engine.staging import Staging
from freetoken.kernels.prefill_attention import PagedRuns
from freetoken.models.cuda_forward import MAX_BATCH, CudaRows

_FROM_SLOT = -1
"""Stands for a token that only the device knows: what the slot sampled last."""

_FIELDS = {
    "token": np.int64,
    "slot": np.int64,
    "position": np.int64,
    "write_slot": np.int64,
    "kv_len": np.int32,
}


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
        self._staging = Staging(_FIELDS, MAX_BATCH, device)
        self._q_ends = torch.arange(1, MAX_BATCH + 1, dtype=torch.int32, device=device)

    def forget(self, slot: int) -> None:
        """The slot has a new sequence: its page table starts over."""
        self._num_pages[slot] = 0

    def fill(self, chunks: Seq[Chunk]) -> None:
        """Stage the rows of a step and enqueue their copies on the current stream."""
        fields = self._staging.begin()
        for row, chunk in enumerate(chunks):
            page, offset = divmod(chunk.start, self._page_tokens)
            fields["token"][row] = chunk.tokens[0] if chunk.tokens else _FROM_SLOT
            fields["slot"][row] = chunk.sequence.slot
            fields["position"][row] = chunk.start
            fields["write_slot"][row] = chunk.pages[page] * self._page_tokens + offset
            fields["kv_len"][row] = chunk.start + 1
            self.extend_pages(chunk)
        self._staging.send()

    def extend_pages(self, chunk: Chunk) -> None:
        """Bring the device's page table of a sequence up to the chunk's."""
        slot, known = chunk.sequence.slot, self._num_pages[chunk.sequence.slot]
        if known < len(chunk.pages):
            fresh = torch.as_tensor(np.array(chunk.pages[known:], np.int32)).pin_memory()
            self.slot_pages[slot, known : len(chunk.pages)].copy_(fresh, non_blocking=True)
            self._num_pages[slot] = len(chunk.pages)

    def rows(self, rows: int) -> CudaRows:
        """The forward pass's view of the first `rows` rows; may be captured."""
        fields = {name: tensor[:rows] for name, tensor in self._staging.device.items()}
        token, slot = fields["token"], fields["slot"]
        tokens = torch.where(token >= 0, token, self.last_ids[slot])
        pages = self.slot_pages.index_select(0, slot)
        runs = PagedRuns(self._q_ends[:rows], fields["kv_len"], pages, self._page_tokens)
        return CudaRows(tokens, fields["position"], fields["write_slot"], runs, slot)


def prefill_rows(chunks: Seq[Chunk], batch: DecodeBatch, page_tokens: int) -> CudaRows:
    """Lay chunks of any length end to end on the device; enqueues copies on the current stream."""
    device = batch.last_ids.device
    ends = np.cumsum([c.length for c in chunks])
    where = [np.arange(c.start, c.start + c.length) for c in chunks]
    write_slots = [
        np.asarray(c.pages, np.int64)[at // page_tokens] * page_tokens + at % page_tokens
        for c, at in zip(chunks, where, strict=True)
    ]
    tokens = np.concatenate([np.asarray(c.tokens or [_FROM_SLOT], np.int64) for c in chunks])
    for chunk in chunks:
        batch.extend_pages(chunk)
    slots = _to_device([c.sequence.slot for c in chunks], np.int64, device)
    token_ids = _to_device(tokens, np.int64, device)
    if any(not c.tokens for c in chunks):
        owners = np.repeat([c.sequence.slot for c in chunks], [c.length for c in chunks])
        last = batch.last_ids[_to_device(owners, np.int64, device)]
        token_ids = torch.where(token_ids >= 0, token_ids, last)
    width = max(len(c.pages) for c in chunks)
    runs = PagedRuns(
        _to_device(ends, np.int32, device),
        _to_device([c.start + c.length for c in chunks], np.int32, device),
        batch.slot_pages[:, :width].index_select(0, slots),
        page_tokens,
    )
    sample_rows = [int(e) - 1 for c, e in zip(chunks, ends, strict=True) if c.samples]
    return CudaRows(
        token_ids,
        _to_device(np.concatenate(where), np.int64, device),
        _to_device(np.concatenate(write_slots), np.int64, device),
        runs,
        _to_device(sample_rows, np.int64, device),
    )


def warm_lengths(longest: int) -> list[int]:
    """Chunk lengths that between them meet every variant of the prefill kernels.

    Tile sizes change at most at powers of two; kernels are also compiled apart for counts that are
    1, a multiple of 16, or neither.
    """
    lengths = {min(n, longest) for k in range(14) for n in (2**k, 2**k + 3, 3 * 2**k + 1)}
    return sorted(lengths | {longest})


def warm_rows(tokens: int, batch: DecodeBatch, page_tokens: int) -> CudaRows:
    """Rows of one made-up sequence, to compile kernels with; all in the first page."""
    device = batch.last_ids.device
    pages = torch.zeros(1, -(-tokens // page_tokens), dtype=torch.int32, device=device)
    ends = _to_device([tokens], np.int32, device)
    where = torch.arange(tokens, device=device)
    runs = PagedRuns(ends, ends, pages, page_tokens)
    return CudaRows(torch.zeros_like(where), where, where % page_tokens, runs, where[-1:])


def _to_device(values: object, dtype: type[np.generic], device: torch.device) -> Tensor:
    """A small host array on the device, without waiting."""
    staged = torch.as_tensor(np.asarray(values, dtype)).pin_memory()
    return staged.to(device, non_blocking=True)
