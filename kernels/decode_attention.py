"""Attention of one new token a sequence over its paged keys and values: out = softmax(scale * q k^T [+ sink]) v, per head.

A sequence's keys are dealt out to a fixed number of splits; the last split to finish for a (sequence, key head) combines.
How many splits work, and on what, depends on the sequence's own length alone. With `Prologue` the launch also does what
`qkv_prologue` does, for the one token: norm and rotation of q and k, and the new key's and value's way into the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.kernels.triton_import import early_launch, next_power_of_2, tl, tl_cuda, triton

_LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """`splits` a (sequence, key head), `keys` a tile, `warps` a program, `stages` of tiles on their way."""

    splits: int
    keys: int = 64
    warps: int = 4
    stages: int = 3


CONFIGS: dict[tuple[int, int, int], AttentionConfig] = {
    (4, 8, 128): AttentionConfig(splits=32, keys=64, warps=2, stages=3)
}
"""By (kv_heads, heads / kv_heads, head_dim). Best of a sweep on an H200, 2026-12-01, bf16."""


@dataclass(frozen=True, slots=True)
class Prologue:
    """What a fused launch does to q, k and v first; as in `qkv_prologue`, and with the same layouts.

    cos, sin  [batch, half] float32
    slots     [batch] slot of each new token
    norm      [heads + kv_heads, head_dim] or None
    """

    cos: Tensor
    sin: Tensor
    slots: Tensor
    norm: Tensor | None = None
    eps: float = 0.0
    clip: float | None = None


def default_config(kv_heads: int, group: int, head_dim: int) -> AttentionConfig:
    """Pick when nothing was measured: splits that fill a large GPU with one sequence."""
    splits = min(64, next_power_of_2(-(-128 // kv_heads)))
    return CONFIGS.get((kv_heads, group, head_dim)) or AttentionConfig(
        splits, keys=64 if head_dim <= 128 else 32
    )


def scratch_elements(
    batch: int, heads: int, kv_heads: int, head_dim: int, config: AttentionConfig | None = None
) -> int:
    """Return how many float32 elements of scratch a launch needs."""
    config = config or default_config(kv_heads, heads // kv_heads, head_dim)
    return batch * heads * config.splits * (head_dim + 2)


def reference(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, page_table: Tensor, kv_lens: Tensor, page_tokens: int, scale: float, *,
    window: int | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return [batch, heads, head_dim] in fp32 for q [batch, heads, head_dim]; zeros where there are no keys."""
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    group = q.shape[1] // k_pool.shape[1]
    for row, length in enumerate(kv_lens.tolist()):
        if not length:
            continue
        tokens = torch.arange(
            0 if window is None else max(0, length - window), length, device=q.device
        )
        slots = page_table[row].long()[tokens // page_tokens] * page_tokens + tokens % page_tokens
        keys, values = (
            pool[slots].float().repeat_interleave(group, 1) for pool in (k_pool, v_pool)
        )
        scores = scale * torch.einsum("hd,thd->ht", q[row].float(), keys)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None]], 1)
        shares = scores.softmax(-1)[:, : tokens.shape[0]]
        out[row] = torch.einsum("ht,thd->hd", shares, values)
    return out


@triton.jit
def _turned(
    src, gain, cos_ptr, sin_ptr, heads_ok, eps, clip,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Load heads (src, gain [N, 1], first element of each), norm, clip, and rotate them: [N, DIM_PAD] fp32.

    Each element is loaded with its rotary partner: a second read of 256 bytes is cheaper than moving it between threads.
    """
    d = tl.arange(0, DIM_PAD)
    partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    ok = heads_ok & (d < HEAD_DIM)[None, :]
    x = tl.load(src + d[None, :], mask=ok, other=0.0).to(tl.float32)
    y = tl.load(src + partner[None, :], mask=ok, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = x * factor * tl.load(gain + d[None, :], mask=ok, other=0.0).to(tl.float32)
        y = y * factor * tl.load(gain + partner[None, :], mask=ok, other=0.0).to(tl.float32)
    if CLIP:
        x = tl.minimum(tl.maximum(x, -clip), clip)
        y = tl.minimum(tl.maximum(y, -clip), clip)
    angle = tl.where(d < HALF, d, d - HALF)
    c = tl.load(cos_ptr + angle, mask=d < 2 * HALF, other=1.0)
    s = tl.load(sin_ptr + angle, mask=d < 2 * HALF, other=0.0)
    return x * c[None, :] + y * tl.where(d < HALF, -s, s)[None, :]


@triton.jit
def _combine(
    acc_ptr, max_ptr, sum_ptr, sink_ptr, out_ptr, active,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Add up the splits of one (sequence, key head). GROUP_PAD is the power of two here, not the 16 of a product."""
    member = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    real = member < GROUP
    split = tl.arange(0, SPLITS)
    # .cg: other programs wrote these a moment ago, the first-level cache may hold older ones.
    at = split[:, None] * GROUP + member[None, :]
    ok = (split < active)[:, None] & real[None, :]
    part_max = tl.load(max_ptr + at, mask=ok, other=-1e30, cache_modifier=".cg")
    part_sum = tl.load(sum_ptr + at, mask=ok, other=0.0, cache_modifier=".cg")
    greatest = tl.maximum(tl.max(part_max, 0), -1e30)
    if SINKS:
        sink = tl.load(sink_ptr + member, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        greatest = tl.maximum(greatest, sink)
    total = tl.sum(tl.exp2(part_max - greatest[None, :]) * part_sum, 0)
    if SINKS:
        total += tl.exp2(sink - greatest)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    inside = real[None, :, None] & (d < HEAD_DIM)[None, None, :]
    for start in range(0, active, 8):
        some = start + tl.arange(0, 8)
        here = (some < active)[:, None]
        weight = tl.load(
            max_ptr + some[:, None] * GROUP + member[None, :],
            mask=here & real[None, :],
            other=-1e30,
            cache_modifier=".cg",
        )
        weight = tl.exp2(weight - greatest[None, :])
        place = (some[:, None, None] * GROUP + member[None, :, None]) * HEAD_DIM + d[None, None, :]
        part = tl.load(
            acc_ptr + place, mask=here[:, :, None] & inside, other=0.0, cache_modifier=".cg"
        )
        acc += tl.sum(part * weight[:, :, None], 0)
    # Without keys the sum is 0; so is the result.
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        out_ptr + member[:, None] * HEAD_DIM + d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (d < HEAD_DIM)[None, :],
    )


@triton.jit
def _kernel(
    q_ptr, q_stride, k_ptr, v_ptr, table_ptr, table_stride, lens_ptr, sink_ptr, out_ptr, scratch_ptr, counters_ptr,
    norm_ptr, cos_ptr, sin_ptr, slots_ptr, scale, eps, clip, batch,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    MEMBERS: tl.constexpr, FUSED: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, CLIP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lens_ptr + row)
    first = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    keys_a_split = tl.maximum(tl.cdiv(tl.cdiv(length - first, KEYS), SPLITS), 1) * KEYS
    active = tl.maximum(tl.cdiv(length - first, keys_a_split), 1)
    if split >= active:
        return
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    d = tl.arange(0, DIM_PAD)
    in_dim = d < HEAD_DIM
    member = tl.arange(0, GROUP_PAD)
    head = kv_head * GROUP + member
    real = (member < GROUP)[:, None]
    q_row = q_ptr + row * q_stride
    element = k_ptr.dtype.element_ty
    start = first + split * keys_a_split
    end = tl.minimum(start + keys_a_split, length)
    new_k = tl.zeros([1, DIM_PAD], element)
    new_v = tl.zeros([1, DIM_PAD], element)
    if FUSED:
        q = _turned(
            q_row + head[:, None] * HEAD_DIM, norm_ptr + head[:, None] * HEAD_DIM, cos_ptr + row * HALF, sin_ptr + row * HALF,
            real, eps, clip, HEAD_DIM, DIM_PAD, HALF, NORM, CLIP,
        ).to(element)  # fmt: skip
        if (end == length) & (length > 0):
            # This split has the new token. Nobody else reads its slot in this launch.
            one = tl.zeros([1, 1], tl.int32) + kv_head + KV_HEADS * GROUP
            new_k = _turned(
                q_row + one * HEAD_DIM, norm_ptr + one * HEAD_DIM, cos_ptr + row * HALF, sin_ptr + row * HALF,
                one >= 0, eps, clip, HEAD_DIM, DIM_PAD, HALF, NORM, CLIP,
            ).to(element)  # fmt: skip
            v = tl.load(
                q_row + (one + KV_HEADS) * HEAD_DIM + d[None, :],
                mask=in_dim[None, :],
                other=0.0,
            ).to(tl.float32)
            if CLIP:
                v = tl.minimum(tl.maximum(v, -clip), clip)
            new_v = v.to(element)
            slot = tl.load(slots_ptr + row).to(tl.int64)
            place = (slot * KV_HEADS + kv_head) * HEAD_DIM + d[None, :]
            tl.store(k_ptr + place, new_k, mask=in_dim[None, :])
            tl.store(v_ptr + place, new_v, mask=in_dim[None, :])
    else:
        q = tl.load(
            q_row + head[:, None] * HEAD_DIM + d[None, :], mask=real & in_dim[None, :], other=0.0
        ).to(element)
    greatest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for tile in tl.range(start, end, KEYS, num_stages=STAGES):
        position = tile + tl.arange(0, KEYS)
        ok = position < end
        stored = ok & (position != length - 1) if FUSED else ok
        page = tl.load(table_ptr + row * table_stride + position // PAGE, mask=ok, other=0).to(
            tl.int64
        )
        place = ((page * PAGE + position % PAGE) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[
            None, :
        ]
        k = tl.load(k_ptr + place, mask=stored[:, None] & in_dim[None, :], other=0.0)
        if FUSED:
            k = tl.where((position == length - 1)[:, None], new_k, k)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(ok[None, :], score, float("-inf"))
        new_max = tl.maximum(greatest, tl.max(score, 1))
        share = tl.exp2(score - new_max[:, None])
        old = tl.exp2(greatest - new_max)
        v = tl.load(v_ptr + place, mask=stored[:, None] & in_dim[None, :], other=0.0)
        if FUSED:
            v = tl.where((position == length - 1)[:, None], new_v, v)
        total = total * old + tl.sum(share, 1)
        acc = tl.dot(share.to(element), v, acc * old[:, None], input_precision="ieee")
        greatest = new_max
    # Scratch: all sums of products, then all maxima, then all sums of shares; [batch, kv_heads, SPLITS, GROUP (, HEAD_DIM)].
    pair = row * KV_HEADS + kv_head
    parts = tl.cast(batch, tl.int64) * (KV_HEADS * SPLITS * GROUP)
    mine = (pair * SPLITS + split) * GROUP + member
    tl.store(scratch_ptr + mine[:, None] * HEAD_DIM + d[None, :], acc, mask=real & in_dim[None, :])
    tl.store(scratch_ptr + parts * HEAD_DIM + mine, greatest, mask=member < GROUP)
    tl.store(scratch_ptr + parts * (HEAD_DIM + 1) + mine, total, mask=member < GROUP)
    # All threads' stores come before the count, which hands them to whoever counts last.
    tl.debug_barrier()
    done = tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel", scope="gpu")
    if done == active - 1:
        tl.store(counters_ptr + pair, 0)
        before = pair * SPLITS * GROUP
        _combine(
            scratch_ptr + before * HEAD_DIM, scratch_ptr + parts * HEAD_DIM + before, scratch_ptr + parts * (HEAD_DIM + 1) + before,
            sink_ptr + kv_head * GROUP, out_ptr + pair * (GROUP * HEAD_DIM), active, GROUP, MEMBERS, HEAD_DIM, DIM_PAD, SPLITS, SINKS,
        )  # fmt: skip


def decode_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, page_table: Tensor, kv_lens: Tensor, page_tokens: int, scale: float, *,
    out: Tensor, scratch: Tensor, counters: Tensor, window: int | None = None, sinks: Tensor | None = None,
    prologue: Prologue | None = None, config: AttentionConfig | None = None,
) -> Tensor:  # fmt: skip
    """Attend from the newest token of each sequence to all its keys, its own included.

    q               [batch, at least heads * head_dim], last stride 1; the first heads * head_dim columns are the queries.
                    With a prologue: rows [heads + 2 * kv_heads, head_dim] as the qkv product left them; not changed
    k_pool, v_pool  [num_slots, kv_heads, head_dim] contiguous, dtype of q; written at the prologue's slots only
    page_table      [batch, pages] int32, last stride 1; slot = page * page_tokens + offset
    kv_lens         [batch] int32, keys of each sequence, the new one included; 0 gives zeros
    out             [batch, heads * head_dim] contiguous; every element written
    scratch         float32, at least scratch_elements(...)
    counters        [batch * kv_heads or more] int32; zero before the first launch and after each
    window          a token sees this many keys, its own included; None is all
    sinks           [heads] a logit that takes a share of each head's softmax and adds nothing, or None
    kv_lens must not be written by the launch just before this one: splits that have no keys leave before they wait.
    Reference: `reference`, 1e-2 relative in bf16, 1e-5 in fp32. Sources: flash decoding; sinks arXiv 2309.17453.
    """
    batch, (kv_heads, head_dim) = q.shape[0], k_pool.shape[1:]
    heads = out.shape[1] // head_dim
    group = heads // kv_heads
    width = (heads + (2 * kv_heads if prologue else 0)) * head_dim
    if (
        group * kv_heads * head_dim != out.shape[1]
        or q.shape[1] < width
        or q.stride(1) != 1
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"expected q of at least {width} columns and contiguous out of whole groups, got {list(q.shape)}, {list(out.shape)}"
        )
    if page_table.shape[0] != batch or kv_lens.shape[0] != batch or page_table.stride(1) != 1:
        raise ValueError(
            f"expected a page table and length for each of {batch} rows, got {list(page_table.shape)}, {list(kv_lens.shape)}"
        )
    config = config or default_config(kv_heads, group, head_dim)
    needed = scratch_elements(batch, heads, kv_heads, head_dim, config)
    if (
        scratch.numel() < needed
        or scratch.dtype != torch.float32
        or counters.numel() < batch * kv_heads
    ):
        raise ValueError(
            f"expected {needed} float32 of scratch and {batch * kv_heads} counters, got {scratch.numel()}, {counters.numel()}"
        )
    early = early_launch(q.device)
    norm = prologue.norm if prologue else None
    clip = prologue.clip if prologue else None
    _kernel[(config.splits, kv_heads, batch)](
        q, q.stride(0), k_pool, v_pool, page_table, page_table.stride(0), kv_lens, q if sinks is None else sinks, out, scratch,
        counters, q if norm is None else norm, prologue.cos if prologue else q, prologue.sin if prologue else q,
        prologue.slots if prologue else kv_lens, scale * _LOG2E, prologue.eps if prologue else 0.0, 0.0 if clip is None else clip, batch,
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(16, next_power_of_2(group)), HEAD_DIM=head_dim,
        DIM_PAD=max(16, next_power_of_2(head_dim)), PAGE=page_tokens, KEYS=config.keys, SPLITS=config.splits, STAGES=config.stages,
        WINDOW=window or 0, SINKS=sinks is not None, MEMBERS=next_power_of_2(group), FUSED=prologue is not None,
        HALF=prologue.cos.shape[1] if prologue else 0, NORM=norm is not None, CLIP=clip is not None,
        EARLY=early, num_warps=config.warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
