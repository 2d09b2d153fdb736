"""Norm, router and choice of experts in one launch: softmax over all of rms_norm(h) @ W^T, its top_k likeliest.

Programs compute a few logits each; the last one to finish for a token chooses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels.norm_linear import reference as norm_linear_reference
from freetoken.kernels.rows import (
    RowConfig,
    check_batch,
    default_config,
    dot_rows,
    launch_options,
    load_row,
    load_rows,
    norm_factor,
    normed,
)
from freetoken.kernels.triton_import import next_power_of_2, tl, tl_cuda, triton

CONFIGS: dict[tuple[int, int], RowConfig] = {}
"""By (experts, hidden)."""
_RANK_BLOCK = 64
"""Experts that each expert is compared with at once. At 128 registers run out beyond 256 experts."""


def reference(
    h: Tensor,
    norm: Tensor,
    weight: Tensor,
    eps: float,
    top_k: int,
    *,
    renormalize: bool,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ids [batch, top_k] int64 and weights [batch, top_k] float32, likeliest first, equal ones by lowest id."""
    logits = norm_linear_reference(h, norm, weight, eps, bias=bias)
    weights, ids = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    return ids, weights / weights.sum(-1, keepdim=True) if renormalize else weights


@triton.jit
def _choose(
    logits_ptr, ids_ptr, weights_ptr, experts,
    TOP_K: tl.constexpr, EXPERTS_PAD: tl.constexpr, BLOCK: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Rank every expert against all others at once; those ranked under TOP_K write themselves to their place."""
    expert = tl.arange(0, EXPERTS_PAD)
    # .cg: other programs wrote these a moment ago, the first-level cache may hold older ones.
    logit = tl.load(
        logits_ptr + expert, mask=expert < experts, other=float("-inf"), cache_modifier=".cg"
    )
    # A NaN would compare as false everywhere and leave places unwritten.
    logit = tl.where(logit == logit, logit, -1e30)
    greatest = tl.max(logit, 0)
    total = tl.sum(tl.exp(logit - greatest), 0)
    share = tl.exp(logit - greatest) / total
    rank = tl.zeros([EXPERTS_PAD], tl.int32)
    for start in range(0, experts, BLOCK):
        rival = start + tl.arange(0, BLOCK)
        other = tl.load(
            logits_ptr + rival, mask=rival < experts, other=float("-inf"), cache_modifier=".cg"
        )
        other = tl.where(other == other, other, -1e30)
        other = tl.exp(other - greatest) / total
        is_before = (rival[:, None] < expert[None, :]) & (other[:, None] == share[None, :])
        beats = (rival < experts)[:, None] & ((other[:, None] > share[None, :]) | is_before)
        rank += tl.sum(beats.to(tl.int32), 0)
    chosen = (rank < TOP_K) & (expert < experts)
    if RENORMALIZE:
        share = share / tl.sum(tl.where(chosen, share, 0.0), 0)
    tl.store(ids_ptr + rank, expert.to(ids_ptr.dtype.element_ty), mask=chosen)
    tl.store(weights_ptr + rank, share, mask=chosen)


@triton.jit
def _kernel(
    h_ptr, norm_ptr, w_ptr, bias_ptr, logits_ptr, counters_ptr, ids_ptr, weights_ptr, experts, eps,
    K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPREAD: tl.constexpr, TOP_K: tl.constexpr,
    EXPERTS_PAD: tl.constexpr, BLOCK: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keep = rows < experts
    w = load_rows(w_ptr + rows.to(tl.int64)[:, None] * K, keep[:, None], K, CHUNK)
    gain = load_row(norm_ptr, K, CHUNK, ROWS, SPREAD)
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    x = load_row(h_ptr + token * K, K, CHUNK, ROWS, SPREAD)
    logit = dot_rows(w, normed(x, gain, NORM=True)) * norm_factor(x, eps, K)
    if BIAS:
        logit += tl.load(bias_ptr + rows, mask=keep, other=0.0).to(tl.float32)
    tl.store(logits_ptr + token * experts + rows, logit, mask=keep)
    # All threads' stores come before the count, which hands them to whoever counts last.
    tl.debug_barrier()
    done = tl.atomic_add(counters_ptr + token, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.store(counters_ptr + token, 0)
        _choose(
            logits_ptr + token * experts, ids_ptr + token * TOP_K, weights_ptr + token * TOP_K, experts,
            TOP_K, EXPERTS_PAD, BLOCK, RENORMALIZE,
        )  # fmt: skip


def router_gate(
    h: Tensor, norm: Tensor, weight: Tensor, eps: float, *, renormalize: bool, ids: Tensor, weights: Tensor,
    logits: Tensor, counters: Tensor, bias: Tensor | None = None, config: RowConfig | None = None,
) -> None:  # fmt: skip
    """Choose the experts of each token, likeliest first; equal probabilities go to the lowest expert number.

    h         [batch, hidden] contiguous, batch 1 to 8
    norm      [hidden]
    weight    [experts, hidden] contiguous
    bias      [experts] or None
    ids       [batch, top_k] int32 or int64, written
    weights   [batch, top_k] float32, written; divided by their sum if renormalize
    logits    [batch, experts] float32, scratch that holds the router's logits afterwards
    counters  [batch or more] int32, scratch; zero before the first launch and after each
    Reference: `reference`; ids equal where probabilities differ, weights 1e-5. Source: arXiv 2401.04088.
    """
    experts, hidden = weight.shape
    check_batch(h, hidden)
    batch, top_k = ids.shape
    if (
        batch != h.shape[0]
        or top_k > experts
        or weights.shape != ids.shape
        or weights.dtype != torch.float32
    ):
        raise ValueError(
            f"expected ids and float32 weights of {[h.shape[0], f'at most {experts}']}, got {list(ids.shape)}, {list(weights.shape)}"
        )
    if (
        tuple(logits.shape) != (batch, experts)
        or logits.dtype != torch.float32
        or counters.numel() < batch
    ):
        raise ValueError(
            f"expected float32 logits {[batch, experts]} and {batch} counters, got {list(logits.shape)}, {counters.numel()}"
        )
    config = config or CONFIGS.get((experts, hidden)) or default_config(hidden)
    _kernel[(triton.cdiv(experts, config.rows), batch)](
        h, norm, weight, h if bias is None else bias, logits, counters, ids, weights, experts, eps,
        K=hidden, TOP_K=top_k, EXPERTS_PAD=next_power_of_2(experts),
        BLOCK=min(_RANK_BLOCK, next_power_of_2(experts)), RENORMALIZE=renormalize, BIAS=bias is not None,
        **launch_options(h, config),
    )  # fmt: skip
