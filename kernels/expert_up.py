"""Gate and up rows of each token's experts: inner = silu(gate @ y) * (up @ y), y = rms_norm(h), experts by address.

Programs of the same rows of different (token, rank) pairs are neighbours in launch order, so that an expert that several
tokens chose comes from memory once and from the second-level cache after that.
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

CONFIGS: dict[tuple[int, int], RowConfig] = {(768, 2048): RowConfig(rows=2, warps=4, chunk=1024)}
"""By (inter, hidden). Best of a sweep on an H200, 2026-12-01, bf16."""


def reference(h: Tensor, norm: Tensor, eps: float, ids: Tensor, up: Tensor) -> Tensor:
    """Compute in fp32 from stacked experts up [experts, 2 * inter, hidden]: [batch * top_k, inter]."""
    wide = h.float()
    y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.float()
    pairs = torch.einsum("bkoh,bh->bko", up.float()[ids.long()], y).flatten(0, 1)
    gate, value = pairs.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * value


@triton.jit
def _kernel(
    h_ptr, norm_ptr, ids_ptr, table_ptr, out_ptr, inter, eps,
    K: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPREAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    keep = rows < inter
    gain = load_row(norm_ptr, K, CHUNK, ROWS, SPREAD)
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    x = load_row(h_ptr + (pair // TOP_K) * K, K, CHUNK, ROWS, SPREAD)
    matrix = tl.load(table_ptr + expert).to(tl.pointer_type(h_ptr.dtype.element_ty))
    rows_ptr = tl.multiple_of(matrix, 16) + rows.to(tl.int64)[:, None] * K
    gate = load_rows(rows_ptr, keep[:, None], K, CHUNK)
    up = load_rows(rows_ptr + tl.cast(inter, tl.int64) * K, keep[:, None], K, CHUNK)
    factor = norm_factor(x, eps, K)
    y = normed(x, gain, NORM=True)
    g = dot_rows(gate, y) * factor
    u = dot_rows(up, y) * factor
    inner = g * tl.sigmoid(g) * u
    tl.store(
        out_ptr + pair * tl.cast(inter, tl.int64) + rows,
        inner.to(out_ptr.dtype.element_ty),
        mask=keep,
    )


def expert_up(
    h: Tensor,
    norm: Tensor,
    eps: float,
    ids: Tensor,
    up_table: Tensor,
    *,
    out: Tensor,
    config: RowConfig | None = None,
) -> Tensor:
    """Compute the inner activations of every (token, rank) pair.

    h         [batch, hidden] contiguous, batch 1 to 8
    norm      [hidden]
    ids       [batch, top_k] int32 or int64
    up_table  [experts] int64, address of each expert's [2 * inter, hidden] in h's dtype, gate rows first, contiguous,
              a multiple of 16 bytes; an address of an expert that nobody chose is not followed
    out       [batch * top_k, inter] contiguous; every element written
    Reference: `reference`, 1e-2 relative in bf16, 1e-5 in fp32.
    """
    hidden, (batch, top_k) = norm.shape[0], ids.shape
    check_batch(h, hidden)
    if (
        batch != h.shape[0]
        or out.shape[0] != batch * top_k
        or up_table.dtype != torch.int64
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"expected ids and contiguous out of {h.shape[0]} tokens and int64 addresses, got ids {list(ids.shape)}, out {list(out.shape)}, {up_table.dtype}"
        )
    inter = out.shape[1]
    config = config or CONFIGS.get((inter, hidden)) or default_config(hidden, tiles=2)
    _kernel[(batch * top_k, triton.cdiv(inter, config.rows))](
        h, norm, ids, up_table, out, inter, eps,
        K=hidden, TOP_K=top_k, **launch_options(h, config),
    )  # fmt: skip
    return out
