"""What a GPU step is told about its rows: tokens, positions, pages. Decode rows lie at fixed
addresses that a captured graph reads; prompt rows are laid out anew for each step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from freetoken.engine.request import Chunk
from freetoken.engine.staging import Staging, Uploads
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


_PROMPT_BYTES = 8192 * 32
"""A chunk of 8192 tokens: three numbers of 8 bytes each, and what its sequences add. A longer one
allocates for itself."""


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
        self.page_tokens = page_tokens
        self._num_pages = [0] * max_running
        self._staging = Staging(_FIELDS, MAX_BATCH, device)
        self.uploads = Uploads(device, 16 << 10, ring=8 * max(max_running, MAX_BATCH))
        """For what grows by a few numbers: four steps' worth of page tables."""
        self.prompt_uploads = Uploads(device, _PROMPT_BYTES, ring=4)
        self._q_ends = torch.arange(1, MAX_BATCH + 1, dtype=torch.int32, device=device)

    def forget(self, slot: int) -> None:
        """The slot has a new sequence: its page table starts over."""
        self._num_pages[slot] = 0

    def fill(self, chunks: Seq[Chunk]) -> None:
        """Stage the rows of a step and enqueue their copies on the current stream."""
        fields = self._staging.begin()
        for row, chunk in enumerate(chunks):
            page, offset = divmod(chunk.start, self.page_tokens)
            fields["token"][row] = chunk.tokens[0] if chunk.tokens else _FROM_SLOT
            fields["slot"][row] = chunk.sequence.slot
            fields["position"][row] = chunk.start
            fields["write_slot"][row] = chunk.pages[page] * self.page_tokens + offset
            fields["kv_len"][row] = chunk.start + 1
            self.extend_pages(chunk)
        self._staging.send()

    def extend_pages(self, chunk: Chunk) -> None:
        """Bring the device's page table of a sequence up to the chunk's."""
        slot, known = chunk.sequence.slot, self._num_pages[chunk.sequence.slot]
        if known < len(chunk.pages):
            fresh = self.uploads.send({"pages": np.array(chunk.pages[known:], np.int32)})
            self.slot_pages[slot, known : len(chunk.pages)] = fresh["pages"]
            self._num_pages[slot] = len(chunk.pages)

    def rows(self, rows: int) -> CudaRows:
        """The forward pass's view of the first `rows` rows; may be captured."""
        fields = {name: tensor[:rows] for name, tensor in self._staging.device.items()}
        token, slot = fields["token"], fields["slot"]
        tokens = torch.where(token >= 0, token, self.last_ids[slot])
        pages = self.slot_pages.index_select(0, slot)
        runs = PagedRuns(self._q_ends[:rows], fields["kv_len"], pages, self.page_tokens)
        return CudaRows(tokens, fields["position"], fields["write_slot"], runs, slot)


def prefill_rows(chunks: Seq[Chunk], batch: DecodeBatch) -> CudaRows:
    """Lay chunks of any length end to end on the device; enqueues copies on the current stream."""
    page_tokens = batch.page_tokens
    ends = np.cumsum([c.length for c in chunks])
    where = [np.arange(c.start, c.start + c.length) for c in chunks]
    write_slots = [
        np.asarray(c.pages, np.int64)[at // page_tokens] * page_tokens + at % page_tokens
        for c, at in zip(chunks, where, strict=True)
    ]
    slots = np.array([c.sequence.slot for c in chunks], np.int64)
    is_known = all(c.tokens for c in chunks)
    tokens = [np.asarray(c.tokens or [_FROM_SLOT], np.int64) for c in chunks]
    for chunk in chunks:
        batch.extend_pages(chunk)
    sent = batch.prompt_uploads.send(
        {
            "tokens": np.concatenate(tokens),
            "positions": np.concatenate(where),
            "write_slots": np.concatenate(write_slots),
            "owners": slots[:0] if is_known else np.repeat(slots, [c.length for c in chunks]),
            "slots": slots,
            "q_ends": ends.astype(np.int32),
            "kv_lens": np.array([c.start + c.length for c in chunks], np.int32),
            "sample_rows": ends[[c.samples for c in chunks]].astype(np.int64) - 1,
        }
    )
    token_ids = sent["tokens"]
    if not is_known:
        last = batch.last_ids[sent["owners"]]
        token_ids = torch.where(token_ids >= 0, token_ids, last)
    width = max(len(c.pages) for c in chunks)
    pages = batch.slot_pages[:, :width].index_select(0, sent["slots"])
    runs = PagedRuns(sent["q_ends"], sent["kv_lens"], pages, page_tokens)
    return CudaRows(token_ids, sent["positions"], sent["write_slots"], runs, sent["sample_rows"])


def warm_lengths(longest: int) -> list[int]:
    """Chunk lengths that between them meet every variant of the prefill kernels.

    Tile sizes change at most at powers of two; kernels are also compiled apart for counts that are
    1, a multiple of 16, or neither.
    """
    lengths = {min(n, longest) for k in range(14) for n in (2**k, 2**k + 3, 3 * 2**k + 1)}
    return sorted(lengths | {longest})


def warm_rows(tokens: int, batch: DecodeBatch) -> CudaRows:
    """Rows of one made-up sequence, to compile kernels with; all in the first page."""
    device, page_tokens = batch.last_ids.device, batch.page_tokens
    pages = torch.zeros(1, -(-tokens // page_tokens), dtype=torch.int32, device=device)
    ends = torch.full((1,), tokens, dtype=torch.int32, device=device)
    where = torch.arange(tokens, device=device)
    runs = PagedRuns(ends, ends, pages, page_tokens)
    return CudaRows(torch.zeros_like(where), where, where % page_tokens, runs, where[-1:])
