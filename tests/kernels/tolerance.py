"""How close a kernel must be to its reference, and outputs that show what was not written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of the whole tensor's norm."""


def assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Fail unless |out - expected| / |expected| is within what `dtype` (that of out) allows. NaN fails."""
    assert out.shape == expected.shape
    wide, target = out.double(), expected.double()
    error = (wide - target).norm() / target.norm().clamp(min=1e-30)
    limit = RELATIVE[dtype or out.dtype]
    assert float(error) <= limit, f"relative error {float(error):.2e}, allowed {limit:.0e}"


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory full of NaN, or of the largest integer."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(tuple(shape), value, dtype=dtype, device=device)
