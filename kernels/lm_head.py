"""The last norm and the vocabulary's product for a few tokens: logits = rms_norm(h) @ W^T in fp32.

The kernel is norm_linear's; the vocabulary's shapes have a table of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels.norm_linear import norm_linear
from freetoken.kernels.norm_linear import reference as norm_linear_reference
from freetoken.kernels.rows import RowConfig, default_config

CONFIGS: dict[tuple[int, int], RowConfig] = {}
"""By (vocab, hidden)."""


def reference(
    h: Tensor, norm: Tensor, weight: Tensor, eps: float, *, bias: Tensor | None = None
) -> Tensor:
    """Compute in fp32."""
    return norm_linear_reference(h, norm, weight, eps, bias=bias)


def lm_head(
    h: Tensor,
    norm: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    config: RowConfig | None = None,
) -> Tensor:
    """Compute the logits of each token.

    h       [batch, hidden] contiguous, batch 1 to 8
    norm    [hidden]
    weight  [vocab, hidden] contiguous
    bias    [vocab] or None
    out     [batch, vocab] float32; every element written
    Reference: `reference`, 1e-2 relative in bf16, 1e-5 in fp32.
    """
    if out.dtype != torch.float32:
        raise ValueError(f"expected logits in float32, got {out.dtype}")
    vocab, hidden = weight.shape
    config = config or CONFIGS.get((vocab, hidden)) or default_config(hidden)
    return norm_linear(h, norm, weight, eps, out=out, bias=bias, config=config)
