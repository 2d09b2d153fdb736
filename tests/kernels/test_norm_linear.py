"""norm_linear and lm_head against their references: ragged rows and widths, one row, batches, bias, gate."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels import lm_head, norm_linear
from freetoken.kernels.rows import RowConfig
from tests.kernels.interpreter import scalar_bounds  # noqa: F401
from tests.kernels.tolerance import assert_close, poisoned

EPS = 1e-6
SHAPES = [
    pytest.param(1, 8, 64, id="one-row"),
    pytest.param(2, 7, 96, id="ragged-rows"),
    pytest.param(3, 33, 576, id="ragged-width"),
    pytest.param(1, 1, 300, id="one-output"),
    pytest.param(8, 16, 512, id="batch-8"),
]
GPU_SHAPES = [
    pytest.param(1, 5120, 2048, id="qwen3-qkv"),
    pytest.param(8, 5120, 2048, id="qwen3-qkv-batch-8"),
    pytest.param(3, 960, 576, id="smollm2-qkv"),
    pytest.param(1, 28672, 4096, id="mixtral-up"),
]


def _inputs(
    generator: torch.Generator,
    device: torch.device,
    batch: int,
    n: int,
    width: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    shapes = ((batch, width), (width,), (n, width), (n,))
    x, norm, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return tuple(t.to(device, dtype) for t in (x * 3, norm, weight / width**0.5, bias))


def _check(
    device: torch.device,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    gated: bool,
    biased: bool,
    normed: bool,
) -> None:
    x, norm, weight, bias = _inputs(torch.Generator().manual_seed(3), device, *shape, dtype)
    if gated:
        weight, bias = torch.cat([weight, weight.flip(0)]), torch.cat([bias, -bias])
    out = poisoned((shape[0], shape[1]), dtype, device)
    options = {"bias": bias if biased else None, "gated": gated}
    norm_linear.norm_linear(x, norm if normed else None, weight, EPS, out=out, **options)
    assert_close(out, norm_linear.reference(x, norm if normed else None, weight, EPS, **options))


@pytest.mark.parametrize(("batch", "n", "width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_norm_linear_matches_reference(
    device: torch.device, batch: int, n: int, width: int, dtype: torch.dtype
) -> None:
    """Caught: rows or columns past the end taken along or left out, a norm factor of another token."""
    _check(device, (batch, n, width), dtype, gated=False, biased=False, normed=True)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("biased", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("normed", [False, True], ids=["no-norm", "norm"])
def test_norm_linear_options(device: torch.device, gated: bool, biased: bool, normed: bool) -> None:
    """Caught: the bias of the gate added to the up rows, the activation before the bias, a norm that was not asked for."""
    _check(device, (2, 9, 80), torch.float32, gated=gated, biased=biased, normed=normed)


def test_norm_linear_alone_and_in_batch_same_bits(
    device: torch.device, generator: torch.Generator
) -> None:
    """Caught: a token's text that depends on its neighbours."""
    x, norm, weight, _ = _inputs(generator, device, 4, 24, 576, torch.bfloat16)
    together = norm_linear.norm_linear(
        x, norm, weight, EPS, out=poisoned((4, 24), torch.bfloat16, device)
    )
    for row in range(4):
        alone = norm_linear.norm_linear(
            x[row : row + 1], norm, weight, EPS, out=poisoned((1, 24), torch.bfloat16, device)
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(
    "config", [RowConfig(1, 1, 64), RowConfig(2, 2, 256), RowConfig(8, 4, 1024)], ids=str
)
def test_norm_linear_any_config(
    device: torch.device, generator: torch.Generator, config: RowConfig
) -> None:
    """Caught: a config from a sweep that is only right for the default tiles."""
    x, norm, weight, _ = _inputs(generator, device, 2, 21, 320, torch.float32)
    out = norm_linear.norm_linear(
        x, norm, weight, EPS, out=poisoned((2, 21), torch.float32, device), config=config
    )
    assert_close(out, norm_linear.reference(x, norm, weight, EPS))


def test_norm_linear_wrong_shapes_refused(device: torch.device, generator: torch.Generator) -> None:
    """Caught: a kernel that reads past its input."""
    x, norm, weight, _ = _inputs(generator, device, 2, 8, 64, torch.float32)
    with pytest.raises(ValueError, match="expected contiguous x"):
        norm_linear.norm_linear(x[:, :32], norm, weight, EPS, out=torch.empty(2, 8, device=device))
    with pytest.raises(ValueError, match="expected contiguous out"):
        norm_linear.norm_linear(x, norm, weight, EPS, out=torch.empty(2, 4, device=device))


def test_lm_head_matches_reference(device: torch.device, generator: torch.Generator) -> None:
    """Caught: logits rounded to the model's dtype."""
    x, norm, weight, _ = _inputs(generator, device, 3, 101, 96, torch.bfloat16)
    out = lm_head.lm_head(x, norm, weight, EPS, out=poisoned((3, 101), torch.float32, device))
    assert_close(out, lm_head.reference(x, norm, weight, EPS))


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "n", "width"), GPU_SHAPES)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.limit(120)
def test_norm_linear_full_size(
    device: torch.device, batch: int, n: int, width: int, gated: bool
) -> None:
    """Caught: what only shows compiled, at the sizes that are served."""
    for dtype in (torch.bfloat16, torch.float32):
        _check(device, (batch, n, width), dtype, gated=gated, biased=True, normed=True)


@pytest.mark.gpu
@pytest.mark.limit(120)
def test_lm_head_full_size(device: torch.device, generator: torch.Generator) -> None:
    """Caught: a row address that overflows 32 bits (2.5e9 weight elements)."""
    vocab, hidden = 620_000, 4096
    x, norm, _, _ = _inputs(generator, device, 1, 1, hidden, torch.bfloat16)
    weight = torch.empty(vocab, hidden, dtype=torch.bfloat16, device=device).normal_()
    out = lm_head.lm_head(x, norm, weight, EPS, out=poisoned((1, vocab), torch.float32, device))
    assert_close(out[:, -512:], lm_head.reference(x, norm, weight[-512:], EPS))
    assert bool(out.isfinite().all())
