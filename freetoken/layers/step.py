"""What one forward pass is told about its tokens. Tensors and page numbers only: no requests, no
text.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class StepInput:
    """One step's tokens, all sequences laid end to end. T tokens, B sequences, S rows to sample.

    tokens       [T] int64   token ids
    positions    [T] int64   position of each token in its sequence
    write_slots  [T] int64   KV slot of each token: page * page_tokens + offset
    q_ends       [B]         end row of each sequence's run; q_ends[-1] == T
    kv_lens      [B]         tokens of each sequence visible to its last row (cached + this step's)
    page_table   [B, P] int32  pages of each sequence in order, padded with 0
    page_tokens              tokens a page
    sample_rows  [S] int64   rows whose logits are wanted (the last row of each sequence that
    samples)
    """

    tokens: Tensor
    positions: Tensor
    write_slots: Tensor
    q_ends: list[int]
    kv_lens: list[int]
    page_table: Tensor
    page_tokens: int
    sample_rows: Tensor
