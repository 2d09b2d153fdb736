"""Down rows of each token's experts, weighted, summed over its ranks and added to the residual stream in place.

h[t] += sum over r of weights[t, r] * down[ids[t, r]] @ inner[t, r]. One program owns some rows of a token and adds its
experts in order of rank, in fp32 and without atomics: the same bits each time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels.rows import (
    RowConfig,
    check_batch,
    default_config,
    launch_options,
    load_row,
    load_rows,
)
from freetoken.kernels.triton_import import tl, tl_cuda, triton

CONFIGS: dict[tuple[int, int, int], RowConfig] = {}
"""By (hidden, inter, top_k)."""


def reference(inner: Tensor, ids: Tensor, weights: Tensor, down: Tensor, h: Tensor) -> Tensor:
    """Return the new h in fp32, from stacked experts down [experts, hidden, inter]."""
    rows = inner.float().view(*ids.shape, -1)
    return h.float() + torch.einsum("bkhi,bki,bk->bh", down.float()[ids.long()], rows, weights)


@triton.jit
def _kernel(
    inner_ptr, ids_ptr, weights_ptr, table_ptr, h_ptr, hidden,
    K: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPREAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    keep = rows < hidden
    # Before the wait: ids and addresses are at least two launches old, and every kernel here lets the next one start
    # only after its own wait. .cg: the first-level cache may hold the layer before.
    tiles = ()
    for rank in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        expert = tl.load(ids_ptr + token * TOP_K + rank, cache_modifier=".cg").to(tl.int64)
        address = tl.load(table_ptr + expert, cache_modifier=".cg")
        matrix = tl.multiple_of(address.to(tl.pointer_type(inner_ptr.dtype.element_ty)), 16)
        rows_ptr = matrix + rows.to(tl.int64)[:, None] * K
        tiles = tiles + (load_rows(rows_ptr, keep[:, None], K, CHUNK),)
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    h_row = h_ptr + token * tl.cast(hidden, tl.int64) + rows
    old = tl.load(h_row, mask=keep, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, CHUNK], tl.float32)
    for rank in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        weight = tl.load(weights_ptr + token * TOP_K + rank)
        row_ptr = inner_ptr + (token * TOP_K + rank).to(tl.int64) * K
        x = load_row(row_ptr, K, CHUNK, ROWS, SPREAD)
        for c in tl.static_range(len(x)):  # pyright: ignore[reportGeneralTypeIssues]
            total += tiles[rank][c].to(tl.float32) * (x[c].to(tl.float32) * weight)  # pyright: ignore[reportAttributeAccessIssue]
    tl.store(h_row, (old + tl.sum(total, 1)).to(h_ptr.dtype.element_ty), mask=keep)


def expert_down(
    inner: Tensor,
    ids: Tensor,
    weights: Tensor,
    down_table: Tensor,
    h: Tensor,
    *,
    config: RowConfig | None = None,
) -> Tensor:
    """Add every token's weighted experts to h, in place.

    inner       [batch * top_k, inter] contiguous, batch 1 to 8
    ids         [batch, top_k] int32 or int64
    weights     [batch, top_k] float32
    down_table  [experts] int64, address of each expert's [hidden, inter] in inner's dtype, contiguous, a multiple of 16
                bytes; an address of an expert that nobody chose is not followed
    h           [batch, hidden] contiguous; changed
    ids, weights and down_table must not be written by the launch just before this one (see the kernel).
    Reference: `reference`, 1e-2 relative in bf16, 1e-5 in fp32.
    """
    (batch, hidden), top_k, inter = h.shape, ids.shape[1], inner.shape[1]
    check_batch(h, hidden)
    if (
        ids.shape[0] != batch
        or inner.shape[0] != batch * top_k
        or weights.shape != ids.shape
        or not inner.is_contiguous()
    ):
        raise ValueError(
            f"expected ids, weights and contiguous inner of {batch} tokens, got {list(ids.shape)}, {list(weights.shape)}, {list(inner.shape)}"
        )
    if weights.dtype != torch.float32 or down_table.dtype != torch.int64:
        raise ValueError(
            f"expected float32 weights and int64 addresses, got {weights.dtype}, {down_table.dtype}"
        )
    config = (
        config
        or CONFIGS.get((hidden, inter, top_k))
        or default_config(top_k * inter, chunk_of=inter)
    )
    _kernel[(batch, triton.cdiv(hidden, config.rows))](
        inner, ids, weights, down_table, h, hidden,
        K=inter, TOP_K=top_k, **launch_options(h, config),
    )  # fmt: skip
    return h
