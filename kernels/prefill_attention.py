"""Attention of many rows over paged keys and values. out = softmax(scale * q k^T + mask) v, per head, online softmax.

Row r of a sequence with n rows and kv_len keys stands at position kv_len - n + r and sees the keys up to its own, at
most `window` of them. A sink adds exp(sink) to the head's denominator. Knows pages, not their owners.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.kernels.device_limits import has_large_shared, run_options
from freetoken.kernels.triton_import import next_power_of_2, tl, triton

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PagedRuns:
    """Sequences laid end to end in a step, and where their keys are.

    q_ends      [sequences] int32         end row of each run, on the device; empty runs allowed
    kv_lens     [sequences] int32         keys the run's last row sees, at least its rows
    page_table  [sequences, pages] int32  slot = page * page_tokens + offset
    page_tokens                           a power of two
    """

    q_ends: Tensor
    kv_lens: Tensor
    page_table: Tensor
    page_tokens: int


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Tile of rows by keys, and how a program runs it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_config(rows: int, heads: int, q: Tensor) -> AttentionConfig:
    """Pick the tile for a step of `rows` rows; not measured yet, chosen from compiled register and memory use.

    Few rows get short tiles, so that rows / block_m * heads programs still cover about a hundred multiprocessors.
    """
    head_dim = q.shape[2]
    if q.dtype == torch.float32:
        return AttentionConfig(32, 32, 4, 1)
    if not has_large_shared(q.device):
        return AttentionConfig(64, 32, 4, 1) if head_dim > 128 else AttentionConfig(64, 64, 4, 2)
    if rows * heads <= 64 * 128:
        return AttentionConfig(64 if rows * heads > 32 * 128 else 32, 64, 4, 2)
    return AttentionConfig(128, 64, 8, 2) if head_dim > 128 else AttentionConfig(128, 128, 8, 2)


def reference(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, runs: PagedRuns, scale: float, *,
    window: int | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute sequence by sequence in fp32, with an explicit mask over gathered keys."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k_pool.shape[1]
    start = 0
    for end, kv_len, pages in zip(
        runs.q_ends.tolist(), runs.kv_lens.tolist(), runs.page_table.long(), strict=True
    ):
        keys = torch.arange(kv_len, device=q.device)
        slots = pages[keys // runs.page_tokens] * runs.page_tokens + keys % runs.page_tokens
        positions = torch.arange(kv_len - (end - start), kv_len, device=q.device)[:, None]
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        k, v = (pool[slots].float().repeat_interleave(group, 1) for pool in (k_pool, v_pool))
        scores = (scale * torch.einsum("rhd,khd->hrk", q[start:end].float(), k)).masked_fill(
            hidden, -torch.inf
        )
        if sinks is not None:
            scores = torch.cat(
                [scores, sinks.float()[:, None, None].expand(-1, end - start, 1)], dim=-1
            )
        out[start:end] = torch.einsum("hrk,khd->rhd", scores.softmax(-1)[..., :kv_len], v).to(
            q.dtype
        )
        start = end
    return out


@triton.jit
def _attend(
    acc, peak, total, q, k_head, v_head, pages, positions, first, last, kv_len, scale,
    SLOT_STRIDE: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Add the keys first .. last - 1, in tiles, to the running softmax."""
    lanes = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_DIM)
    # A key past the end reads the last real one and is masked: memory nobody wrote could hold a NaN, which no zero
    # probability stops. Page numbers are read one tile ahead, so that no load waits for another.
    page = tl.load(pages + tl.minimum(first + lanes, kv_len - 1) // PAGE)
    for start in range(first, last, BLOCK_N):
        if MASKED:
            offsets = tl.minimum(start + lanes, kv_len - 1) % PAGE
        elif PAGE <= BLOCK_N:
            offsets = lanes % PAGE
        else:
            offsets = (start + lanes) % PAGE
        places = (page * PAGE + offsets).to(tl.int64)[:, None] * SLOT_STRIDE + dims[None, :]
        k = tl.load(k_head + places)
        page = tl.load(pages + tl.minimum(start + BLOCK_N + lanes, kv_len - 1) // PAGE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = start + lanes[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (start + lanes[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        base = new_peak
        if MASKED and WINDOW > 0:
            # A row whose window begins after this tile has seen nothing yet: -inf - -inf would be NaN.
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(scores * scale - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = tl.load(v_head + places)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        peak = new_peak
    return acc, peak, total


# Values that change from step to step must not make new variants: a compilation takes seconds.
@triton.jit(
    do_not_specialize=["sequences", "table_stride"],
    do_not_specialize_on_alignment=["q_ends", "kv_lens", "page_table"],
)
def _prefill_attention_kernel(
    q, k_pool, v_pool, out, q_ends, kv_lens, page_table, sinks, scale, sequences, table_stride,
    q_row_stride, q_head_stride, kv_head_stride, out_row_stride, out_head_stride,
    SLOT_STRIDE: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PAGE: tl.constexpr, SEQUENCES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    # The last rows see the most keys: they start first, so that the launch does not end with its longest programs.
    ids = tl.arange(0, SEQUENCES)
    ends = tl.load(q_ends + ids, mask=ids < sequences, other=0)
    starts = tl.load(q_ends + ids - 1, mask=(ids > 0) & (ids < sequences), other=0)
    blocks = tl.where(ids < sequences, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    block = tl.sum(blocks, 0) - 1 - tl.program_id(1)
    if block < 0:
        return
    sequence = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32), 0)
    block -= tl.sum(tl.where(ids < sequence, blocks, 0), 0)
    run_start = tl.sum(tl.where(ids == sequence, starts, 0), 0)
    run_end = tl.sum(tl.where(ids == sequence, ends, 0), 0)
    kv_len = tl.load(kv_lens + sequence)

    rows = run_start + block * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    alive = rows < run_end
    first_position = kv_len - run_end + run_start + block * BLOCK_M
    # A row past the run's end stands at its last position: it has keys to see, and is not stored.
    positions = tl.minimum(first_position + tl.arange(0, BLOCK_M), kv_len - 1)
    q_places = rows.to(tl.int64)[:, None] * q_row_stride + head * q_head_stride + dims[None, :]
    tile_q = tl.load(q + q_places, mask=alive[:, None], other=0.0)
    k_head = k_pool + (head // GROUP) * kv_head_stride
    v_head = v_pool + (head // GROUP) * kv_head_stride
    pages = page_table + sequence.to(tl.int64) * table_stride

    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    if SINKS:
        peak = (
            tl.zeros([BLOCK_M], dtype=tl.float32)
            + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        )
        total = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    else:
        peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)

    last = tl.minimum(first_position + BLOCK_M, kv_len)
    # Tiles before `whole` are seen in full by every row: no mask there.
    whole = (first_position + 1) // BLOCK_N * BLOCK_N
    first = 0
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        edge = tl.maximum(first_position + BLOCK_M - WINDOW, 0)
        edge = tl.minimum((edge + BLOCK_N - 1) // BLOCK_N * BLOCK_N, whole)
        acc, peak, total = _attend(
            acc, peak, total, tile_q, k_head, v_head, pages, positions, first, edge, kv_len, scale,
            SLOT_STRIDE, WINDOW, True, PAGE, BLOCK_N, HEAD_DIM)  # fmt: skip
        first = tl.maximum(edge, first)
    acc, peak, total = _attend(
        acc, peak, total, tile_q, k_head, v_head, pages, positions, first, whole, kv_len, scale,
        SLOT_STRIDE, WINDOW, False, PAGE, BLOCK_N, HEAD_DIM)  # fmt: skip
    first = tl.maximum(first, whole)
    acc, peak, total = _attend(
        acc, peak, total, tile_q, k_head, v_head, pages, positions, first, last, kv_len, scale,
        SLOT_STRIDE, WINDOW, True, PAGE, BLOCK_N, HEAD_DIM)  # fmt: skip

    out_places = (
        rows.to(tl.int64)[:, None] * out_row_stride + head * out_head_stride + dims[None, :]
    )
    tl.store(out + out_places, (acc / total[:, None]).to(out.dtype.element_ty), mask=alive[:, None])


def prefill_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, runs: PagedRuns, scale: float, out: Tensor, *,
    window: int | None = None, sinks: Tensor | None = None, config: AttentionConfig | None = None,
) -> Tensor:  # fmt: skip
    """Attend from each row to the keys of its sequence up to and including its own.

    q               [tokens, heads, head_dim], any strides with the last 1; head_dim a power of two of at least 16
    k_pool, v_pool  [num_slots, kv_heads, head_dim], equal strides; the step's own keys are written already
    runs            the sequences; runs.q_ends[-1] may be below tokens, then the rows after it are left alone
    window          a row sees this many keys, its own included; None is all
    sinks           [heads] logits that take part in the softmax and have no value
    out             [tokens, heads, head_dim] dtype of q; every element of every run is written
    The grid depends on shapes only: no value is read on the host. A row does not depend on other sequences.
    Raises ValueError for shapes it cannot run. Reference: `reference`, 1e-5 relative in fp32, 1e-2 in bf16.
    Source: online softmax of FlashAttention-2 (arXiv 2307.08691), sinks of arXiv 2309.17453.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, sequences = k_pool.shape[1], runs.q_ends.shape[0]
    if (
        heads % kv_heads
        or k_pool.shape[2] != head_dim
        or head_dim < 16
        or head_dim & (head_dim - 1)
    ):
        raise ValueError(
            f"expected heads a multiple of {kv_heads}, head_dim a power of two, got q {tuple(q.shape)}"
        )
    if (
        q.stride(2) != 1
        or k_pool.stride() != v_pool.stride()
        or k_pool.stride(2) != 1
        or out.shape != q.shape
    ):
        raise ValueError(
            f"expected unit strides in the last dimension and out {tuple(q.shape)}, got {tuple(out.shape)}"
        )
    if (
        runs.page_tokens & (runs.page_tokens - 1)
        or scale <= 0
        or (window is not None and window < 1)
    ):
        raise ValueError(
            f"expected pages of a power of two, scale and window above 0, got {runs.page_tokens}, {scale}, {window}"
        )
    if tokens == 0 or sequences == 0:
        return out
    config = choose_config(tokens, heads, q) if config is None else config
    # Each run wastes less than one block: the most blocks that any split of the rows can need.
    blocks = (tokens + sequences * (config.block_m - 1)) // config.block_m
    _prefill_attention_kernel[(heads, blocks)](
        q, k_pool, v_pool, out, runs.q_ends, runs.kv_lens, runs.page_table, q if sinks is None else sinks,
        scale * LOG2_E, sequences, runs.page_table.stride(0),
        q.stride(0), q.stride(1), k_pool.stride(1), out.stride(0), out.stride(1),
        SLOT_STRIDE=k_pool.stride(0), GROUP=heads // kv_heads, WINDOW=window or 0, SINKS=sinks is not None, PAGE=runs.page_tokens,
        SEQUENCES=max(16, next_power_of_2(sequences)), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        HEAD_DIM=head_dim, **run_options(config.num_warps, config.num_stages),
    )  # fmt: skip
    return out
