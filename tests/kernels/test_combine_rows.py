"""combine_rows against its reference."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels import combine_rows
from tests.kernels.tolerance import assert_close, poisoned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden"), [(1, 1, 8), (5, 8, 1030), (3, 2, 2048), (0, 2, 16)], ids=str
)
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
def test_combine_rows_named_shape(
    tokens: int,
    top_k: int,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    with_residual: bool,
) -> None:
    """A rank is left out, or the residual is."""
    rows = torch.randn(tokens * top_k, hidden).to(device, dtype)
    weights = torch.rand(tokens, top_k).to(device)
    residual = (
        torch.randn(tokens, hidden + 8).to(device, dtype)[:, :hidden] if with_residual else None
    )
    out = poisoned((tokens, hidden), dtype, device)
    combine_rows.combine_rows(rows, weights, out, residual=residual)
    assert_close(out, combine_rows.reference(rows, weights, residual))


def test_combine_rows_wrong_shapes_refused(device: torch.device) -> None:
    """Rows of another top_k are added."""
    weights, out = torch.ones(3, 2, device=device), torch.zeros(3, 8, device=device)
    with pytest.raises(ValueError, match="expected contiguous rows"):
        combine_rows.combine_rows(torch.zeros(5, 8, device=device), weights, out)
    with pytest.raises(ValueError, match="expected residual"):
        combine_rows.combine_rows(torch.zeros(6, 8, device=device), weights, out, residual=out[:2])
