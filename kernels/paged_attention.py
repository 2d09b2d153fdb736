"""Causal attention of a flattened step over paged keys and values. out = softmax(scale * q k^T +
mask) v, per head.

Each sequence contributes a run of rows: its last `rows` tokens, whose keys are in the pages
already.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True)
class DecodeGroup:
    """One-row sequences of like length, computed together.

    rows   [n]          rows of the step
    slots  [n * keys]   KV slot of every key; a shorter sequence is filled up with its own first
                        slot
    mask   [n, 1, 1, keys] True where a key is real; None if all are
    """

    rows: Tensor
    slots: Tensor
    mask: Tensor | None


@dataclass(slots=True)
class DecodeRows:
    """All one-row sequences of a step, as a kernel that walks page tables itself wants them.

    rows        [n]        rows of the step
    page_table  [n, pages] int32, contiguous
    kv_lens     [n]        int64
    """

    rows: Tensor
    page_table: Tensor
    kv_lens: Tensor


@dataclass(slots=True)
class PrefillRun:
    """One sequence with several rows. `mask` [rows, keys]; None: plain causal is the same."""

    start: int
    end: int
    slots: Tensor
    mask: Tensor | None


@dataclass(slots=True)
class AttentionPlan:
    """What every layer with the same window shares in a step; built once a step by
    `plan_attention`.

    q_ends      [sequences]  end row of each run
    kv_lens     [sequences]  keys that the run's last row sees
    page_table  [sequences, pages] int32
    window                   a row sees this many keys, its own included; None is all
    """

    q_ends: list[int]
    kv_lens: list[int]
    page_table: Tensor
    page_tokens: int
    window: int | None = None
    decode: DecodeRows | None = None
    """Set instead of `groups` if asked for; `paged_attention` then leaves those rows to the caller."""
    groups: list[DecodeGroup] = field(default_factory=list[DecodeGroup])
    runs: list[PrefillRun] = field(default_factory=list[PrefillRun])


def plan_attention(
    q_ends: list[int],
    kv_lens: list[int],
    page_table: Tensor,
    page_tokens: int,
    *,
    window: int | None = None,
    has_decode_kernel: bool = False,
) -> AttentionPlan:
    """Work out slots and masks of a step. ValueError if a run exceeds its keys or pages."""
    plan = AttentionPlan(q_ends, kv_lens, page_table, page_tokens, window)
    offsets = torch.arange(page_tokens, device=page_table.device)
    singles: list[tuple[int, Tensor]] = []
    walked: list[tuple[int, int]] = []
    start = 0
    for sequence, (end, kv_len) in enumerate(zip(q_ends, kv_lens, strict=True)):
        rows = end - start
        if rows < 0 or kv_len < rows or kv_len > page_table.shape[1] * page_tokens:
            raise ValueError(
                f"expected 0 <= rows <= keys <= pages, got {rows} rows, {kv_len} keys in sequence {sequence}"
            )
        if rows == 1 and has_decode_kernel:
            walked.append((start, sequence))
        elif rows:
            # Keys before the first row's window are never seen: they are left out.
            first = 0 if window is None else max(0, kv_len - rows + 1 - window)
            first_page = first // page_tokens
            pages = page_table[sequence, first_page : -(-kv_len // page_tokens)].to(torch.int64)
            slots = (pages[:, None] * page_tokens + offsets).reshape(-1)
            slots = slots[first - first_page * page_tokens : kv_len - first_page * page_tokens]
            if rows == 1:
                singles.append((start, slots))
            else:
                plan.runs.append(PrefillRun(start, end, slots, _run_mask(rows, slots, window)))
        start = end
    plan.groups = _grouped(singles)
    if walked:
        plan.decode = _decode_rows(walked, kv_lens, page_table)
    return plan


def _run_mask(rows: int, slots: Tensor, window: int | None) -> Tensor | None:
    """Mask of a run whose last row sees all of `slots` that its window allows."""
    keys = slots.shape[0]
    if rows == keys and (window is None or window >= keys):
        return None
    mask = torch.ones(rows, keys, dtype=torch.bool, device=slots.device).tril_(keys - rows)
    return mask if window is None else mask.triu_(keys - rows - window + 1)


def _decode_rows(
    walked: list[tuple[int, int]], kv_lens: list[int], page_table: Tensor
) -> DecodeRows:
    """Collect (row, sequence) pairs."""
    device = page_table.device
    sequences = [sequence for _, sequence in walked]
    is_whole = len(sequences) == page_table.shape[0]
    index = torch.tensor(sequences, device=device)
    return DecodeRows(
        rows=torch.tensor([row for row, _ in walked], device=device),
        page_table=page_table.contiguous() if is_whole else page_table.index_select(0, index),
        kv_lens=torch.tensor([kv_lens[sequence] for sequence in sequences], device=device),
    )


def _grouped(singles: list[tuple[int, Tensor]]) -> list[DecodeGroup]:
    """Put sequences together while filling up wastes less than half of the keys read."""
    groups: list[DecodeGroup] = []
    waiting = sorted(singles, key=lambda single: single[1].shape[0])
    while waiting:
        longest = waiting[-1][1].shape[0]
        members = [single for single in waiting if 2 * single[1].shape[0] >= longest]
        waiting = waiting[: len(waiting) - len(members)]
        device = members[0][1].device
        rows = torch.tensor([row for row, _ in members], device=device)
        if all(slots.shape[0] == longest for _, slots in members):
            groups.append(DecodeGroup(rows, torch.cat([slots for _, slots in members]), None))
            continue
        # Filled with a slot of its own: a foreign or unwritten one could hold a NaN, which no mask
        # stops in V.
        filled = [
            torch.cat([slots, slots[:1].expand(longest - slots.shape[0])]) for _, slots in members
        ]
        lengths = torch.tensor([slots.shape[0] for _, slots in members], device=device)
        mask = torch.arange(longest, device=device) < lengths[:, None]
        groups.append(DecodeGroup(rows, torch.cat(filled), mask[:, None, None, :]))
    return groups


def reference(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """Compute row by row and head by head in fp32, reading one slot after another."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k_pool.shape[1]
    start = 0
    for sequence, end in enumerate(plan.q_ends):
        for row in range(start, end):
            visible = plan.kv_lens[sequence] - (end - 1 - row)
            first = 0 if plan.window is None else max(0, visible - plan.window)
            pages = plan.page_table[sequence].tolist()
            slots = [
                pages[token // plan.page_tokens] * plan.page_tokens + token % plan.page_tokens
                for token in range(first, visible)
            ]
            for head in range(q.shape[1]):
                keys, values = (
                    k_pool[slots, head // group].float(),
                    v_pool[slots, head // group].float(),
                )
                out[row, head] = (scale * (keys @ q[row, head].float())).softmax(0) @ values
        start = end
    return out


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from each row to the keys of its sequence up to and including its own.

    q               [tokens, heads, head_dim], any strides with the last 1
    k_pool, v_pool  [num_slots, kv_heads, head_dim]; the step's own keys are written already
    plan            of this step and this layer's window
    out             [tokens, heads, head_dim] dtype of q; every row of the plan's groups and runs is written
    Reference: `reference`, 1e-5 in fp32, 2e-2 in bf16. A row's result does not depend on other
    sequences.
    """
    kv_heads = k_pool.shape[1]
    if q.shape[1] % kv_heads or q.shape[2] != k_pool.shape[2]:
        raise ValueError(
            f"expected heads a multiple of {kv_heads} x {k_pool.shape[2]}, got q {tuple(q.shape)}"
        )
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for decode in plan.groups:
        _decode(q, k_pool, v_pool, decode, scale, out)
    for run in plan.runs:
        keys = k_pool.index_select(0, run.slots).to(q.dtype).transpose(0, 1)
        values = v_pool.index_select(0, run.slots).to(q.dtype).transpose(0, 1)
        out[run.start : run.end] = F.scaled_dot_product_attention(
            q[run.start : run.end].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=run.mask,
            is_causal=run.mask is None,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return out


def _decode(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, decode: DecodeGroup, scale: float, out: Tensor
) -> None:
    """Attend from one row a sequence; query heads that share a key head are rows."""
    rows, (kv_heads, head_dim) = decode.rows.shape[0], k_pool.shape[1:]
    queries = (q if rows == q.shape[0] == 1 else q.index_select(0, decode.rows)).reshape(
        rows, kv_heads, -1, head_dim
    )
    keys = (
        k_pool.index_select(0, decode.slots)
        .to(q.dtype)
        .view(rows, -1, kv_heads, head_dim)
        .transpose(1, 2)
    )
    values = (
        v_pool.index_select(0, decode.slots)
        .to(q.dtype)
        .view(rows, -1, kv_heads, head_dim)
        .transpose(1, 2)
    )
    result = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=decode.mask, scale=scale
    )
    out.index_copy_(0, decode.rows, result.reshape(rows, -1, head_dim))
