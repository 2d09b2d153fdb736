"""Root-mean-square norm and a linear layer for a few tokens: y = rms_norm(x) @ W^T (+ bias), or silu(gate) * up of it.

The norm's factor is applied after the product: each program takes x once, and the squares come along.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
from freetoken.kernels.triton_import import tl, tl_cuda, triton

CONFIGS: dict[tuple[int, int], RowConfig] = {}
"""By (rows of the weight, width)."""


def reference(
    x: Tensor,
    norm: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Compute in fp32: [batch, n], or [batch, n / 2] if gated."""
    wide = x.float()
    if norm is not None:
        wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.float()
    y = wide @ weight.float().T
    if bias is not None:
        y = y + bias.float()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = gate * torch.sigmoid(gate) * up
    return y


@triton.jit
def _kernel(
    x_ptr, norm_ptr, w_ptr, bias_ptr, out_ptr, n, eps,
    BATCH: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPREAD: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keep = rows < n
    rows_ptr = w_ptr + rows.to(tl.int64)[:, None] * K
    w = load_rows(rows_ptr, keep[:, None], K, CHUNK)
    up = load_rows(rows_ptr + tl.cast(n, tl.int64) * K, keep[:, None], K, CHUNK) if GATED else w
    gain = load_row(norm_ptr, K, CHUNK, ROWS, SPREAD) if NORM else ()
    if BIAS:
        bias = tl.load(bias_ptr + rows, mask=keep, other=0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + n + rows, mask=keep, other=0.0).to(tl.float32)
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    for b in tl.static_range(BATCH):  # pyright: ignore[reportGeneralTypeIssues]
        x = load_row(x_ptr + b * K, K, CHUNK, ROWS, SPREAD)
        factor = norm_factor(x, eps, K) if NORM else 1.0
        scaled = normed(x, gain, NORM)
        y = dot_rows(w, scaled) * factor
        if BIAS:
            y += bias
        if GATED:
            u = dot_rows(up, scaled) * factor
            if BIAS:
                u += up_bias
            y = y * tl.sigmoid(y) * u
        tl.store(
            out_ptr + b * tl.cast(n, tl.int64) + rows, y.to(out_ptr.dtype.element_ty), mask=keep
        )


def norm_linear(
    x: Tensor, norm: Tensor | None, weight: Tensor, eps: float, *,
    out: Tensor, bias: Tensor | None = None, gated: bool = False, config: RowConfig | None = None,
) -> Tensor:  # fmt: skip
    """Normalise each token of x and multiply with the weight.

    x       [batch, width] contiguous, batch 1 to 8
    norm    [width], or None for no norm
    weight  [n, width] contiguous; if gated, gate rows first, then as many up rows
    bias    [n] or None
    out     [batch, n], or [batch, n / 2] if gated; contiguous, any float dtype; every element written
    A token's result does not depend on the others. Reference: `reference`, 1e-2 relative in bf16, 1e-5 in fp32.
    """
    n, width = weight.shape
    check_batch(x, width)
    rows = n // 2 if gated else n
    if tuple(out.shape) != (x.shape[0], rows) or not (
        out.is_contiguous() and weight.is_contiguous()
    ):
        raise ValueError(
            f"expected contiguous out {[x.shape[0], rows]} and weight, got out {list(out.shape)}, weight {list(weight.shape)}"
        )
    config = config or CONFIGS.get((n, width)) or default_config(width, tiles=2 if gated else 1)
    _kernel[(triton.cdiv(rows, config.rows),)](
        x, x if norm is None else norm, weight, x if bias is None else bias, out, rows, eps,
        BATCH=x.shape[0], K=width,
        NORM=norm is not None, BIAS=bias is not None, GATED=gated, **launch_options(x, config),
    )  # fmt: skip
    return out
