"""Products of a few tokens with a weight matrix on the matrix units: weight tiles stream, tokens are the narrow side.

The tokens are always padded to LANES columns and every batch size runs the same instructions: a token's result is the
same bits whatever stands beside it. The matrix units want bfloat16; other types use `rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freetoken.kernels.rows import MAX_BATCH
from freetoken.kernels.triton_import import early_launch, next_power_of_2, tl, triton

LANES = MAX_BATCH
"""Columns of the narrow side, which is the matrix unit's own width."""
_LEAST_ELEMENTS = 4 << 20
"""Smaller matrices are a matter of latency, which is lower with whole rows in registers."""
_LINE = 64
"""Elements of a line of the second-level cache."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How a product is dealt out.

    rows    of the weight a program, a power of two, at least 16
    groups  parts of the width that warps take side by side, a power of two
    depth   columns of a part that a step takes
    stages  steps on their way
    ahead   ask for all of a program's rows before the launch before has ended
    """

    rows: int
    groups: int
    depth: int
    stages: int
    ahead: bool = True

    @property
    def warps(self) -> int:
        """Warps of a program: one for 16 rows of a part."""
        return self.rows // 16 * self.groups


def default_tile(rows: int) -> TileConfig:
    """Pick for a weight of so many rows when nothing was measured."""
    return TileConfig(16, 4, 64, 4) if rows <= 32_768 else TileConfig(64, 2, 64, 4)


def is_tiled(x: Tensor, weight: Tensor) -> bool:
    """Whether the product runs on the matrix units when no config says so."""
    return (
        x.dtype == torch.bfloat16
        and weight.shape[1] % 16 == 0
        and weight.numel() >= _LEAST_ELEMENTS
    )


def tile_options(x: Tensor, width: int, config: TileConfig) -> dict[str, Any]:
    """Return the kernel's tile sizes and flags and the launch's own settings."""
    early = early_launch(x.device)
    options: dict[str, Any] = {
        "TOKENS": LANES,
        "ROWS": config.rows,
        "GROUPS": config.groups,
        "DEPTH": config.depth,
        "STAGES": config.stages,
        "LINES": next_power_of_2(-(-width // _LINE)) if config.ahead and early else 0,
        "EARLY": early,
        "num_warps": config.warps,
    }
    return options | {"launch_pdl": True} if early else options


@triton.jit
def ask_ahead(rows_ptr, K: tl.constexpr, LINES: tl.constexpr):
    """Bring rows_ptr [ROWS, 1] of K elements into the second-level cache without waiting for them."""
    at = rows_ptr + tl.minimum(tl.arange(0, LINES) * 64, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def tile_product(
    x_ptr, norm_ptr, rows_ptr, up_ptr, batch, eps,
    K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Multiply rows_ptr (and up_ptr) [ROWS, 1] with the normed tokens: two of [ROWS, TOKENS] fp32, the second for up.

    The norm's own factor is applied to the result; a token times the gain is rounded once, to the weight's type.
    """
    group = tl.arange(0, GROUPS)[:, None, None]
    token = tl.arange(0, TOKENS)[None, :, None]
    depth = group * DEPTH + tl.arange(0, DEPTH)[None, None, :]
    total = tl.zeros([GROUPS, ROWS, TOKENS], tl.float32)
    up_total = tl.zeros([GROUPS, ROWS, TOKENS], tl.float32)
    squares = tl.zeros([GROUPS, TOKENS, DEPTH], tl.float32)
    for start in tl.range(0, K, GROUPS * DEPTH, num_stages=STAGES):
        cols = start + depth
        w = tl.load(rows_ptr[None, :, :] + cols, mask=cols < K, other=0.0)
        x = tl.load(x_ptr + token * K + cols, mask=(token < batch) & (cols < K), other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            gain = tl.load(norm_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
            x = (wide * gain).to(w.dtype)
        x = tl.permute(x, (0, 2, 1))
        total = tl.dot(w, x, total)
        if GATED:
            up = tl.load(up_ptr[None, :, :] + cols, mask=cols < K, other=0.0)
            up_total = tl.dot(up, x, up_total)
    y = tl.sum(total, 0)
    u = tl.sum(up_total, 0) if GATED else y
    if NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / K + eps)[None, :]
        y = y * factor
        u = u * factor
    return y, u
