"""Grouped-query attention over paged keys and values. Knows a step's plan, not page owners."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freetoken.kernels.kv_store import kv_store
from freetoken.kernels.paged_attention import AttentionPlan, paged_attention
from freetoken.kernels.rms_norm import rms_norm
from freetoken.kernels.rope import rope
from freetoken.layers.cpu import CpuKernels
from freetoken.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What a step says to one attention layer.

    cos, sin        [tokens, rope dim / 2] float32
    write_slots     [tokens] int64
    k_pool, v_pool  [num_slots, kv_heads, head_dim], this layer's
    """

    cos: Tensor
    sin: Tensor
    write_slots: Tensor
    k_pool: Tensor
    v_pool: Tensor
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Norm of each query and key head by itself.

    weight  [heads + kv_heads, head_dim]
    """

    weight: Tensor
    eps: float

    def __call__(self, q: Tensor, k: Tensor, qk: Tensor) -> None:
        """Normalise in place qk [tokens, heads + kv_heads, head_dim]; q and k are views of it."""
        rms_norm(qk, self.weight, self.eps, out=qk)


@dataclass(frozen=True, slots=True)
class WholeNorm:
    """Norm of all query heads together and of all key heads together.

    q_weight  [heads * head_dim]
    k_weight  [kv_heads * head_dim]
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float

    def __call__(self, q: Tensor, k: Tensor, qk: Tensor) -> None:
        """Normalise in place q [tokens, heads * head_dim] and k [tokens, kv_heads * head_dim]."""
        rms_norm(q, self.q_weight, self.eps, out=q)
        rms_norm(k, self.k_weight, self.eps, out=k)


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Softmax attention; `heads / kv_heads` query heads share a key head.

    qkv  [(heads + 2 * kv_heads) * head_dim, hidden], query rows first, then key, then value
    out  [hidden, heads * head_dim]
    """

    qkv: Linear
    out: Linear
    qk_norm: HeadNorm | WholeNorm | None
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    clip: float | None = None
    """Queries, keys and values are clamped to +-clip before the rotation."""
    cpu: CpuKernels | None = None

    def __call__(self, x: Tensor, step: AttentionStep) -> Tensor:
        """Attend for x [tokens, hidden], return as much; writes the step's keys and values."""
        heads, kv_heads, width = self.heads, self.kv_heads, self.head_dim
        qkv = self.qkv(x)
        by_head = qkv.view(-1, heads + 2 * kv_heads, width)
        qk = by_head[:, : heads + kv_heads]
        if self.qk_norm is not None:
            self.qk_norm(
                qkv[:, : heads * width], qkv[:, heads * width : (heads + kv_heads) * width], qk
            )
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        rope(qk, step.cos, step.sin, out=qk)
        kv_store(
            by_head[:, heads : heads + kv_heads],
            by_head[:, heads + kv_heads :],
            step.k_pool,
            step.v_pool,
            step.write_slots,
        )
        q = by_head[:, :heads]
        attended = paged_attention(q, step.k_pool, step.v_pool, step.plan, self.scale)
        if self.cpu is not None:
            self.cpu.attend(q, step.k_pool, step.v_pool, step.plan, self.scale, attended)
        return self.out(attended.view(-1, heads * width))
