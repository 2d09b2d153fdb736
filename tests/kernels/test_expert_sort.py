"""expert_sort against its reference, exactly: one pass and two, pairs nobody owns, every tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from freetoken.kernels import expert_sort as sort
from freetoken.kernels.triton_import import INTERPRETED
from tests.kernels.interpreter import scalar_bounds  # noqa: F401
from tests.kernels.tolerance import poisoned


def drawn_ids(
    tokens: int, top_k: int, experts: int, *, skew: float = 0.0, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Draw different experts for each token; with skew, low numbers more often."""
    generator = torch.Generator().manual_seed(11)
    scores = (
        torch.rand(tokens, experts, generator=generator) - skew * torch.arange(experts) / experts
    )
    return scores.argsort(dim=1, descending=True)[:, :top_k].contiguous().to(dtype)


def outputs(pairs: int, experts: int, block_m: int, device: torch.device) -> sort.SortedPairs:
    """Allocate and poison."""
    out = sort.empty_pairs(pairs, experts, block_m, device)
    for tensor in (out.order, out.ends, out.tiles, out.counts):
        tensor.copy_(poisoned(tensor.shape, tensor.dtype, device))
    return out


def assert_sorted(
    ids: Tensor, experts: int, block_m: int, device: torch.device
) -> sort.SortedPairs:
    """Compare kernel and reference, and check that no row past the last pair was written."""
    out = sort.expert_sort(ids.to(device), experts, outputs(ids.numel(), experts, block_m, device))
    expected = sort.reference(
        ids, experts, outputs(ids.numel(), experts, block_m, torch.device("cpu"))
    )
    assert torch.equal(out.ends.cpu(), expected.ends)
    assert torch.equal(out.order.cpu(), expected.order)
    assert torch.equal(out.tiles.cpu(), expected.tiles)
    return out


CASES = [  # tokens, top_k, experts, block_m, skew
    pytest.param(0, 2, 8, 16, 0.0, id="empty"),
    pytest.param(1, 1, 1, 16, 0.0, id="one-pair-one-expert"),
    pytest.param(1, 8, 128, 16, 0.0, id="one-token"),
    pytest.param(83, 8, 128, 16, 0.5, id="83-tokens"),
    pytest.param(50, 3, 7, 16, 0.0, id="odd-experts"),
    pytest.param(64, 4, 4, 64, 0.0, id="every-expert-whole-tiles"),
    pytest.param(130, 2, 60, 32, 3.0, id="skewed-empty-experts"),
    pytest.param(600, 8, 32, 64, 1.0, id="two-passes"),
]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "experts", "block_m", "skew"), CASES)
def test_expert_sort_named_shape(
    tokens: int,
    top_k: int,
    experts: int,
    block_m: int,
    skew: float,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """A pair gets lost or comes twice, or a tile covers rows of two experts."""
    assert_sorted(
        drawn_ids(tokens, top_k, experts, skew=skew, dtype=dtype), experts, block_m, device
    )


@pytest.mark.parametrize("tokens", [40, 520], ids=["one-pass", "two-passes"])
def test_expert_sort_foreign_ids_left_out(tokens: int, device: torch.device) -> None:
    """A pair computed elsewhere (id -1, or past the last expert) takes a row of a tile."""
    ids = drawn_ids(tokens, 8, 12)
    ids[::3, 1:5] = -1
    ids[1::4, 0] = 12
    ids[5] = -1
    out = assert_sorted(ids, 12, 16, device)
    assert int(out.ends[-1]) < ids.numel()


def test_expert_sort_all_pairs_on_one_expert(device: torch.device) -> None:
    """The bound on tiles is too small when one expert has every pair."""
    ids = torch.full((300, 1), 5, dtype=torch.int64)
    out = assert_sorted(ids, 8, 64, device)
    assert out.tiles[0].tolist().count(5) == 5


def test_expert_sort_wrong_outputs_refused(device: torch.device) -> None:
    """Outputs of a smaller chunk are written past their end."""
    ids = drawn_ids(5, 2, 8).to(device)
    for pairs, experts in ((8, 8), (10, 7)):
        with pytest.raises(ValueError, match="expected contiguous ids"):
            sort.expert_sort(ids, 8, sort.empty_pairs(pairs, experts, 16, device))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="full size needs a GPU")
@pytest.mark.parametrize("tokens", [512, 513, 2067, 8192, 20001])
def test_expert_sort_full_size(tokens: int, device: torch.device) -> None:
    """Counts of many chunks are added in another order, or overflow a tile."""
    assert_sorted(drawn_ids(tokens, 8, 128, skew=0.3), 128, 64, device)
