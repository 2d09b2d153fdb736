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
from freetoken.kernels.tiles import (
    TileConfig,
    ask_ahead,
    default_tile,
    is_tiled,
    tile_options,
    tile_product,
)
from freetoken.kernels.triton_import import tl, tl_cuda, triton

CONFIGS: dict[tuple[int, int], RowConfig | TileConfig] = {}
"""By (rows of the weight, width), one for all batch sizes."""


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


@triton.jit
def _tile_kernel(
    x_ptr, norm_ptr, w_ptr, bias_ptr, out_ptr, n, batch, eps,
    K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    LINES: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows past the end repeat the last one and are not stored.
    inside = tl.minimum(rows, n - 1)
    rows_ptr = w_ptr + inside.to(tl.int64)[:, None] * K
    up_ptr = rows_ptr + tl.cast(n, tl.int64) * K
    if LINES:
        ask_ahead(rows_ptr, K, LINES)
        if GATED:
            ask_ahead(up_ptr, K, LINES)
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    y, u = tile_product(
        x_ptr, norm_ptr, rows_ptr, up_ptr, batch, eps, K, TOKENS, ROWS, GROUPS, DEPTH, STAGES, NORM, GATED
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + inside).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            u += tl.load(bias_ptr + n + inside).to(tl.float32)[:, None]
        y = y * tl.sigmoid(y) * u
    token = tl.arange(0, TOKENS)[None, :]
    tl.store(
        out_ptr + token * tl.cast(n, tl.int64) + rows[:, None],
        y.to(out_ptr.dtype.element_ty),
        mask=(rows < n)[:, None] & (token < batch),
    )


def norm_linear(
    x: Tensor, norm: Tensor | None, weight: Tensor, eps: float, *,
    out: Tensor, bias: Tensor | None = None, gated: bool = False, config: RowConfig | TileConfig | None = None,
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
    config = config or choose_config(x, weight, gated=gated)
    inputs = x, x if norm is None else norm, weight, x if bias is None else bias, out, rows
    flags = {"K": width, "NORM": norm is not None, "BIAS": bias is not None, "GATED": gated}
    grid = (triton.cdiv(rows, config.rows),)
    if isinstance(config, TileConfig):
        _tile_kernel[grid](*inputs, x.shape[0], eps, **flags, **tile_options(x, width, config))
    else:
        _kernel[grid](*inputs, eps, BATCH=x.shape[0], **flags, **launch_options(x, config))
    return out


def choose_config(x: Tensor, weight: Tensor, *, gated: bool = False) -> RowConfig | TileConfig:
    """Return what is served; it does not depend on the batch."""
    n, width = weight.shape
    if is_tiled(x, weight):
        return CONFIGS.get((n, width)) or default_tile(n // 2 if gated else n)
    return default_config(width, tiles=2 if gated else 1)
