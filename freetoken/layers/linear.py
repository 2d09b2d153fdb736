"""A matrix with an optional bias, and the embedding table. Weights are [out, in]."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from freetoken.layers.cpu import CpuKernels


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x @ weight.T + bias.

    weight  [out, in]
    bias    [out] or None
    cpu     native code for few rows, or None
    """

    weight: Tensor
    bias: Tensor | None = None
    cpu: CpuKernels | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [tokens, in] to [tokens, out], dtype of x."""
        if self.cpu is not None and self.cpu.has_linear(x.shape[0]):
            return self.cpu.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of a table by token id.

    weight  [vocab, hidden]
    """

    weight: Tensor

    def __call__(self, tokens: Tensor) -> Tensor:
        """Look up tokens [tokens] int64, return [tokens, hidden] in memory of its own."""
        return F.embedding(tokens, self.weight)
