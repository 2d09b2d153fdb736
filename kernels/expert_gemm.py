"""Two products of each expert over its own rows, through tables of matrix addresses.

act[row] = silu(gate_e @ x[token]) * (up_e @ x[token]);  rows[pair] = down_e @ act[row];  pair = order[row], token = pair // top_k.
Rows are those of `expert_sort`. An expert's matrices may lie anywhere: the kernels know an address for each, no stack.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.kernels.device_limits import has_large_shared, run_options
from freetoken.kernels.expert_sort import SortedPairs
from freetoken.kernels.triton_import import tl, triton


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Tile of a product: block_n output columns, block_k of the sum a step. block_m is the sort's."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


GATE_UP_CONFIGS = {
    16: GemmConfig(64, 64, 4, 4),
    32: GemmConfig(64, 64, 4, 4),
    64: GemmConfig(128, 64, 4, 3),
    128: GemmConfig(128, 64, 8, 4),
}
"""By block_m; best of a sweep on an H200, 2026-12-01, hidden 2048, inter 768, 128 experts, bf16."""
DOWN_CONFIGS = {
    16: GemmConfig(128, 64, 4, 4),
    32: GemmConfig(128, 64, 4, 4),
    64: GemmConfig(128, 64, 4, 3),
    128: GemmConfig(256, 64, 8, 4),
}
_SMALL_SHARED = {
    16: GemmConfig(32, 64, 4, 3),
    32: GemmConfig(32, 64, 4, 3),
    64: GemmConfig(64, 32, 4, 3),
    128: GemmConfig(64, 32, 8, 3),
}
_FP32 = GemmConfig(32, 32, 4, 2)


def choose_block_m(pairs: int, experts: int) -> int:
    """Pick the rows of a tile for `pairs` rows over `experts`, for `expert_sort` and both products.

    Measured on an H200, 2026-12-01: 32 rows an expert 313 us with tiles of 64 and 336 with 32; 129 rows 594 us with 64
    and 473 with 128. Below, the weights' bytes decide, not the arithmetic, and a short tile costs least.
    """
    mean = pairs / experts
    return 16 if mean <= 12 else 32 if mean <= 24 else 64 if mean <= 96 else 128


def _choose_config(x: Tensor, block_m: int, table: dict[int, GemmConfig]) -> GemmConfig:
    if x.dtype == torch.float32:
        return _FP32
    return table[block_m] if has_large_shared(x.device) else _SMALL_SHARED[block_m]


def pointer_table(stack: Tensor) -> Tensor:
    """Return the address of each matrix of stack [experts, rows, columns] as [experts] int64 on its device."""
    first, stride = stack.data_ptr(), stack.stride(0) * stack.element_size()
    return torch.arange(stack.shape[0], dtype=torch.int64, device=stack.device) * stride + first


def reference(x: Tensor, up: Tensor, down: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute pair by pair in fp32, from stacked matrices.

    x     [tokens, hidden]
    up    [experts, 2 * inter, hidden], gate rows first
    down  [experts, hidden, inter]
    ids   [tokens, top_k]; an id outside 0 .. experts - 1 leaves its rows NaN
    out   act [tokens * top_k, inter] and rows [tokens * top_k, hidden], both in the order of pairs
    """
    act = x.new_full((ids.numel(), down.shape[2]), torch.nan)
    rows = x.new_full((ids.numel(), down.shape[1]), torch.nan)
    for pair, expert in enumerate(ids.reshape(-1).tolist()):
        if 0 <= expert < up.shape[0]:
            gate, linear = (up[expert].float() @ x[pair // ids.shape[1]].float()).chunk(2)
            act[pair] = (gate * torch.sigmoid(gate) * linear).to(x.dtype)
            rows[pair] = (down[expert].float() @ act[pair].float()).to(x.dtype)
    return act, rows


@triton.jit
def _matrix(table, expert, ELEMENT: tl.constexpr):
    """Address of the expert's matrix; loads may count on 16 bytes of alignment."""
    return tl.multiple_of(tl.load(table + expert).to(tl.pointer_type(ELEMENT)), 16)  # pyright: ignore[reportArgumentType]


@triton.jit
def _product(
    a_rows,
    b_rows,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Multiply rows at a_rows [BLOCK_M] with rows at b_rows [BLOCK_N], summing over width: [BLOCK_M, BLOCK_N] fp32."""
    lanes = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    a_places = a_rows[:, None] + lanes[None, :]
    b_places = b_rows[:, None] + lanes[None, :]
    for start in range(0, width, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_places)
            b = tl.load(b_places)
        else:
            inside = (start + lanes < width)[None, :]
            a = tl.load(a_places, mask=inside, other=0.0)
            b = tl.load(b_places, mask=inside, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        a_places += BLOCK_K
        b_places += BLOCK_K
    return acc


# The number of tiles changes from step to step and must not make new variants: a compilation takes seconds.
@triton.jit(do_not_specialize=["num_tiles"])
def _gate_up_kernel(
    x, order, tiles, table, act, hidden, inter, num_tiles, x_stride,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    columns = (inter + BLOCK_N - 1) // BLOCK_N
    # Columns of one tile run beside each other: they share its rows, and the expert's next tile finds its matrix in L2.
    tile = tl.program_id(0) // columns
    column = tl.program_id(0) % columns
    expert = tl.load(tiles + tile)
    if expert < 0:
        return
    first = tl.load(tiles + num_tiles + tile)
    end = tl.load(tiles + 2 * num_tiles + tile)
    rows = first + tl.arange(0, BLOCK_M)
    # A row past the end computes the last one again and is not stored: no load needs a mask.
    pairs = tl.load(order + tl.minimum(rows, end - 1))
    a_rows = x + (pairs // TOP_K).to(tl.int64) * x_stride
    # Gate and up rows alternate, so that one product makes both and a thread holds both of a column.
    lanes = tl.arange(0, 2 * BLOCK_N)
    row_of = tl.minimum(column * BLOCK_N + lanes // 2, inter - 1) + (lanes % 2) * inter
    b_rows = _matrix(table, expert, x.dtype.element_ty) + row_of.to(tl.int64) * hidden
    acc = _product(a_rows, b_rows, hidden, BLOCK_M, 2 * BLOCK_N, BLOCK_K, EVEN_K)
    gate, linear = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
    y = gate / (1.0 + tl.exp(-gate)) * linear
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    places = rows.to(tl.int64)[:, None] * inter + cols[None, :]
    tl.store(
        act + places,
        y.to(act.dtype.element_ty),
        mask=(rows < end)[:, None] & (cols < inter)[None, :],
    )


@triton.jit(do_not_specialize=["num_tiles"])
def _down_kernel(
    act, order, tiles, table, out, hidden, inter, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    columns = (hidden + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // columns
    column = tl.program_id(0) % columns
    expert = tl.load(tiles + tile)
    if expert < 0:
        return
    first = tl.load(tiles + num_tiles + tile)
    end = tl.load(tiles + 2 * num_tiles + tile)
    rows = first + tl.arange(0, BLOCK_M)
    real_rows = tl.minimum(rows, end - 1).to(tl.int64)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    b_rows = (
        _matrix(table, expert, act.dtype.element_ty)
        + tl.minimum(cols, hidden - 1).to(tl.int64) * inter
    )
    acc = _product(act + real_rows * inter, b_rows, inter, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
    pairs = tl.load(order + real_rows).to(tl.int64)
    places = pairs[:, None] * hidden + cols[None, :]
    tl.store(
        out + places,
        acc.to(out.dtype.element_ty),
        mask=(rows < end)[:, None] & (cols < hidden)[None, :],
    )


def expert_gemm_up(
    x: Tensor,
    pairs: SortedPairs,
    table: Tensor,
    act: Tensor,
    *,
    top_k: int,
    config: GemmConfig | None = None,
) -> Tensor:
    """Multiply each sorted row's token with its expert's gate and up matrices and apply silu(gate) * up.

    x      [tokens, hidden], rows of any stride; hidden a multiple of 8 and 16-byte alignment for full speed
    pairs  of `expert_sort` for tokens * top_k pairs
    table  [experts] int64, device address of each expert's [2 * inter, hidden], contiguous, 16-byte aligned, dtype of x
    act    [tokens * top_k, inter] contiguous, dtype of x; rows in sorted order; rows below ends[-1] written in full
    Accumulates in fp32. A row does not depend on its neighbours. Reference: `reference`, 1e-2 relative in bf16, 1e-5 in fp32.
    """
    hidden, inter = x.shape[1], act.shape[1]
    if (
        act.shape[0] != x.shape[0] * top_k
        or pairs.order.shape[0] != act.shape[0]
        or not act.is_contiguous()
    ):
        raise ValueError(
            f"expected act of {x.shape[0]} * {top_k} sorted rows, got {tuple(act.shape)}, {pairs.order.shape[0]} pairs"
        )
    _check_table(table, pairs, x.stride(1))
    config = _choose_config(x, pairs.block_m, GATE_UP_CONFIGS) if config is None else config
    num_tiles = pairs.tiles.shape[1]
    if num_tiles:
        _gate_up_kernel[(num_tiles * triton.cdiv(inter, config.block_n),)](
            x, pairs.order, pairs.tiles, table, act, hidden, inter, num_tiles, x.stride(0),
            TOP_K=top_k, BLOCK_M=pairs.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            EVEN_K=hidden % config.block_k == 0, **run_options(config.num_warps, config.num_stages),
        )  # fmt: skip
    return act


def expert_gemm_down(
    act: Tensor,
    pairs: SortedPairs,
    table: Tensor,
    rows: Tensor,
    *,
    config: GemmConfig | None = None,
) -> Tensor:
    """Multiply each sorted row with its expert's down matrix and put the result at its pair.

    act    [tokens * top_k, inter] contiguous, of `expert_gemm_up`
    table  [experts] int64, device address of each expert's [hidden, inter], contiguous, 16-byte aligned, dtype of act
    rows   [tokens * top_k, hidden] contiguous; row token * top_k + rank of every sorted pair is written in full, without the
           router's weight: `combine_rows` applies it. Rows of pairs that nobody sorted are left alone.
    Accumulates in fp32. Reference: `reference`, 1e-2 relative in bf16, 1e-5 in fp32.
    """
    inter, hidden = act.shape[1], rows.shape[1]
    if rows.shape[0] != act.shape[0] or not (act.is_contiguous() and rows.is_contiguous()):
        raise ValueError(
            f"expected contiguous act and rows of equal length, got {tuple(act.shape)}, {tuple(rows.shape)}"
        )
    _check_table(table, pairs, 1)
    config = _choose_config(act, pairs.block_m, DOWN_CONFIGS) if config is None else config
    num_tiles = pairs.tiles.shape[1]
    if num_tiles:
        _down_kernel[(num_tiles * triton.cdiv(hidden, config.block_n),)](
            act, pairs.order, pairs.tiles, table, rows, hidden, inter, num_tiles,
            BLOCK_M=pairs.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            EVEN_K=inter % config.block_k == 0, **run_options(config.num_warps, config.num_stages),
        )  # fmt: skip
    return rows


def expert_gemm(
    x: Tensor,
    pairs: SortedPairs,
    up_table: Tensor,
    down_table: Tensor,
    act: Tensor,
    rows: Tensor,
    *,
    top_k: int,
) -> Tensor:
    """Run both products: `expert_gemm_up`, then `expert_gemm_down`. Returns rows [tokens * top_k, hidden], unweighted."""
    expert_gemm_up(x, pairs, up_table, act, top_k=top_k)
    return expert_gemm_down(act, pairs, down_table, rows)


def _check_table(table: Tensor, pairs: SortedPairs, stride: int) -> None:
    if table.dtype != torch.int64 or table.shape != pairs.ends.shape or stride != 1:
        raise ValueError(
            f"expected {pairs.ends.shape[0]} int64 addresses, unit stride, got {table.dtype} {tuple(table.shape)}, {stride}"
        )
