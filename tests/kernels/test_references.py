"""Launchers against references on ragged, empty and one-row shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from freetoken.kernels import (
    kv_store,
    moe_experts,
    paged_attention,
    rms_norm,
    rope,
    router_topk,
    silu_mul,
)

TOKENS = [0, 1, 2, 7]
DTYPES = {"float32": (torch.float32, 1e-5), "bfloat16": (torch.bfloat16, 2e-2)}


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Draw a seeded normal tensor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(ours: Tensor, reference: Tensor, tolerance: float) -> None:
    """Compare absolutely and relatively, in fp32."""
    assert ours.shape == reference.shape
    torch.testing.assert_close(ours.float(), reference.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", list(DTYPES))
@pytest.mark.parametrize("tokens", TOKENS)
def test_rms_norm_equals_reference(tokens: int, kind: str) -> None:
    """Catches a wrong mean, epsilon or weight, for one weight and for one a head."""
    dtype, tolerance = DTYPES[kind]
    x, weight = drawn(tokens, 40, dtype=dtype), drawn(40, dtype=dtype, seed=1)
    near(rms_norm.rms_norm(x, weight, 1e-3), rms_norm.reference(x, weight, 1e-3), tolerance)
    heads, each = drawn(tokens, 3, 16, dtype=dtype), drawn(3, 16, dtype=dtype, seed=1)
    expected = rms_norm.reference(heads, each, 1e-3)
    near(rms_norm.rms_norm(heads, each, 1e-3, out=heads), expected, tolerance)
    near(heads, expected, tolerance)


@pytest.mark.parametrize("tokens", TOKENS)
def test_rms_norm_adds_to_the_residual_in_place(tokens: int) -> None:
    """Catches a residual stream that loses the branch."""
    x, residual, weight = drawn(tokens, 40), drawn(tokens, 40, seed=1), drawn(40, seed=2)
    total = x + residual
    near(
        rms_norm.rms_norm(x, weight, 1e-6, residual=residual),
        rms_norm.reference(total, weight, 1e-6),
        1e-5,
    )
    near(residual, total, 0.0)


@pytest.mark.parametrize("kind", list(DTYPES))
@pytest.mark.parametrize("dim", [4, 12, 16])
@pytest.mark.parametrize("tokens", TOKENS)
def test_rope_equals_reference(tokens: int, dim: int, kind: str) -> None:
    """Catches a wrong half, a touched rest, a result overwritten in place too early."""
    dtype, tolerance = DTYPES[kind]
    positions = torch.arange(tokens) * 37
    cos, sin = rope.angles(positions, 0.1 ** torch.arange(dim // 2), 1.3)
    wide = drawn(tokens, 5, 16, dtype=dtype)
    x = wide[:, :3]
    expected = rope.reference(x, cos, sin)
    near(rope.rope(x, cos, sin), expected, tolerance)
    before = wide.clone()
    rope.rope(x, cos, sin, out=x)
    near(x, expected, tolerance)
    assert torch.equal(wide[:, 3:], before[:, 3:])


def test_rope_at_position_zero_changes_nothing() -> None:
    """Catches an offset of one in positions."""
    cos, sin = rope.angles(torch.zeros(2, dtype=torch.int64), torch.ones(8))
    x = drawn(2, 3, 16)
    assert torch.equal(rope.rope(x, cos, sin), x)


@pytest.mark.parametrize("kind", list(DTYPES))
@pytest.mark.parametrize("tokens", TOKENS)
def test_silu_mul_equals_reference(tokens: int, kind: str) -> None:
    """Catches gate and up taken for each other."""
    dtype, tolerance = DTYPES[kind]
    x = drawn(tokens, 2 * 24, dtype=dtype)
    near(silu_mul.silu_mul(x), silu_mul.reference(x), tolerance)
    out = torch.full((tokens, 24), float("nan"), dtype=dtype)
    assert silu_mul.silu_mul(x, out=out) is out
    near(out, silu_mul.reference(x), tolerance)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("tokens", TOKENS)
def test_router_topk_equals_reference(tokens: int, renormalize: bool) -> None:
    """Catches a wrong softmax, order or sum."""
    logits = drawn(tokens, 11) * 3
    ids, weights = router_topk.router_topk(logits, 4, renormalize=renormalize)
    expected_ids, expected_weights = router_topk.reference(logits, 4, renormalize=renormalize)
    assert torch.equal(ids, expected_ids)
    near(weights, expected_weights, 1e-6)


def test_router_topk_gives_ties_to_the_lowest_expert() -> None:
    """Catches texts that differ between devices: equal logits picked in another order."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 6])
    ids, _ = router_topk.router_topk(logits, 4, renormalize=False)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("kind", list(DTYPES))
@pytest.mark.parametrize("tokens", [*TOKENS, 40])
def test_moe_experts_equals_reference(tokens: int, kind: str) -> None:
    """Catches a token sent to another's expert, a weight of another rank."""
    dtype, tolerance = DTYPES[kind]
    x, up, down = (
        drawn(tokens, 16, dtype=dtype),
        drawn(9, 24, 16, dtype=dtype, seed=1) / 4,
        drawn(9, 16, 12, dtype=dtype, seed=2) / 4,
    )
    ids, weights = router_topk.reference(drawn(tokens, 9, seed=3), 3, renormalize=True)
    near(
        moe_experts.moe_experts(x, up, down, ids, weights),
        moe_experts.reference(x, up, down, ids, weights),
        tolerance,
    )
    out = torch.full((tokens, 16), float("nan"), dtype=dtype)
    assert moe_experts.moe_experts(x, up, down, ids, weights, out=out) is out
    near(out, moe_experts.reference(x, up, down, ids, weights), tolerance)


def test_moe_experts_row_does_not_depend_on_neighbours() -> None:
    """Catches sums whose order follows the batch: alone and among others must agree."""
    x, up, down = drawn(30, 16), drawn(9, 24, 16, seed=1), drawn(9, 16, 12, seed=2)
    ids, weights = router_topk.reference(drawn(30, 9, seed=3), 3, renormalize=True)
    together = moe_experts.moe_experts(x, up, down, ids, weights)
    for row in range(30):
        one = slice(row, row + 1)
        near(moe_experts.moe_experts(x[one], up, down, ids[one], weights[one]), together[one], 1e-5)


@pytest.mark.parametrize("tokens", TOKENS)
def test_kv_store_equals_reference(tokens: int) -> None:
    """Catches keys written to values, and slots beside the wanted ones touched."""
    k, v = drawn(tokens, 2, 8), drawn(tokens, 2, 8, seed=1)
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(2))[:tokens]
    ours, expected = (
        [torch.zeros(20, 2, 8) for _ in range(2)],
        [torch.zeros(20, 2, 8) for _ in range(2)],
    )
    kv_store.kv_store(k, v, ours[0], ours[1], slots)
    kv_store.reference(k, v, expected[0], expected[1], slots)
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])


PAGE_TOKENS = 4
STEPS: dict[str, list[tuple[int, int]]] = {
    "empty": [],
    "one-row": [(1, 1)],
    "one-decode": [(1, 19)],
    "decode-like-lengths": [(1, 16), (1, 13), (1, 9)],
    "decode-wide-lengths": [(1, 40), (1, 2), (1, 7), (1, 39)],
    "decode-equal-lengths": [(1, 12), (1, 12)],
    "whole-prefill": [(11, 11)],
    "chunk": [(6, 21)],
    "ragged": [(1, 5), (7, 7), (0, 3), (3, 30), (1, 33), (1, 1), (2, 4)],
}
"""(rows, keys) of each sequence."""


def paged_step(
    runs: list[tuple[int, int]], dtype: torch.dtype, window: int | None
) -> dict[str, Any]:
    """Lay sequences over shuffled pages; every slot that no sequence owns is NaN."""
    counts = [-(-keys // PAGE_TOKENS) for _, keys in runs]
    pages = torch.randperm(sum(counts) + 5, generator=torch.Generator().manual_seed(1)).tolist()
    k, v = (
        torch.full(((sum(counts) + 5) * PAGE_TOKENS, 2, 8), float("nan")).to(dtype)
        for _ in range(2)
    )
    table = torch.zeros(len(runs), max(counts, default=1), dtype=torch.int32)
    ends: list[int] = []
    for sequence, (rows, keys) in enumerate(runs):
        mine = [pages.pop() for _ in range(counts[sequence])]
        table[sequence, : len(mine)] = torch.tensor(mine)
        slots = [mine[t // PAGE_TOKENS] * PAGE_TOKENS + t % PAGE_TOKENS for t in range(keys)]
        k[slots] = drawn(keys, 2, 8, dtype=dtype, seed=10 + sequence)
        v[slots] = drawn(keys, 2, 8, dtype=dtype, seed=50 + sequence)
        ends.append((ends[-1] if ends else 0) + rows)
    plan = paged_attention.plan_attention(
        ends, [keys for _, keys in runs], table, PAGE_TOKENS, window=window
    )
    q = drawn(ends[-1] if ends else 0, 9, 8, dtype=dtype, seed=7)[:, :6]
    return {"q": q, "k_pool": k, "v_pool": v, "plan": plan, "scale": 0.4}


@pytest.mark.parametrize("kind", list(DTYPES))
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("step", list(STEPS))
def test_paged_attention_equals_reference(step: str, window: int | None, kind: str) -> None:
    """Catches masks off by one, wrongly grouped heads, foreign keys, unwritten slots (NaN)."""
    dtype, tolerance = DTYPES[kind]
    inputs = paged_step(STEPS[step], dtype, window)
    expected = paged_attention.reference(**inputs)
    out = torch.full(inputs["q"].shape, float("nan"), dtype=dtype)
    near(paged_attention.paged_attention(**inputs, out=out), expected, tolerance)


def test_plan_refuses_more_keys_than_pages() -> None:
    """Catches a page table that is too short being read past its end."""
    with pytest.raises(ValueError, match=r"rows, 9 keys in sequence 0"):
        paged_attention.plan_attention([1], [9], torch.zeros(1, 2, dtype=torch.int32), PAGE_TOKENS)


WRONG = {
    "rms_norm": lambda: rms_norm.rms_norm(drawn(2, 8), drawn(4), 1e-6),
    "rope": lambda: rope.rope(drawn(2, 1, 8), drawn(2, 5), drawn(2, 5)),
    "silu_mul": lambda: silu_mul.silu_mul(drawn(2, 5)),
    "router_topk": lambda: router_topk.router_topk(drawn(2, 3), 4, renormalize=True),
    "moe_experts": lambda: moe_experts.moe_experts(
        drawn(2, 8), drawn(3, 8, 9), drawn(3, 8, 4), drawn(2, 1), drawn(2, 1)
    ),
    "kv_store": lambda: kv_store.kv_store(
        drawn(2, 1, 8), drawn(2, 1, 8), drawn(9, 1, 8), drawn(9, 1, 8), torch.arange(3)
    ),
    "paged_attention": lambda: paged_attention.paged_attention(
        drawn(1, 3, 8),
        drawn(4, 2, 8),
        drawn(4, 2, 8),
        paged_attention.plan_attention([1], [1], torch.zeros(1, 1), 4),
        1.0,
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_launcher_refuses_shapes_that_differ(name: str) -> None:
    """Catches broadcasting that turns a wrong shape into a wrong answer."""
    with pytest.raises(ValueError, match="expected"):
        WRONG[name]()
