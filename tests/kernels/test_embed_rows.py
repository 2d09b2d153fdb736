"""embed_rows: the first node of a decode step."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels import embed_rows
from tests.kernels.interpreter import scalar_bounds  # noqa: F401
from tests.kernels.tolerance import poisoned


@pytest.mark.parametrize(("batch", "hidden", "half"), [(1, 32, 8), (3, 1100, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_embed_rows_matches_reference(
    batch: int,
    hidden: int,
    half: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    """Caught: another sequence's token or angle; a cosine that is only good near 0."""
    table = torch.randn(50, hidden, generator=generator).to(device, dtype)
    tokens = torch.randint(50, (batch,), generator=generator).to(device)
    positions = torch.tensor([0, 262_143, 777][:batch], device=device)
    frequencies = 1.0 / (1e6 ** (torch.arange(half, device=device) / half))
    h, cos, sin = (
        poisoned((batch, hidden), dtype, device),
        *(poisoned((batch, half), torch.float32, device) for _ in range(2)),
    )
    embed_rows.embed_rows(tokens, table, positions, frequencies, 1.5, h=h, cos=cos, sin=sin)
    expected = embed_rows.reference(tokens, table, positions, frequencies, 1.5)
    assert torch.equal(h, expected[0])
    torch.testing.assert_close(cos, expected[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(sin, expected[2], atol=1e-5, rtol=0)
