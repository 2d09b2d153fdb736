"""Gated feed-forward: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freetoken.kernels.silu_mul import silu_mul
from freetoken.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Dense feed-forward.

    up    [2 * inter, hidden], gate rows first
    down  [hidden, inter]
    """

    up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [tokens, hidden] to [tokens, hidden]."""
        return self.down(silu_mul(self.up(x)))
