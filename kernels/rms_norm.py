"""Root-mean-square norm: x / sqrt(mean(x^2) + eps) * weight, optionally after a residual add."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension in fp32.

    x       [..., width]
    weight  [width], or [heads, width] for one weight a head of x [tokens, heads, width]
    out     [..., width] dtype of x
    """
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.float()).to(x.dtype)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise the last dimension of x; with `residual`, of residual += x (in place).

    x         [..., width]
    weight    [width], or [heads, width] for one weight a head of x [tokens, heads, width]
    residual  shape of x; changed in place
    out       shape of x; may be x itself
    Reference: `reference`, 1e-6 relative in fp32, 1e-2 in bf16. Source: arXiv 1910.07467.
    """
    if weight.shape[-1] != x.shape[-1]:
        raise ValueError(f"expected weight of width {x.shape[-1]}, got {tuple(weight.shape)}")
    if residual is not None:
        x = residual.add_(x)
    if weight.dim() == 1:
        y = F.rms_norm(x, weight.shape, weight, eps)
    else:
        y = F.rms_norm(x, weight.shape[-1:], None, eps).mul_(weight)
    return y if out is None else out.copy_(y)
