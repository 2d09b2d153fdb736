"""router_rows against its reference: ties, widths, rows of a part-filled program."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freetoken.kernels import router_rows as router
from tests.kernels.tolerance import poisoned


def assert_routed(
    logits: Tensor, top_k: int, *, renormalize: bool, ids_dtype: torch.dtype = torch.int32
) -> None:
    """Compare ids exactly and weights to 1e-6."""
    shape = logits.shape[0], top_k
    ids, weights = (
        poisoned(shape, ids_dtype, logits.device),
        poisoned(shape, torch.float32, logits.device),
    )
    router.router_rows(logits, ids, weights, renormalize=renormalize)
    expected_ids, expected = router.reference(logits, top_k, renormalize=renormalize)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("renormalize", [False, True], ids=["softmax", "renormalised"])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(0, 8, 2), (1, 8, 2), (9, 128, 8), (17, 60, 4), (3, 5, 5), (8, 1, 1), (20, 130, 3)],
    ids=str,
)
def test_router_rows_named_shape(
    tokens: int,
    experts: int,
    top_k: int,
    ids_dtype: torch.dtype,
    device: torch.device,
    *,
    renormalize: bool,
) -> None:
    """A lane past the last expert is chosen, or a row past the last token is stored."""
    logits = torch.randn(tokens, experts + 3, generator=torch.Generator().manual_seed(4)).to(
        device
    )[:, :experts]
    assert_routed(logits, top_k, renormalize=renormalize, ids_dtype=ids_dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_router_rows_ties_lowest_expert(dtype: torch.dtype, device: torch.device) -> None:
    """Equal logits, common in bf16, choose different experts on different devices."""
    logits = torch.randint(-2, 3, (40, 128), generator=torch.Generator().manual_seed(4)).to(
        device, dtype
    )
    assert_routed(logits, 8, renormalize=True)


def test_router_rows_extreme_logits(device: torch.device) -> None:
    """Exponentials overflow, or probabilities that are 0 choose an expert twice."""
    logits = torch.zeros(3, 16, device=device)
    logits[0, 5], logits[1], logits[2, 3] = 1e4, -1e4, -torch.inf
    assert_routed(logits, 4, renormalize=True)


def test_router_rows_nan_still_names_experts(device: torch.device) -> None:
    """One poisoned token sends the sort an expert number that does not exist."""
    logits = torch.randn(4, 6, device=device)
    logits[1], logits[2, 2] = torch.nan, torch.nan
    ids = poisoned((4, 3), torch.int32, device)
    router.router_rows(logits, ids, poisoned((4, 3), torch.float32, device), renormalize=False)
    assert ((ids >= 0) & (ids < 6)).all()
    assert all(len(set(row)) == 3 for row in ids.tolist())


def test_router_rows_wrong_shapes_refused(device: torch.device) -> None:
    """More ranks than experts, or weights of another shape or type."""
    logits = torch.zeros(2, 4, device=device)
    ids, weights = (
        torch.zeros(2, 5, dtype=torch.int32, device=device),
        torch.zeros(2, 5, device=device),
    )
    with pytest.raises(ValueError, match="expected at most 4"):
        router.router_rows(logits, ids, weights, renormalize=False)
    with pytest.raises(ValueError, match="float32 weights"):
        router.router_rows(
            logits, ids[:, :2].contiguous(), weights[:, :2].half().contiguous(), renormalize=False
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_router_rows_full_size(dtype: torch.dtype) -> None:
    """Compiled reductions order ties otherwise."""
    logits = torch.randn(8192, 128, device="cuda").to(dtype)
    assert_routed(logits, 8, renormalize=True)
