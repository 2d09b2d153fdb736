"""rms_norm_rows against its reference, with and without the residual stream."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels import rms_norm_rows as norm
from freetoken.kernels.triton_import import INTERPRETED
from tests.kernels.tolerance import assert_close, poisoned

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SHAPES = pytest.mark.parametrize(
    ("tokens", "width"), [(0, 16), (1, 1), (1, 576), (5, 100), (3, 2048), (2, 5120)], ids=str
)


@DTYPES
@SHAPES
@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
def test_rms_norm_rows_named_shape(
    tokens: int, width: int, dtype: torch.dtype, device: torch.device, *, with_residual: bool
) -> None:
    """Columns past the width count in the mean, or the residual misses the sum."""
    generator = torch.Generator().manual_seed(2)
    x, residual = (
        (torch.randn(tokens, width + 8, generator=generator) * 3).to(device, dtype)[:, :width]
        for _ in range(2)
    )
    weight = torch.randn(width, generator=generator).to(device, dtype)
    expected, total = norm.reference(x, weight, 1e-5, residual if with_residual else None)
    out = poisoned((tokens, width), dtype, device)
    norm.rms_norm_rows(x, weight, 1e-5, out, residual=residual if with_residual else None)
    assert_close(out, expected)
    if with_residual and INTERPRETED and dtype is torch.bfloat16:
        assert_close(residual, total)  # the interpreter cuts bf16 off where the device rounds
    elif with_residual:
        assert torch.equal(residual, total)


def test_rms_norm_rows_in_place(device: torch.device) -> None:
    """Writing over x changes values that are still to be read."""
    x, weight = torch.randn(7, 300, device=device), torch.randn(300, device=device)
    expected = norm.reference(x, weight, 1e-6)[0]
    assert_close(norm.rms_norm_rows(x, weight, 1e-6, x), expected)


def test_rms_norm_rows_large_values_stay_finite(device: torch.device) -> None:
    """Squares overflow when they are added in half precision."""
    x = torch.full((2, 64), 3e4, device=device, dtype=torch.float16)
    out = norm.rms_norm_rows(
        x, torch.ones(64, device=device, dtype=torch.float16), 1e-6, torch.empty_like(x)
    )
    assert_close(out, torch.ones_like(x))


def test_rms_norm_rows_wrong_shapes_refused(device: torch.device) -> None:
    """A weight of another width is read past its end."""
    x = torch.zeros(2, 8, device=device)
    for weight, out in ((torch.ones(7, device=device), x), (torch.ones(8, device=device), x[:1])):
        with pytest.raises(ValueError, match="expected weight"):
            norm.rms_norm_rows(x, weight, 1e-6, out)


@pytest.mark.gpu
@pytest.mark.limit(60)
@pytest.mark.parametrize(
    ("tokens", "width"), [(8192, 2048), (2**20 + 3, 2048)], ids=["8192", "above-2-31-elements"]
)
def test_rms_norm_rows_full_size(tokens: int, width: int) -> None:
    """A row's address overflows 32 bits."""
    device = torch.device("cuda")
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    weight, residual = torch.randn(width, device=device, dtype=torch.bfloat16), x.flip(0)
    last = slice(tokens - 1000, tokens)
    expected, total = norm.reference(x[last], weight, 1e-6, residual[last])
    out = norm.rms_norm_rows(x, weight, 1e-6, poisoned(x.shape, x.dtype, device), residual=residual)
    assert_close(out[last], expected)
    assert torch.equal(residual[last], total)
    assert not out.isnan().any()
