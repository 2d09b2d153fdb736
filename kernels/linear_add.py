"""A linear layer for a few tokens, added to the residual stream in place: h += x @ W^T (+ bias)."""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels.rows import (
    RowConfig,
    check_batch,
    default_config,
    dot_rows,
    launch_options,
    load_row,
    load_rows,
    normed,
)
from freetoken.kernels.triton_import import tl, tl_cuda, triton

CONFIGS: dict[tuple[int, int], RowConfig] = {(2048, 4096): RowConfig(rows=2, warps=4, chunk=1024)}
"""By (rows of the weight, width). Best of a sweep on an H200, 2026-12-01, bf16."""


def reference(x: Tensor, weight: Tensor, h: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Return the new h in fp32."""
    y = h.float() + x.float() @ weight.float().T
    return y if bias is None else y + bias.float()


@triton.jit
def _kernel(
    x_ptr, w_ptr, bias_ptr, h_ptr, n,
    BATCH: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPREAD: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keep = rows < n
    w = load_rows(w_ptr + rows.to(tl.int64)[:, None] * K, keep[:, None], K, CHUNK)
    if BIAS:
        bias = tl.load(bias_ptr + rows, mask=keep, other=0.0).to(tl.float32)
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    for b in tl.static_range(BATCH):  # pyright: ignore[reportGeneralTypeIssues]
        h_row = h_ptr + b * tl.cast(n, tl.int64) + rows
        old = tl.load(h_row, mask=keep, other=0.0).to(tl.float32)
        y = dot_rows(w, normed(load_row(x_ptr + b * K, K, CHUNK, ROWS, SPREAD), (), NORM=False))
        if BIAS:
            y += bias
        tl.store(h_row, (old + y).to(h_ptr.dtype.element_ty), mask=keep)


def linear_add(
    x: Tensor,
    weight: Tensor,
    h: Tensor,
    *,
    bias: Tensor | None = None,
    config: RowConfig | None = None,
) -> Tensor:
    """Multiply each token of x with the weight and add the result to h, in place.

    x       [batch, width] contiguous, batch 1 to 8
    weight  [n, width] contiguous
    h       [batch, n] contiguous; changed
    bias    [n] or None
    A token's result does not depend on the others. Reference: `reference`, 1e-2 relative in bf16, 1e-5 in fp32.
    """
    n, width = weight.shape
    check_batch(x, width)
    if tuple(h.shape) != (x.shape[0], n) or not (h.is_contiguous() and weight.is_contiguous()):
        raise ValueError(
            f"expected contiguous h {[x.shape[0], n]} and weight, got h {list(h.shape)}, weight {list(weight.shape)}"
        )
    config = config or CONFIGS.get((n, width)) or default_config(width)
    _kernel[(triton.cdiv(n, config.rows),)](
        x, weight, x if bias is None else bias, h, n,
        BATCH=x.shape[0], K=width, BIAS=bias is not None, **launch_options(x, config),
    )  # fmt: skip
    return h
