"""silu_mul_rows against its reference."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels import silu_mul_rows as gate
from tests.kernels.tolerance import assert_close, poisoned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "inter"), [(0, 8), (1, 1), (3, 100), (2, 1536)], ids=str)
def test_silu_mul_rows_named_shape(
    tokens: int, inter: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Gate and up change places, or the last columns are not written."""
    x = (torch.randn(tokens, 2 * inter + 8) * 4).to(device, dtype)[:, : 2 * inter]
    assert_close(gate.silu_mul_rows(x, poisoned((tokens, inter), dtype, device)), gate.reference(x))


def test_silu_mul_rows_wrong_shapes_refused(device: torch.device) -> None:
    """An output of another width is read past the end of x."""
    with pytest.raises(ValueError, match="expected x"):
        gate.silu_mul_rows(torch.zeros(2, 6, device=device), torch.zeros(2, 4, device=device))


@pytest.mark.gpu
@pytest.mark.limit(60)
def test_silu_mul_rows_above_2_31_elements() -> None:
    """A row's address overflows 32 bits."""
    x = torch.randn(2**17 + 3, 2 * 8192, device="cuda", dtype=torch.bfloat16)
    out = gate.silu_mul_rows(x, poisoned((x.shape[0], 8192), x.dtype, x.device))
    assert_close(out[-100:], gate.reference(x[-100:]))
    assert not out.isnan().any()
