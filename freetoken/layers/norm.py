"""Root-mean-square norm as a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freetoken.kernels.rms_norm import rms_norm


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Normalise the last dimension.

    weight  [width], or [heads, width] for one weight a head
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return norm(x), shape and dtype of x."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to the residual stream in place and return norm(residual)."""
        return rms_norm(x, self.weight, self.eps, residual=residual)
