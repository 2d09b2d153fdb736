"""Down rows of each token's experts, weighted, summed over its ranks and added to the residual stream in place.

h[t] += sum over r of weights[t, r] * down[ids[t, r]] @ inner[t, r]. One program owns some rows of a token and adds its
experts in order of rank, in fp32 and without atomics: the same bits each time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels.rows import RowConfig, best_chunk, check_batch, load_rows
from freetoken.kernels.triton_import import early_launch, next_power_of_2, tl, tl_cuda, triton

CONFIGS: dict[tuple[int, int, int], RowConfig] = {}
"""By (hidden, inter, top_k)."""


def reference(inner: Tensor, ids: Tensor, weights: Tensor, down: Tensor, h: Tensor) -> Tensor:
    """Return the new h in fp32, from stacked experts down [experts, hidden, inter]."""
    rows = inner.float().view(*ids.shape, -1)
    return h.float() + torch.einsum("bkhi,bki,bk->bh", down.float()[ids.long()], rows, weights)


@triton.jit
def _kernel(
    inner_ptr, ids_ptr, weights_ptr, table_ptr, h_ptr, hidden,
    K: tl.constexpr, TOP_K: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    # Lines are the same ROWS rows of every rank's expert, rank by rank.
    line = tl.arange(0, RANKS * ROWS)
    rank, line_row = line // ROWS, tl.program_id(1) * ROWS + line % ROWS
    chosen, pair = rank < TOP_K, token * TOP_K + rank
    keep = (chosen & (line_row < hidden))[:, None]
    # Before the wait: ids and addresses are at least two launches old, and every kernel here lets the next one start
    # only after its own wait. .cg: the first-level cache may hold the layer before. All ranks in one tile: warps
    # share them out, so a thread holds few elements and more warps fit.
    expert = tl.load(ids_ptr + pair, mask=chosen, other=0, cache_modifier=".cg").to(tl.int64)
    address = tl.load(table_ptr + expert, mask=chosen, other=0, cache_modifier=".cg")
    matrix = tl.multiple_of(address.to(tl.pointer_type(inner_ptr.dtype.element_ty)), 16)
    tiles = load_rows((matrix + line_row.to(tl.int64) * K)[:, None], keep, K, CHUNK)
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    h_row = h_ptr + token * tl.cast(hidden, tl.int64) + rows
    old = tl.load(h_row, mask=rows < hidden, other=0.0).to(tl.float32)
    weight = tl.load(weights_ptr + pair, mask=chosen, other=0.0)
    inner_rows = inner_ptr + pair.to(tl.int64)[:, None] * K
    total = tl.zeros([RANKS * ROWS, CHUNK], tl.float32)
    for c in tl.static_range(len(tiles)):  # pyright: ignore[reportGeneralTypeIssues]
        cols = (c * CHUNK + tl.arange(0, CHUNK))[None, :]
        x = tl.load(inner_rows + cols, mask=chosen[:, None] & (cols < K), other=0.0)
        total += tiles[c].to(tl.float32) * x.to(tl.float32)
    by_rank = tl.reshape(tl.sum(total, 1) * weight, [RANKS, ROWS])
    new = old + tl.sum(by_rank, 0)
    tl.store(h_row, new.to(h_ptr.dtype.element_ty), mask=rows < hidden)


def expert_down(
    inner: Tensor,
    ids: Tensor,
    weights: Tensor,
    down_table: Tensor,
    h: Tensor,
    *,
    config: RowConfig | None = None,
) -> Tensor:
    """Add every token's weighted experts to h, in place.

    inner       [batch * top_k, inter] contiguous, batch 1 to 8
    ids         [batch, top_k] int32 or int64
    weights     [batch, top_k] float32
    down_table  [experts] int64, address of each expert's [hidden, inter] in inner's dtype, contiguous, a multiple of 16
                bytes; an address of an expert that nobody chose is not followed
    h           [batch, hidden] contiguous; changed
    ids, weights and down_table must not be written by the launch just before this one (see the kernel).
    Reference: `reference`, 1e-2 relative in bf16, 1e-5 in fp32.
    """
    (batch, hidden), top_k, inter = h.shape, ids.shape[1], inner.shape[1]
    check_batch(h, hidden)
    if (
        ids.shape[0] != batch
        or inner.shape[0] != batch * top_k
        or weights.shape != ids.shape
        or not inner.is_contiguous()
    ):
        raise ValueError(
            f"expected ids, weights and contiguous inner of {batch} tokens, got {list(ids.shape)}, {list(weights.shape)}, {list(inner.shape)}"
        )
    if weights.dtype != torch.float32 or down_table.dtype != torch.int64:
        raise ValueError(
            f"expected float32 weights and int64 addresses, got {weights.dtype}, {down_table.dtype}"
        )
    config = config or CONFIGS.get((hidden, inter, top_k)) or choose_config(inter, top_k)
    early = early_launch(h.device)
    _kernel[(batch, triton.cdiv(hidden, config.rows))](
        inner, ids, weights, down_table, h, hidden,
        K=inter, TOP_K=top_k, RANKS=next_power_of_2(top_k), ROWS=config.rows, CHUNK=config.chunk, EARLY=early,
        num_warps=config.warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return h


def choose_config(inter: int, top_k: int) -> RowConfig:
    """Pick when nothing was measured: a thread holds some 48 to 96 weight elements of all ranks."""
    ranks, chunk = next_power_of_2(top_k), best_chunk(inter)
    padded = -(-inter // chunk) * chunk
    rows = max(1, min(8, next_power_of_2(12_288 // (ranks * padded))))
    warps = min(
        8, next_power_of_2(-(-ranks * rows * padded // (32 * 96))), ranks * rows * chunk // 256
    )
    return RowConfig(rows, max(1, warps), chunk)
