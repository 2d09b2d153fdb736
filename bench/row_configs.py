"""Inputs, and the configs that a sweep of row kernels tries."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels.rows import RowConfig

_HELD = 72
"""Weight elements a thread that are tried first: enough bytes on their way, room in registers."""


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    """Draw a normal bfloat16 tensor on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).mul_(scale).to(torch.bfloat16)


def candidates(
    first: RowConfig, width: int, *, tiles: int = 1, piece: int | None = None, limit: int = 7
) -> list[RowConfig]:
    """Return the served config and others whose threads load 16 bytes at a time."""
    piece = piece or width
    found: list[tuple[float, RowConfig]] = []
    for rows in (1, 2, 4, 8, 16):
        for warps in (1, 2, 4, 8):
            for chunk in (256, 512, 1024, 2048, 4096):
                padded = -(-piece // chunk) * chunk
                held = tiles * rows * padded * (width // piece) / (32 * warps)
                fills = rows * chunk >= 256 * warps and padded <= 1.34 * piece
                if fills and 24 <= held <= 200:
                    shares_x = rows * chunk != 256 * warps
                    found.append((abs(held - _HELD) + 8 * shares_x, RowConfig(rows, warps, chunk)))
    found.sort(key=lambda entry: entry[0])
    return [first, *[config for _, config in found if config != first][:limit]]
