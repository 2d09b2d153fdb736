"""decode_attention against its reference: lengths around tile and split ends, windows, sinks, fused prologue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from freetoken.kernels import decode_attention, qkv_prologue
from freetoken.kernels.decode_attention import AttentionConfig, Prologue
from tests.kernels.interpreter import scalar_bounds  # noqa: F401
from tests.kernels.tolerance import assert_close, poisoned

EPS = 1e-6
SMALL = AttentionConfig(splits=4, keys=16, warps=4, stages=2)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@dataclass
class Pages:
    """Random keys and values in shuffled pages; every slot that no sequence owns is NaN."""

    k: Tensor
    v: Tensor
    table: Tensor
    lens: Tensor
    page_tokens: int

    def slots(self) -> Tensor:
        """Slot of each sequence's newest token; row 0's page for an empty one."""
        last = (self.lens.long() - 1).clamp(min=0)
        pages = self.table.long().gather(1, (last // self.page_tokens)[:, None])[:, 0]
        return pages * self.page_tokens + last % self.page_tokens


def _pages(
    lens: list[int],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    page_tokens: int = 8,
) -> Pages:
    generator = torch.Generator().manual_seed(11)
    counts = [-(-length // page_tokens) for length in lens]
    order = torch.randperm(sum(counts) + 2, generator=generator)
    table = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
    shape = (order.shape[0] * page_tokens, kv_heads, head_dim)
    k, v = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    taken = 0
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        table[row, :count] = order[taken : taken + count]
        taken += count
        tokens = torch.arange(length)
        slots = table[row].long()[tokens // page_tokens] * page_tokens + tokens % page_tokens
        k[slots] = torch.randn(length, kv_heads, head_dim, generator=generator)
        v[slots] = torch.randn(length, kv_heads, head_dim, generator=generator)
    lens_tensor = torch.tensor(lens, dtype=torch.int32)
    return Pages(
        k.to(device, dtype),
        v.to(device, dtype),
        table.to(device),
        lens_tensor.to(device),
        page_tokens,
    )


def _attend(
    q: Tensor, pages: Pages, heads: int, config: AttentionConfig | None, **options: Any
) -> Tensor:
    kv_heads, head_dim = pages.k.shape[1:]
    batch, device = q.shape[0], q.device
    elements = decode_attention.scratch_elements(batch, heads, kv_heads, head_dim, config)
    out = poisoned((batch, heads * head_dim), q.dtype, device)
    counters = torch.zeros(batch * kv_heads, dtype=torch.int32, device=device)
    scratch = poisoned((elements,), torch.float32, device)
    for _ in range(2):  # a second launch finds the counters as the first left them
        decode_attention.decode_attention(
            q,
            pages.k,
            pages.v,
            pages.table,
            pages.lens,
            pages.page_tokens,
            head_dim**-0.5,
            out=out,
            scratch=scratch,
            counters=counters,
            config=config,
            **options,
        )
    assert not counters.any()
    return out


def _check(
    lens: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    config: AttentionConfig | None = SMALL,
    **options: Any,
) -> None:
    pages = _pages(lens, kv_heads, head_dim, dtype, device)
    q = torch.randn(len(lens), heads, head_dim, generator=torch.Generator().manual_seed(2)).to(
        device, dtype
    )
    out = _attend(q.flatten(1), pages, heads, config, **options)
    expected = decode_attention.reference(
        q, pages.k, pages.v, pages.table, pages.lens, pages.page_tokens, head_dim**-0.5, **options
    )
    assert_close(out.view(expected.shape), expected)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, 130])
def test_decode_attention_length(length: int, device: torch.device) -> None:
    """Caught: the last key left out, a key past the end taken along, a split that does not count itself done."""
    _check([length], 4, 2, 16, torch.float32, device)


@DTYPES
def test_decode_attention_ragged_batch(dtype: torch.dtype, device: torch.device) -> None:
    """Caught: lengths, pages or scratch of another sequence."""
    _check([3, 0, 77, 16], 6, 2, 32, dtype, device)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (5, 1, 80), (2, 2, 16), (32, 1, 16)]
)
def test_decode_attention_shape(
    heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> None:
    """Caught: groups and head sizes that are not powers of two."""
    _check([40, 5], heads, kv_heads, head_dim, torch.float32, device)


@pytest.mark.parametrize("window", [1, 7, 16, 100])
def test_decode_attention_window(window: int, device: torch.device) -> None:
    """Caught: a window that is one key off, or splits that start before it."""
    _check([60, 4], 4, 2, 16, torch.float32, device, window=window)


def test_decode_attention_sinks(device: torch.device) -> None:
    """Caught: a sink counted once a split instead of once a head; a large one that overflows."""
    sinks = torch.tensor([-3.0, 0.5, 2.0, 60.0], device=device)
    _check([50, 3, 0], 4, 2, 16, torch.float32, device, sinks=sinks)
    _check([50], 4, 2, 16, torch.float32, device, sinks=sinks, window=9)


def test_decode_attention_large_scores_stay_finite(device: torch.device) -> None:
    """Caught: an exponential taken without the maximum."""
    pages = _pages([33], 1, 16, torch.float32, device)
    pages.k.mul_(200)
    q = torch.full((1, 2, 16), 50.0, device=device)
    out = _attend(q.flatten(1), pages, 2, SMALL)
    assert_close(
        out.view(1, 2, 16),
        decode_attention.reference(q, pages.k, pages.v, pages.table, pages.lens, 8, 0.25),
    )


def test_decode_attention_alone_and_in_batch_same_bits(device: torch.device) -> None:
    """Caught: a number of splits that depends on the neighbours."""
    pages = _pages([70, 9, 33], 2, 16, torch.bfloat16, device)
    q = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
    together = _attend(q, pages, 4, SMALL)
    for row in range(3):
        one = Pages(pages.k, pages.v, pages.table[row : row + 1], pages.lens[row : row + 1], 8)
        assert torch.equal(_attend(q[row : row + 1], one, 4, SMALL)[0], together[row])


@pytest.mark.parametrize(
    ("dtype", "head_dim", "half", "normed", "clip"),
    [
        pytest.param(torch.bfloat16, 16, 8, True, None, id="bf16-norm"),
        pytest.param(torch.float32, 16, 8, False, None, id="no-norm"),
        pytest.param(torch.float32, 24, 8, True, 1.0, id="part-rotated-norm-clip"),
        pytest.param(torch.float32, 24, 12, False, 1.0, id="ragged-head-clip"),
    ],
)
def test_decode_attention_fused_prologue(
    dtype: torch.dtype,
    head_dim: int,
    half: int,
    normed: bool,
    clip: float | None,
    device: torch.device,
) -> None:
    """Caught: the new key read from the pool before it is written, or norm and rotation other than
    the prefill's.
    """
    heads, kv_heads, lens = 4, 2, [34, 1, 17]
    generator = torch.Generator().manual_seed(5)
    pages = _pages(lens, kv_heads, head_dim, dtype, device)
    slots = pages.slots()
    pages.k[slots], pages.v[slots] = float("nan"), float("nan")
    qkv = torch.randn(3, (heads + 2 * kv_heads) * head_dim, generator=generator).to(device, dtype)
    norm = (
        torch.randn(heads + kv_heads, head_dim, generator=generator).to(device, dtype)
        if normed
        else None
    )
    angle = (torch.randn(3, half, generator=generator) * 3).to(device)
    apart = Pages(pages.k.clone(), pages.v.clone(), pages.table, pages.lens, pages.page_tokens)
    rotated = qkv_prologue.qkv_prologue(
        qkv.clone(),
        angle.cos(),
        angle.sin(),
        slots,
        apart.k,
        apart.v,
        norm=norm,
        eps=EPS,
        clip=clip,
    )
    expected = _attend(rotated, apart, heads, SMALL)
    before = qkv.clone()
    out = _attend(
        qkv,
        pages,
        heads,
        SMALL,
        prologue=Prologue(angle.cos(), angle.sin(), slots, norm, EPS, clip),
    )
    assert torch.equal(qkv, before)
    assert_close(out, expected)
    assert_close(pages.k[slots], apart.k[slots])
    assert torch.equal(pages.v[slots], apart.v[slots])


def test_decode_attention_small_scratch_refused(device: torch.device) -> None:
    """Caught: partial sums written past their memory."""
    pages = _pages([4], 1, 16, torch.float32, device)
    with pytest.raises(ValueError, match="of scratch"):
        decode_attention.decode_attention(
            torch.zeros(1, 32, device=device),
            pages.k,
            pages.v,
            pages.table,
            pages.lens,
            8,
            1.0,
            out=torch.zeros(1, 32, device=device),
            scratch=torch.zeros(9, device=device),
            counters=torch.zeros(1, dtype=torch.int32, device=device),
        )


@pytest.mark.gpu
@pytest.mark.limit(120)
@pytest.mark.parametrize(
    ("lens", "heads", "kv_heads", "head_dim"),
    [
        pytest.param([1000], 32, 4, 128, id="qwen3"),
        pytest.param([5, 63, 64, 65, 2048, 4097, 0, 31], 32, 4, 128, id="qwen3-batch-8"),
        pytest.param([300, 7], 9, 3, 64, id="smollm2"),
        pytest.param([20_000], 32, 8, 128, id="mixtral-long"),
    ],
)
def test_decode_attention_full_size(
    lens: list[int], heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> None:
    """Caught: what only shows compiled, with the served configs; races between splits."""
    for _ in range(5):
        _check(lens, heads, kv_heads, head_dim, torch.bfloat16, device, config=None)
    _check(
        lens,
        heads,
        kv_heads,
        head_dim,
        torch.bfloat16,
        device,
        config=None,
        window=128,
        sinks=torch.randn(heads, device=device),
    )


@pytest.mark.gpu
@pytest.mark.limit(120)
def test_decode_attention_slots_beyond_32_bits(device: torch.device) -> None:
    """Caught: a pool offset that overflows: this sequence's page lies behind 2^31 elements."""
    first = 2**31 // (4 * 128 * 16) + 3
    pool = torch.empty((first + 2) * 16, 4, 128, dtype=torch.bfloat16, device=device)
    pool[first * 16 :].normal_()
    table = torch.tensor([[first, first + 1]], dtype=torch.int32, device=device)
    pages = Pages(pool, pool, table, torch.tensor([29], dtype=torch.int32, device=device), 16)
    q = torch.randn(1, 32, 128, device=device).bfloat16()
    out = _attend(q.flatten(1), pages, 32, None)
    assert_close(
        out.view(1, 32, 128),
        decode_attention.reference(q, pool, pool, table, pages.lens, 16, 128**-0.5),
    )
