"""Rotary position embedding, half-split: pair (i, i + dim/2) turns by position * frequency[i]."""

from __future__ import annotations

import torch
from torch import Tensor


def angles(
    positions: Tensor, frequencies: Tensor, attention_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute the cosine and sine that `rope` takes, once a step.

    positions    [tokens]  int64
    frequencies  [dim / 2] float32, radians a position
    out          two of [tokens, dim / 2] float32, multiplied by attention_scale
    """
    turn = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = turn.cos(), turn.sin()
    if attention_scale != 1.0:
        cos, sin = cos.mul_(attention_scale), sin.mul_(attention_scale)
    return cos, sin


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] elements of each head in fp32; the rest passes through."""
    half = cos.shape[-1]
    c, s = cos[:, None, :], sin[:, None, :]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat(
        [(first * c - second * s).to(x.dtype), (second * c + first * s).to(x.dtype), rest], dim=-1
    )


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rotate each head of x by its token's angles.

    x         [tokens, heads, head_dim], any strides with the last 1 (query and key heads may share
                                       one call)
    cos, sin  [tokens, dim / 2] float32, dim <= head_dim, dim even
    out       shape of x; may be x itself, which saves the copy
    Reference: `reference`, exact in fp32 up to fused multiply-add. Source: arXiv 2104.09864,
    half-split layout.
    """
    half = cos.shape[-1]
    if 2 * half > x.shape[-1] or cos.shape[0] != x.shape[0]:
        raise ValueError(
            f"expected cos of [{x.shape[0]}, at most {x.shape[-1] // 2}], got {tuple(cos.shape)}"
        )
    c, s = cos[:, None, :], sin[:, None, :]
    first, second = x[..., :half], x[..., half : 2 * half]
    # Both results exist before either is written, so out may be x. Products are fp32 by promotion.
    new_first = torch.addcmul(first * c, second, s, value=-1)
    new_second = torch.addcmul(second * c, first, s)
    if out is None:
        out = torch.empty_like(x)
    if out is not x and 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    out[..., :half] = new_first
    out[..., half : 2 * half] = new_second
    return out
