"""Whole rows of a weight matrix in registers: what the one-token products of a decode step share.

A program owns a few rows of the matrix and asks for all of their bytes before it waits for anything, so that memory is
busy while the kernel before still runs. It then takes the step's tokens one after another through the same
arithmetic: a token's result is the same bits whatever stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from freetoken.kernels.triton_import import early_launch, next_power_of_2, tl, triton

MAX_BATCH = 8
"""Tokens a launch takes. The loop over them is unrolled: at double, code and compile time double as well."""
_PER_THREAD = 64
"""Weight elements a thread holds. At half, too few bytes are on their way; at double, registers run out in fp32."""


@dataclass(frozen=True, slots=True)
class RowConfig:
    """How rows are dealt out: `rows` a program, `warps` a program, `chunk` columns a tile (a power of two)."""

    rows: int
    warps: int
    chunk: int


def default_config(width: int, *, tiles: int = 1, chunk_of: int | None = None) -> RowConfig:
    """Pick for rows of `width` elements when nothing was measured.

    tiles     rows side by side: 2 for gate and up
    chunk_of  a row is made of pieces this wide, which a tile does not cross; None: of one
    """
    rows = 4
    while rows > 1 and tiles * rows * width > 8 * 32 * _PER_THREAD:
        rows //= 2
    chunk = best_chunk(chunk_of or width)
    # A thread loads 8 elements of a tile at once; with more warps than that fills, they would load the same ones.
    warps = min(
        next_power_of_2(-(-tiles * rows * width // (32 * _PER_THREAD))),
        max(1, rows * chunk // 256),
        16,
    )
    return RowConfig(rows, warps, chunk)


def best_chunk(width: int) -> int:
    """Return the columns of a tile: the largest power of two in `width`, but 256 to 2048 so that a warp has 16 bytes a thread."""
    return next_power_of_2(width) if width < 256 else min(2048, max(256, width & -width))


def launch_options(x: Tensor, config: RowConfig) -> dict[str, Any]:
    """Return the kernel's tile sizes and flags and the launch's own settings."""
    early = early_launch(x.device)
    options: dict[str, Any] = {
        "ROWS": config.rows,
        "CHUNK": config.chunk,
        "SPREAD": config.rows * config.chunk <= 256 * config.warps,
        "EARLY": early,
        "num_warps": config.warps,
    }
    return options | {"launch_pdl": True} if early else options


def check_batch(x: Tensor, width: int) -> None:
    """Raise ValueError unless x is contiguous [1 to MAX_BATCH, width]."""
    if (
        x.dim() != 2
        or x.shape[1] != width
        or not 1 <= x.shape[0] <= MAX_BATCH
        or not x.is_contiguous()
    ):
        raise ValueError(
            f"expected contiguous x [1 to {MAX_BATCH}, {width}], got {list(x.shape)}, strides {x.stride()}"
        )


@triton.jit
def load_rows(rows_ptr, keep, K: tl.constexpr, CHUNK: tl.constexpr):
    """Load rows_ptr [ROWS, 1] as a tuple of [ROWS, CHUNK]; they are used once, so they leave the caches first."""
    tiles = ()
    for start in tl.static_range(0, K, CHUNK):  # pyright: ignore[reportGeneralTypeIssues]
        cols = (start + tl.arange(0, CHUNK))[None, :]
        tiles = tiles + (
            tl.load(
                rows_ptr + cols, mask=keep & (cols < K), other=0.0, eviction_policy="evict_first"
            ),
        )
    return tiles


@triton.jit
def load_row(
    row_ptr, K: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, SPREAD: tl.constexpr
):
    """Load one row as a tuple of [1, CHUNK], or, if SPREAD, of [ROWS, CHUNK] with equal rows.

    SPREAD is for tiles of which a thread has one load: it then loads the columns it needs and no thread waits for another.
    """
    tiles = ()
    for start in tl.static_range(0, K, CHUNK):  # pyright: ignore[reportGeneralTypeIssues]
        cols = start + tl.arange(0, CHUNK)
        if SPREAD:
            spread = tl.zeros([ROWS, 1], tl.int32) + cols[None, :]
            tiles = tiles + (tl.load(row_ptr + spread, mask=spread < K, other=0.0),)
        else:
            tiles = tiles + (tl.load(row_ptr + cols, mask=cols < K, other=0.0)[None, :],)
    return tiles


@triton.jit
def normed(x, gain, NORM: tl.constexpr):
    """Turn x into fp32, times gain if NORM; the norm's own factor, `norm_factor`, is applied to the result."""
    tiles = ()
    for c in tl.static_range(len(x)):  # pyright: ignore[reportGeneralTypeIssues]
        if NORM:
            tiles = tiles + (x[c].to(tl.float32) * gain[c].to(tl.float32),)
        else:
            tiles = tiles + (x[c].to(tl.float32),)
    return tiles


@triton.jit
def norm_factor(x, eps, K: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) of a row held as tiles: [1] or [ROWS]."""
    squares = x[0].to(tl.float32) * x[0].to(tl.float32)
    for c in tl.static_range(1, len(x)):  # pyright: ignore[reportGeneralTypeIssues]
        squares += x[c].to(tl.float32) * x[c].to(tl.float32)
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit
def dot_rows(w, x):
    """Multiply tiles of rows [ROWS, CHUNK] with those of one row: [ROWS] fp32."""
    total = w[0].to(tl.float32) * x[0]
    for c in tl.static_range(1, len(w)):  # pyright: ignore[reportGeneralTypeIssues]
        total += w[c].to(tl.float32) * x[c]
    return tl.sum(total, 1)
