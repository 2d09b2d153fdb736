"""norm_linear and lm_head against their references: ragged rows and widths, one row, batches, bias, gate."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels import linear_add, lm_head, norm_linear
from freetoken.kernels.rows import RowConfig
from freetoken.kernels.tiles import TileConfig
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


TILES = [
    TileConfig(16, 1, 64, 2),
    TileConfig(16, 4, 32, 3),
    TileConfig(32, 2, 64, 2),
    TileConfig(64, 1, 128, 2),
]


@pytest.mark.parametrize("config", TILES, ids=str)
@pytest.mark.parametrize(("batch", "n", "width"), [(1, 16, 64), (3, 33, 576), (8, 70, 304)])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_tiled_products_match_reference(
    device: torch.device, batch: int, n: int, width: int, gated: bool, config: TileConfig
) -> None:
    """Caught: columns or rows past the end taken along, a group of columns left out, lanes without a token stored."""
    shape = batch, n, width
    x, norm, weight, bias = _inputs(
        torch.Generator().manual_seed(3), device, *shape, torch.bfloat16
    )
    if gated:
        weight, bias = torch.cat([weight, weight.flip(0)]), torch.cat([bias, -bias])
    out = poisoned((batch, n), torch.bfloat16, device)
    norm_linear.norm_linear(x, norm, weight, EPS, out=out, bias=bias, gated=gated, config=config)
    assert_close(out, norm_linear.reference(x, norm, weight, EPS, bias=bias, gated=gated))
    if not gated:
        h = out.flip(0).contiguous()
        expected = linear_add.reference(x, weight, h, bias=bias)
        assert_close(linear_add.linear_add(x, weight, h, bias=bias, config=config), expected)


@pytest.mark.parametrize("config", TILES, ids=str)
def test_tiled_products_alone_and_in_batch_same_bits(
    device: torch.device, generator: torch.Generator, config: TileConfig
) -> None:
    """Caught: a token's text that depends on its neighbours, or on its place among them."""
    x, norm, weight, _ = _inputs(generator, device, 8, 48, 576, torch.bfloat16)
    together = norm_linear.norm_linear(
        x, norm, weight, EPS, out=torch.empty(8, 48, device=device), config=config
    )
    added = linear_add.linear_add(
        x, weight, torch.zeros_like(x[:, :48]).contiguous(), config=config
    )
    for row in range(8):
        one = x[row : row + 1]
        alone = norm_linear.norm_linear(
            one, norm, weight, EPS, out=torch.empty(1, 48, device=device), config=config
        )
        assert torch.equal(alone[0], together[row])
        alone = linear_add.linear_add(
            one, weight, torch.zeros_like(one[:, :48]).contiguous(), config=config
        )
        assert torch.equal(alone[0], added[row])


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
@pytest.mark.parametrize(("n", "width"), [(5120, 2048), (2048, 4096), (151_936, 2048)])
def test_served_products_alone_and_in_batch_same_bits(
    device: torch.device, generator: torch.Generator, n: int, width: int
) -> None:
    """Caught: matrix units that add in another order for another batch."""
    x, norm, _, _ = _inputs(generator, device, 8, 1, width, torch.bfloat16)
    weight = torch.randn(n, width, device=device).mul_(width**-0.5).to(torch.bfloat16)
    together = norm_linear.norm_linear(x, norm, weight, EPS, out=torch.empty(8, n, device=device))
    for row in range(8):
        alone = norm_linear.norm_linear(
            x[row : row + 1], norm, weight, EPS, out=torch.empty(1, n, device=device)
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.gpu
@pytest.mark.limit(120)
def test_lm_head_full_size(device: torch.device, generator: torch.Generator) -> None:
    """Caught: a row address that overflows 32 bits (2.5e9 weight elements)."""
    vocab, hidden = 620_000, 4096
    x, norm, _, _ = _inputs(generator, device, 1, 1, hidden, torch.bfloat16)
    weight = torch.empty(vocab, hidden, dtype=torch.bfloat16, device=device).normal_()
    out = lm_head.lm_head(x, norm, weight, EPS, out=poisoned((1, vocab), torch.float32, device))
    # On the matrix units a token times the gain is rounded to bfloat16 once.
    assert_close(out[:, -512:], lm_head.reference(x, norm, weight[-512:], EPS), torch.bfloat16)
    assert bool(out.isfinite().all())
