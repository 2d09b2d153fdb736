"""Choice of experts for many rows: softmax over all router logits in fp32, the k largest, optionally divided by their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels.device_limits import run_options
from freetoken.kernels.triton_import import next_power_of_2, tl, triton

ROWS = 8
"""Rows a program takes. At half, warps of 32 lanes share few bytes; at double, 256 experts no longer fit in registers."""
LOWEST = -1e38
"""Logits are held between this and its opposite, so that their difference is finite in fp32."""


def reference(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Sort each row's probabilities, stably: equal ones keep the order of their expert numbers."""
    weights, ids = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    return ids, weights / weights.sum(-1, keepdim=True) if renormalize else weights


# The number of tokens changes from step to step and must not make new variants of the kernel.
@triton.jit(do_not_specialize=["tokens"])
def _kernel(
    logits, ids, weights, tokens, experts, logits_stride,
    TOP_K: tl.constexpr, RANKS: tl.constexpr, EXPERTS: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    LOWEST: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, EXPERTS)
    real = (lanes < experts)[None, :]
    places = rows.to(tl.int64)[:, None] * logits_stride + lanes[None, :]
    values = tl.load(logits + places, mask=(rows < tokens)[:, None] & real, other=0.0).to(
        tl.float32
    )
    # A NaN counts as the lowest logit, below every number and above a lane of no expert: an id is always that of an expert.
    number = values == values
    values = tl.where(real & number, tl.minimum(tl.maximum(values, LOWEST), -LOWEST), LOWEST)
    parts = tl.where(real, tl.exp(values - tl.max(values, 1)[:, None]), 0.0)
    left = tl.where(real, parts / tl.sum(parts, 1)[:, None], -1.0)
    ranks = tl.arange(0, RANKS)[None, :]
    chosen = tl.zeros([BLOCK_M, RANKS], dtype=tl.int32)
    picked = tl.zeros([BLOCK_M, RANKS], dtype=tl.float32)
    for rank in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        best, expert = tl.max(left, 1, return_indices=True, return_indices_tie_break_left=True)
        chosen = tl.where(ranks == rank, expert[:, None], chosen)
        picked = tl.where(ranks == rank, best[:, None], picked)
        left = tl.where(lanes[None, :] == expert[:, None], -1.0, left)
    if RENORMALIZE:
        picked = picked / tl.sum(picked, 1)[:, None]
    stores = rows.to(tl.int64)[:, None] * TOP_K + ranks
    stored = (rows < tokens)[:, None] & (ranks < TOP_K)
    tl.store(ids + stores, chosen.to(ids.dtype.element_ty), mask=stored)
    tl.store(weights + stores, picked, mask=stored)


def router_rows(
    logits: Tensor, ids: Tensor, weights: Tensor, *, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """Pick the experts of each row, likeliest first.

    logits   [tokens, experts], rows of any stride
    ids      [tokens, top_k] int32 or int64 contiguous, written; equal probabilities go to the lowest expert number
    weights  [tokens, top_k] float32 contiguous, written
    Raises ValueError if shapes differ. Reference: `reference`, ids equal, weights 1e-6. Source: router of Mixtral (arXiv 2401.04088).
    """
    (tokens, experts), top_k = logits.shape, ids.shape[1]
    if (
        top_k > experts
        or ids.shape != weights.shape
        or ids.shape[0] != tokens
        or logits.stride(1) != 1
    ):
        raise ValueError(
            f"expected at most {experts} of {tokens} rows, got ids {tuple(ids.shape)}, weights {tuple(weights.shape)}"
        )
    if weights.dtype != torch.float32 or not (ids.is_contiguous() and weights.is_contiguous()):
        raise ValueError(f"expected contiguous float32 weights and ids, got {weights.dtype}")
    if tokens:
        _kernel[(triton.cdiv(tokens, ROWS),)](
            logits, ids, weights, tokens, experts, logits.stride(0), TOP_K=top_k, RANKS=next_power_of_2(top_k),
            EXPERTS=next_power_of_2(experts), RENORMALIZE=renormalize, BLOCK_M=ROWS,
            LOWEST=LOWEST, **run_options(4),
        )  # fmt: skip
    return ids, weights
