"""The native CPU operations on tensors: decode steps, a few rows at a time.

The one place that decides where native code is used; every layer has a torch path beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.kernels.paged_attention import AttentionPlan
from freetoken.native import Attention, Linear, Moe, Native, Type

TYPES = {torch.float32: Type.F32, torch.bfloat16: Type.BF16}


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Most rows for which native code is the faster way."""

    linear: int
    expert: int
    """Of each expert on average: tokens * top_k / experts."""


ROW_LIMITS = {
    torch.float32: RowLimits(linear=32, expert=16),
    torch.bfloat16: RowLimits(linear=8, expert=2),
}
"""Measured 2026-12 on 2 cores of an AMD EPYC with AVX512-BF16, whole steps of a 30-layer model with
8 experts of 576 x 1536. fp32, 64 rows: 180 ms native experts, 319 torch; 128 rows: 386 and 441.
bf16, 8 rows: 35 ms native, 42 torch; 16 rows: 56 and 53. Double loses in bf16, half
wastes decode.
"""


class CpuKernels:
    """Runs layers' products natively. Inputs and results have the model's dtype, sums are fp32."""

    def __init__(self, native: Native, dtype: torch.dtype) -> None:
        """`native` is owned by the caller and must stay open while layers run."""
        self._native = native
        self._dtype = dtype
        self._type = TYPES[dtype]
        self._limits = ROW_LIMITS[dtype]

    def has_linear(self, tokens: int) -> bool:
        """Whether `linear` is the way for so many rows."""
        return 0 < tokens <= self._limits.linear

    def has_moe(self, tokens: int, top_k: int, experts: int) -> bool:
        """Whether `moe` is the way for so many rows."""
        return 0 < tokens * top_k <= self._limits.expert * experts

    def has_attention(self, kv_dtype: torch.dtype) -> bool:
        """Whether `attend` reads keys and values of this dtype."""
        return kv_dtype in TYPES

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Map x [tokens, in] by weight [out, in], contiguous, to [tokens, out]."""
        x = x.to(torch.float32).contiguous()
        out = torch.empty(x.shape[0], weight.shape[0])
        self._native.linear(
            Linear(
                type=self._type,
                tokens=x.shape[0],
                rows=weight.shape[0],
                columns=weight.shape[1],
                x=x.data_ptr(),
                weight=weight.data_ptr(),
                out=out.data_ptr(),
            )
        )
        if bias is not None:
            out += bias
        return out.to(self._dtype)

    def moe(self, x: Tensor, up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run each token of x [tokens, hidden] through its experts; shapes as in `moe_experts`."""
        x, ids, weights = x.to(torch.float32).contiguous(), ids.contiguous(), weights.contiguous()
        out = torch.empty(x.shape)
        self._native.moe(
            Moe(
                type=self._type,
                top_k=ids.shape[1],
                tokens=x.shape[0],
                experts=up.shape[0],
                hidden=x.shape[1],
                inter=down.shape[2],
                x=x.data_ptr(),
                expert_ids=ids.data_ptr(),
                expert_weights=weights.data_ptr(),
                gate_up=up.data_ptr(),
                down=down.data_ptr(),
                out=out.data_ptr(),
            )
        )
        return out.to(self._dtype)

    def attend(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        plan: AttentionPlan,
        scale: float,
        out: Tensor,
    ) -> None:
        """Attend from the rows of `plan.decode`; q and out [tokens, heads, head_dim]."""
        decode = plan.decode
        if decode is None:
            return
        queries = q.index_select(0, decode.rows).to(torch.float32)
        result = torch.empty(queries.shape)
        self._native.attention(
            Attention(
                type=TYPES[k_pool.dtype],
                heads=q.shape[1],
                kv_heads=k_pool.shape[1],
                head_dim=q.shape[2],
                page_tokens=plan.page_tokens,
                window=plan.window or 0,
                sequences=queries.shape[0],
                table_columns=decode.page_table.shape[1],
                slots=k_pool.shape[0],
                scale=scale,
                q=queries.data_ptr(),
                keys=k_pool.data_ptr(),
                values=v_pool.data_ptr(),
                page_table=decode.page_table.data_ptr(),
                kv_lens=decode.kv_lens.data_ptr(),
                out=result.data_ptr(),
            )
        )
        out.index_copy_(0, decode.rows, result.to(out.dtype))


def cpu_kernels(
    native: Native | None, dtype: torch.dtype, device: torch.device
) -> CpuKernels | None:
    """Return the native operations if there are any for weights of this dtype on this device."""
    if native is None or device.type != "cpu" or dtype not in TYPES:
        return None
    return CpuKernels(native, dtype)
