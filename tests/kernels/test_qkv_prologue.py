"""qkv_prologue and whole_norm against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freetoken.kernels import qkv_prologue, rms_norm
from tests.kernels.interpreter import scalar_bounds  # noqa: F401
from tests.kernels.tolerance import assert_close, poisoned

EPS = 1e-6
SHAPES = [  # tokens, heads, kv_heads, head_dim, half
    pytest.param((1, 4, 2, 16, 8), id="one-token"),
    pytest.param((3, 9, 3, 64, 32), id="smollm2"),
    pytest.param((11, 6, 2, 24, 8), id="part-rotated-many-tokens"),
    pytest.param((2, 5, 1, 80, 40), id="ragged-head"),
]


def _check(
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    normed: bool,
    clip: float | None,
    block: int | None = None,
    first_slot: int = 0,
) -> None:
    tokens, heads, kv_heads, head_dim, half = shape
    generator = torch.Generator().manual_seed(7)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    qkv = drawn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    norm = drawn(heads + kv_heads, head_dim).to(dtype) if normed else None
    angle = drawn(tokens, half) * 3
    cos, sin = angle.cos(), angle.sin()
    slots = (torch.randperm(tokens + 4, generator=generator)[:tokens] + first_slot).to(device)
    k_pool, v_pool = (
        poisoned((first_slot + tokens + 4, kv_heads, head_dim), dtype, device) for _ in range(2)
    )
    q, k, v = qkv_prologue.reference(qkv, cos, sin, heads, kv_heads, norm=norm, eps=EPS, clip=clip)
    qkv_prologue.qkv_prologue(
        qkv, cos, sin, slots, k_pool, v_pool, norm=norm, eps=EPS, clip=clip, block=block
    )
    assert_close(qkv.view(tokens, -1, head_dim)[:, :heads], q, dtype)
    assert_close(k_pool[slots], k, dtype)
    assert_close(v_pool[slots], v, dtype)
    rest = torch.ones(4 + tokens, dtype=torch.bool, device=device)
    rest[slots - first_slot] = False
    assert bool(k_pool[first_slot:][rest].isnan().all())
    assert bool(v_pool[first_slot:][rest].isnan().all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("normed", [False, True], ids=["no-norm", "norm"])
def test_qkv_prologue_matches_reference(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, normed: bool, device: torch.device
) -> None:
    """Caught: a norm or rotation on values, a key in another token's slot, a slot written that belongs to nobody."""
    _check(shape, dtype, device, normed=normed, clip=None)


@pytest.mark.parametrize("block", [1, 2, 16])
def test_qkv_prologue_clip_after_norm(block: int, device: torch.device) -> None:
    """Caught: clipping before the norm, and a head block that is only right for the default size."""
    _check((2, 5, 2, 32, 16), torch.float32, device, normed=True, clip=0.7, block=block)


def test_qkv_prologue_no_tokens(device: torch.device) -> None:
    """Caught: a launch with an empty grid."""
    pool = torch.zeros(4, 1, 8, device=device)
    empty = torch.empty(0, 4, device=device)
    qkv_prologue.qkv_prologue(
        torch.empty(0, 24, device=device),
        empty,
        empty,
        torch.empty(0, dtype=torch.int64, device=device),
        pool,
        pool,
    )


def test_qkv_prologue_wrong_norm_refused(device: torch.device) -> None:
    """Caught: one weight row read as one for each head."""
    pool, angle = torch.zeros(4, 1, 8, device=device), torch.zeros(1, 4, device=device)
    with pytest.raises(ValueError, match="expected norm"):
        qkv_prologue.qkv_prologue(
            torch.zeros(1, 24, device=device),
            angle,
            angle,
            torch.zeros(1, dtype=torch.int64, device=device),
            pool,
            pool,
            norm=torch.ones(1, 8, device=device),
        )


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_whole_norm_matches_reference(
    tokens: int, device: torch.device, generator: torch.Generator
) -> None:
    """Caught: q and k normed as one, or values normed too."""
    qkv = torch.randn(tokens, 96 + 2 * 40, generator=generator).to(device)
    q_norm, k_norm = (
        torch.randn(96, generator=generator).to(device),
        torch.randn(40, generator=generator).to(device),
    )
    expected = [
        rms_norm.reference(qkv[:, :96], q_norm, EPS),
        rms_norm.reference(qkv[:, 96:136], k_norm, EPS),
        qkv[:, 136:].clone(),
    ]
    qkv_prologue.whole_norm(qkv, q_norm, k_norm, EPS)
    assert_close(qkv, torch.cat(expected, dim=1))


@pytest.mark.gpu
@pytest.mark.limit(120)
@pytest.mark.parametrize("tokens", [1, 8, 4096])
def test_qkv_prologue_full_size(tokens: int, device: torch.device) -> None:
    """Caught: what only shows compiled, at the sizes that are served."""
    _check((tokens, 32, 4, 128, 64), torch.bfloat16, device, normed=True, clip=None)


@pytest.mark.gpu
@pytest.mark.limit(120)
def test_qkv_prologue_slot_beyond_32_bits(device: torch.device) -> None:
    """Caught: a pool offset that overflows (2^31 elements lie before these slots)."""
    _check(
        (2, 8, 4, 128, 64),
        torch.bfloat16,
        device,
        normed=True,
        clip=None,
        first_slot=(2**31 + 2**20) // 512,
    )
