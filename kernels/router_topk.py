"""Choice of experts: softmax over all logits in fp32, the k largest, maybe renormalised."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Pick by repeated arg-max, token by token; ties go to the lowest expert number."""
    ids = torch.zeros(logits.shape[0], top_k, dtype=torch.int64)
    weights = torch.zeros(logits.shape[0], top_k, dtype=torch.float32)
    for token, row in enumerate(logits.float().softmax(-1)):
        left = row.tolist()
        for rank in range(top_k):
            best = max(range(len(left)), key=lambda expert: (left[expert], -expert))
            ids[token, rank], weights[token, rank] = best, row[best]
            left[best] = -1.0
    return ids, weights / weights.sum(-1, keepdim=True) if renormalize else weights


def router_topk(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Pick the top_k experts of each token, likeliest first.

    logits  [tokens, experts]
    ids     [tokens, top_k] int64; equal probabilities go to the lowest expert number
    weights [tokens, top_k] float32
    Reference: `reference`, ids equal, weights 1e-6. Source: router of Mixtral (arXiv 2401.04088).
    """
    if top_k > logits.shape[-1]:
        raise ValueError(f"expected top_k of at most {logits.shape[-1]} experts, got {top_k}")
    # A stable sort and not topk: topk leaves the order of ties open, which would make texts differ
    # between devices.
    weights, ids = logits.softmax(-1, dtype=torch.float32).sort(
        dim=-1, descending=True, stable=True
    )
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights
