"""Add a token's expert rows with the router's weights: out[t] = residual[t] + sum over k of weights[t, k] * rows[t, k]."""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels.device_limits import run_options
from freetoken.kernels.triton_import import tl, triton

BLOCK = 1024
"""Columns a program adds. At half, twice the programs for the same bytes; at double, 8 kB rows leave warps idle."""


def reference(rows: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """Add in fp32, in order of rank, the residual last."""
    by_rank = rows.float().view(*weights.shape, rows.shape[1])
    total = by_rank[:, 0] * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total += by_rank[:, rank] * weights[:, rank, None]
    return (total if residual is None else total + residual.float()).to(rows.dtype)


@triton.jit
def _kernel(
    rows, weights, residual, out, hidden, residual_stride, out_stride,
    TOP_K: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < hidden
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for rank in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        row = tl.load(rows + (token * TOP_K + rank) * hidden + cols, mask=inside, other=0.0)
        total += row.to(tl.float32) * tl.load(weights + token * TOP_K + rank)
    if RESIDUAL:
        total += tl.load(residual + token * residual_stride + cols, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out + token * out_stride + cols, total.to(out.dtype.element_ty), mask=inside)


def combine_rows(
    rows: Tensor, weights: Tensor, out: Tensor, *, residual: Tensor | None = None
) -> Tensor:
    """Add the rows of each token, in fp32 and in order of rank: the same bits whatever its neighbours are.

    rows      [tokens * top_k, hidden] contiguous, unweighted; row token * top_k + rank
    weights   [tokens, top_k] float32 contiguous
    residual  [tokens, hidden] or None; may be out itself
    out       [tokens, hidden]; every element written
    Raises ValueError if shapes differ. Reference: `reference`, 1e-6 relative in fp32, 1e-2 in bf16.
    """
    (tokens, top_k), hidden = weights.shape, out.shape[1]
    if (
        rows.shape != (tokens * top_k, hidden)
        or out.shape[0] != tokens
        or not (rows.is_contiguous() and weights.is_contiguous())
    ):
        raise ValueError(
            f"expected contiguous rows [{tokens * top_k}, {hidden}], got {tuple(rows.shape)}, out {tuple(out.shape)}"
        )
    if residual is not None and (residual.shape != out.shape or residual.stride(1) != 1):
        raise ValueError(f"expected residual {tuple(out.shape)}, got {tuple(residual.shape)}")
    if tokens:
        _kernel[(tokens, triton.cdiv(hidden, BLOCK))](
            rows, weights, out if residual is None else residual, out, hidden,
            0 if residual is None else residual.stride(0), out.stride(0),
            TOP_K=top_k, RESIDUAL=residual is not None, BLOCK_N=BLOCK, **run_options(4),
        )  # fmt: skip
    return out
