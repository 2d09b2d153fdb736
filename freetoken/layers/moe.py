"""Sparse feed-forward: a router picks a few experts for each token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freetoken.kernels.moe_experts import moe_experts
from freetoken.kernels.router_topk import router_topk
from freetoken.layers.cpu import CpuKernels
from freetoken.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class SparseMoe:
    """Softmax router and stacked experts, all resident.

    router  [experts, hidden]
    up      [experts, 2 * inter, hidden], gate rows first
    down    [experts, hidden, inter]
    cpu     native code for few rows, or None
    """

    router: Linear
    up: Tensor
    down: Tensor
    top_k: int
    renormalize: bool
    """Divide the chosen weights by their sum."""
    cpu: CpuKernels | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [tokens, hidden] to [tokens, hidden]."""
        ids, weights = router_topk(self.router(x), self.top_k, renormalize=self.renormalize)
        if self.cpu is not None and self.cpu.has_moe(x.shape[0], self.top_k, self.up.shape[0]):
            return self.cpu.moe(x, self.up, self.down, ids, weights)
        return moe_experts(x, self.up, self.down, ids, weights)
