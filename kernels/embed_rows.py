"""First node of a decode step: each sequence's token row of the embedding table, and the rotary angles of its position."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels.rope import angles
from freetoken.kernels.triton_import import (
    INTERPRETED,
    early_launch,
    libdevice,
    next_power_of_2,
    tl,
    tl_cuda,
    triton,
)

_BLOCK = 1024
"""Columns a program copies. The whole launch moves a few KB; the size does not matter."""


def reference(
    tokens: Tensor,
    table: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    attention_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return h [batch, hidden] and the angles cos and sin [batch, half]."""
    return table[tokens.long()], *angles(positions.long(), frequencies, attention_scale)


@triton.jit
def _kernel(
    tokens_ptr, table_ptr, positions_ptr, frequencies_ptr, h_ptr, cos_ptr, sin_ptr, hidden, half, attention_scale,
    BLOCK: tl.constexpr, HALF_PAD: tl.constexpr, LIBDEVICE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    if tl.program_id(0) == 0:
        pair = tl.arange(0, HALF_PAD)
        turn = tl.load(positions_ptr + row).to(tl.float32) * tl.load(
            frequencies_ptr + pair, mask=pair < half, other=0.0
        )
        # The hardware's own cosine is only good near 0; positions go to 256k.
        cos = libdevice.cos(turn) if LIBDEVICE else tl.cos(turn)
        sin = libdevice.sin(turn) if LIBDEVICE else tl.sin(turn)
        tl.store(cos_ptr + row * half + pair, cos * attention_scale, mask=pair < half)
        tl.store(sin_ptr + row * half + pair, sin * attention_scale, mask=pair < half)
    else:
        col = (tl.program_id(0) - 1) * BLOCK + tl.arange(0, BLOCK)
        token = tl.load(tokens_ptr + row).to(tl.int64)
        tl.store(
            h_ptr + row * hidden + col,
            tl.load(table_ptr + token * hidden + col, mask=col < hidden, other=0.0),
            mask=col < hidden,
        )


def embed_rows(
    tokens: Tensor, table: Tensor, positions: Tensor, frequencies: Tensor, attention_scale: float = 1.0, *,
    h: Tensor, cos: Tensor, sin: Tensor,
) -> None:  # fmt: skip
    """Look up the step's tokens and compute the angles that all layers with these frequencies share.

    tokens       [batch] int32 or int64, each in the vocabulary
    table        [vocab, hidden] contiguous
    positions    [batch] int32 or int64
    frequencies  [half] float32, radians a position
    h            [batch, hidden] dtype of table, written
    cos, sin     [batch, half] float32, written, multiplied by attention_scale
    Reference: `reference`; h exact, angles 1e-5 absolute.
    """
    (batch, hidden), half = h.shape, frequencies.shape[0]
    if (
        tokens.shape[0] != batch
        or table.shape[1] != hidden
        or h.dtype != table.dtype
        or not (h.is_contiguous() and table.is_contiguous())
    ):
        raise ValueError(
            f"expected h of {[tokens.shape[0], table.shape[1]]} {table.dtype}, got {list(h.shape)} {h.dtype}"
        )
    if cos.shape != sin.shape or tuple(cos.shape) != (batch, half) or cos.dtype != torch.float32:
        raise ValueError(
            f"expected float32 angles {[batch, half]}, got {list(cos.shape)} {cos.dtype}"
        )
    early = early_launch(h.device)
    _kernel[(1 + triton.cdiv(hidden, _BLOCK), batch)](
        tokens, table, positions, frequencies, h, cos, sin, hidden, half, attention_scale,
        BLOCK=_BLOCK, HALF_PAD=next_power_of_2(half), LIBDEVICE=not INTERPRETED, EARLY=early,
        num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
