"""The fused expert step."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from freetoken.native import Moe, Native, NativeError, Type

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make(tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Case:
    """x, expert ids, expert weights, gate_up, down for (experts, top_k, hidden, inter)."""
    experts, top_k, hidden, inter = sizes
    generator = torch.Generator().manual_seed(tokens * 7 + hidden)
    x = torch.randn(tokens, hidden, generator=generator)
    scores = torch.rand(tokens, experts, generator=generator)
    weights, ids = scores.topk(top_k)
    gate_up = torch.randn(experts, 2 * inter, hidden, generator=generator) / hidden**0.5
    down = torch.randn(experts, hidden, inter, generator=generator) / inter**0.5
    return x, ids, weights / weights.sum(-1, keepdim=True), gate_up.to(dtype), down.to(dtype)


def moe(native: Native, case: Case) -> torch.Tensor:
    """The library's answer."""
    x, ids, weights, gate_up, down = case
    out = torch.full_like(x, float("nan"))
    native.moe(
        Moe(
            type=Type.BF16 if down.dtype == torch.bfloat16 else Type.F32,
            top_k=ids.shape[1],
            tokens=x.shape[0],
            experts=down.shape[0],
            hidden=x.shape[1],
            inter=down.shape[2],
            x=x.data_ptr(),
            expert_ids=ids.data_ptr(),
            expert_weights=weights.data_ptr(),
            gate_up=gate_up.data_ptr(),
            down=down.data_ptr(),
            out=out.data_ptr(),
        )
    )
    return out


def reference(case: Case) -> torch.Tensor:
    """One token and one expert at a time, in float64."""
    x, ids, weights, gate_up, down = case
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(x.shape[0]):
        for choice in range(ids.shape[1]):
            expert = int(ids[token, choice])
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weights[token, choice].double() * (
                down[expert].double() @ (silu(gate) * up)
            )
    return out.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("tokens", [0, 1, 4, 19], ids="tokens={}".format)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 5, 3), (8, 2, 576, 1536), (16, 8, 100, 36)],
    ids="experts={0[0]}-hidden={0[2]}".format,
)
def test_moe_matches_float64(
    native: Native, sizes: tuple[int, int, int, int], tokens: int, dtype: torch.dtype
) -> None:
    """Gate and up swapped, a token given its neighbour's weight, a lost tail."""
    case = make(tokens, sizes, dtype)
    torch.testing.assert_close(moe(native, case), reference(case), rtol=1e-5, atol=1e-5)


def test_moe_of_a_token_is_the_same_alone(native: Native) -> None:
    """Sums ordered by expert instead of by the token's own choices."""
    case = make(11, (16, 4, 100, 36), torch.float32)
    together = moe(native, case)
    x, ids, weights, gate_up, down = case
    for token in range(11):
        one = slice(token, token + 1)
        alone = (x[one].clone(), ids[one].clone(), weights[one].clone(), gate_up, down)
        assert torch.equal(moe(native, alone)[0], together[token])


def test_moe_with_extreme_gates_stays_finite(native: Native) -> None:
    """Overflow of exp in SiLU for very negative gates; NaN must still show."""
    case = make(2, (2, 1, 8, 8), torch.float32)
    x = case[0]
    x[0] *= 1e4
    x[1, 3] = float("nan")
    got = moe(native, case)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


def test_moe_with_unknown_expert_is_refused(native: Native) -> None:
    """A router bug must not read foreign memory."""
    case = make(3, (4, 2, 8, 8), torch.float32)
    case[1][2, 1] = 4
    with pytest.raises(NativeError, match=r"ids in \[0, 4\), got 4 at token 2"):
        moe(native, case)
