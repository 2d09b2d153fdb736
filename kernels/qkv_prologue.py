"""What happens to fused q, k, v rows before attention, in one pass: norm of q and k, clip, rotation, keys and values to the pool.

`qkv_prologue` norms each head by itself or not at all; `whole_norm` is the separate pass for models that norm all query
heads together and all key heads together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.kernels.triton_import import early_launch, next_power_of_2, tl, tl_cuda, triton

_ELEMENTS = 1024
"""Elements of a program's tile. A decode step has a few programs of one warp either way; a long prefill wants few programs."""


def reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, *,
    norm: Tensor | None = None, eps: float = 0.0, clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim] in fp32."""
    rows = qkv.float().view(qkv.shape[0], heads + 2 * kv_heads, -1)
    qk, v = rows[:, : heads + kv_heads], rows[:, heads + kv_heads :]
    if norm is not None:
        qk = qk * (qk.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.float()
    if clip is not None:
        qk, v = qk.clamp(-clip, clip), v.clamp(-clip, clip)
    half = cos.shape[-1]
    first, second, rest = qk[..., :half], qk[..., half : 2 * half], qk[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    qk = torch.cat([first * c - second * s, second * c + first * s, rest], dim=-1)
    return qk[:, :heads], qk[:, heads:], v


@triton.jit
def _part(
    src, out, norm_ptr, cols, keep, factor, clip, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, CLIP: tl.constexpr
):  # fmt: skip
    """Load some columns of some heads, normed and clipped; v heads (out of `norm`'s mask) get neither norm nor weight."""
    x = tl.load(src + cols[None, :], mask=keep, other=0.0).to(tl.float32)
    if NORM:
        x = (
            x
            * factor[:, None]
            * tl.load(norm_ptr + cols[None, :], mask=out & keep, other=1.0).to(tl.float32)
        )
    if CLIP:
        x = tl.minimum(tl.maximum(x, -clip), clip)
    return x


@triton.jit
def _kernel(
    qkv_ptr, norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, slots_ptr, eps, clip,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, CLIP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = (head < HEADS + 2 * KV_HEADS)[:, None]
    is_q, is_qk = head < HEADS, head < HEADS + KV_HEADS
    src = qkv_ptr + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head[:, None] * HEAD_DIM
    gain = norm_ptr + head[:, None] * HEAD_DIM
    # Where each head goes: q stays, k and v move to their pools; both as int64 element offsets.
    slot = tl.load(slots_ptr + token).to(tl.int64) * (KV_HEADS * HEAD_DIM)
    k_row = k_ptr + slot + (head - HEADS)[:, None] * HEAD_DIM
    v_row = v_ptr + slot + (head - HEADS - KV_HEADS)[:, None] * HEAD_DIM
    to_k, to_v = (is_qk & (head >= HEADS))[:, None], (head >= HEADS + KV_HEADS)[:, None] & real
    pair = tl.arange(0, HALF_PAD)
    in_half = (pair < HALF)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_PAD)
    in_rest = (rest < HEAD_DIM)[None, :] & real
    factor = tl.zeros([BLOCK], tl.float32)
    if NORM:
        first = tl.load(src + pair[None, :], mask=real & in_half, other=0.0).to(tl.float32)
        second = tl.load(src + HALF + pair[None, :], mask=real & in_half, other=0.0).to(tl.float32)
        squares = tl.sum(first * first + second * second, 1)
        if 2 * HALF < HEAD_DIM:
            last = tl.load(src + rest[None, :], mask=in_rest, other=0.0).to(tl.float32)
            squares += tl.sum(last * last, 1)
        factor = tl.where(is_qk, tl.rsqrt(squares / HEAD_DIM + eps), 1.0)
    first = _part(
        src, is_qk[:, None], gain, pair, real & in_half, factor, clip, HEAD_DIM, NORM, CLIP
    )
    second = _part(
        src, is_qk[:, None], gain, HALF + pair, real & in_half, factor, clip, HEAD_DIM, NORM, CLIP
    )
    c = tl.load(cos_ptr + token * HALF + pair, mask=pair < HALF, other=1.0)[None, :]
    s = tl.load(sin_ptr + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    turned_first = tl.where(is_qk[:, None], first * c - second * s, first).to(
        qkv_ptr.dtype.element_ty
    )
    turned_second = tl.where(is_qk[:, None], second * c + first * s, second).to(
        qkv_ptr.dtype.element_ty
    )
    tl.store(src + pair[None, :], turned_first, mask=is_q[:, None] & in_half)
    tl.store(src + HALF + pair[None, :], turned_second, mask=is_q[:, None] & in_half)
    tl.store(k_row + pair[None, :], turned_first, mask=to_k & in_half)
    tl.store(k_row + HALF + pair[None, :], turned_second, mask=to_k & in_half)
    tl.store(v_row + pair[None, :], turned_first, mask=to_v & in_half)
    tl.store(v_row + HALF + pair[None, :], turned_second, mask=to_v & in_half)
    if 2 * HALF < HEAD_DIM:
        last = _part(
            src, is_qk[:, None], gain, rest, in_rest, factor, clip, HEAD_DIM, NORM, CLIP
        ).to(qkv_ptr.dtype.element_ty)
        tl.store(src + rest[None, :], last, mask=is_q[:, None] & in_rest)
        tl.store(k_row + rest[None, :], last, mask=to_k & in_rest)
        tl.store(v_row + rest[None, :], last, mask=to_v & in_rest)


def qkv_prologue(
    qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor, *,
    norm: Tensor | None = None, eps: float = 0.0, clip: float | None = None, block: int | None = None,
) -> Tensor:  # fmt: skip
    """Norm, clip and rotate q and k of each token; q stays in qkv, k and v go to their slots of the pools.

    qkv             [tokens, (heads + 2 * kv_heads) * head_dim] contiguous, any number of tokens; q heads are changed in
                    place, k and v heads keep what they were
    cos, sin        [tokens, half] float32 contiguous, 2 * half <= head_dim; what lies beyond 2 * half is not rotated
    slots           [tokens] int32 or int64, all different (rows that are only padding may share a slot nobody reads)
    k_pool, v_pool  [num_slots, kv_heads, head_dim] contiguous, dtype of qkv; written at slots
    norm            [heads + kv_heads, head_dim] a weight for each head, or None
    clip            q, k and v are clamped to +-clip after the norm
    block           heads a program, a power of two; None picks
    Returns qkv. Reference: `reference`, 1e-2 relative in bf16, 1e-5 in fp32. Sources: arXiv 2104.09864, 2302.05442.
    """
    kv_heads, head_dim = k_pool.shape[1:]
    all_heads, half = qkv.shape[1] // head_dim, cos.shape[1]
    heads = all_heads - 2 * kv_heads
    if (
        heads < 1
        or qkv.shape[1] != all_heads * head_dim
        or 2 * half > head_dim
        or not qkv.is_contiguous()
    ):
        raise ValueError(
            f"expected contiguous qkv of whole heads of {head_dim} and rotary pairs in them, got {list(qkv.shape)}, cos {list(cos.shape)}"
        )
    if (
        cos.shape[0] != qkv.shape[0]
        or cos.shape != sin.shape
        or slots.shape[0] != qkv.shape[0]
        or cos.dtype != torch.float32
    ):
        raise ValueError(
            f"expected float32 angles and a slot for each of {qkv.shape[0]} tokens, got cos {list(cos.shape)} {cos.dtype}, slots {list(slots.shape)}"
        )
    if norm is not None and tuple(norm.shape) != (heads + kv_heads, head_dim):
        raise ValueError(f"expected norm {[heads + kv_heads, head_dim]}, got {list(norm.shape)}")
    if qkv.shape[0] == 0:
        return qkv
    tokens, early = qkv.shape[0], early_launch(qkv.device)
    if block is None:
        # One head a program while there are few tokens: a decode step is a matter of latency.
        block = 1 if tokens <= 8 else min(next_power_of_2(all_heads), max(1, _ELEMENTS // head_dim))
    options = {"launch_pdl": True} if early else {}
    _kernel[(tokens, triton.cdiv(all_heads, block))](
        qkv, qkv if norm is None else norm, cos, sin, k_pool, v_pool, slots, eps, 0.0 if clip is None else clip,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, HALF=half, HALF_PAD=next_power_of_2(half),
        REST_PAD=next_power_of_2(max(1, head_dim - 2 * half)), BLOCK=block, NORM=norm is not None, CLIP=clip is not None,
        EARLY=early, num_warps=1 if block * head_dim <= 256 else 4, **options,
    )  # fmt: skip
    return qkv


@triton.jit
def _whole_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, row, eps,
    Q_WIDTH: tl.constexpr, K_WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    is_k = tl.program_id(1)
    width = tl.where(is_k == 1, K_WIDTH, Q_WIDTH)
    cols = tl.arange(0, WIDTH_PAD)
    x_ptr = qkv_ptr + tl.program_id(0).to(tl.int64) * row + is_k * Q_WIDTH + cols
    x = tl.load(x_ptr, mask=cols < width, other=0.0).to(tl.float32)
    q_width = tl.where(is_k == 1, 0, Q_WIDTH)
    k_width = tl.where(is_k == 1, K_WIDTH, 0)
    q_gain = tl.load(q_norm_ptr + cols, mask=cols < q_width, other=0.0).to(tl.float32)
    k_gain = tl.load(k_norm_ptr + cols, mask=cols < k_width, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * (q_gain + k_gain)
    tl.store(x_ptr, y.to(qkv_ptr.dtype.element_ty), mask=cols < width)


def whole_norm(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
    """Norm all query heads of a token together and all its key heads together, in place, before `qkv_prologue`.

    qkv     [tokens, q width + 2 * k width] contiguous
    q_norm  [heads * head_dim]
    k_norm  [kv_heads * head_dim]
    Returns qkv. Reference: rms_norm.reference over each part, 1e-2 relative in bf16, 1e-5 in fp32.
    """
    q_width, k_width = q_norm.shape[0], k_norm.shape[0]
    if qkv.shape[1] != q_width + 2 * k_width or not qkv.is_contiguous():
        raise ValueError(
            f"expected contiguous qkv of width {q_width + 2 * k_width}, got {list(qkv.shape)}"
        )
    early, pad = early_launch(qkv.device), next_power_of_2(max(q_width, k_width))
    if qkv.shape[0]:
        _whole_kernel[(qkv.shape[0], 2)](
            qkv, q_norm, k_norm, qkv.shape[1], eps, Q_WIDTH=q_width, K_WIDTH=k_width, WIDTH_PAD=pad, EARLY=early,
            num_warps=min(16, max(1, pad // 512)), **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return qkv
