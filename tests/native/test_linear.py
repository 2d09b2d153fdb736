"""Few rows times a weight matrix."""

from __future__ import annotations

import pytest
import torch

from freetoken.native import Linear, Native, NativeError, Type, load

SHAPES = [(1, 1), (7, 5), (33, 64), (576, 576), (129, 1536), (320, 577)]


def linear(native: Native, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, columns] fp32 times `weight` [rows, columns], by the library."""
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"))
    native.linear(
        Linear(
            type=Type.BF16 if weight.dtype == torch.bfloat16 else Type.F32,
            tokens=x.shape[0],
            rows=weight.shape[0],
            columns=weight.shape[1],
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            out=out.data_ptr(),
        )
    )
    return out


def make(
    rows: int, columns: int, tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeded x and weight."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    x = torch.randn(tokens, columns, generator=generator)
    return x, torch.randn(rows, columns, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 8, 13], ids="tokens={}".format)
@pytest.mark.parametrize("shape", SHAPES, ids="{0[0]}x{0[1]}".format)
def test_linear_matches_float64(
    native: Native, shape: tuple[int, int], tokens: int, dtype: torch.dtype
) -> None:
    """A lost tail column or row, an unwritten output, a wrong tile."""
    x, weight = make(*shape, tokens, dtype)
    want = (x.double() @ weight.double().T).float()
    got = linear(native, x, weight)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6 * shape[1] ** 0.5 * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_linear_of_a_token_is_the_same_alone(native: Native, dtype: torch.dtype) -> None:
    """A sum whose order depends on the batch: greedy text would change with the neighbours."""
    x, weight = make(320, 577, 13, dtype)
    together = linear(native, x, weight)
    alone = torch.cat([linear(native, row[None].clone(), weight) for row in x])
    assert torch.equal(together, alone)


def test_linear_does_not_depend_on_threads() -> None:
    """Work cut by thread count."""
    x, weight = make(500, 300, 3, torch.float32)
    outs = []
    for threads in (1, 2, 5):
        native = load(threads=threads)
        assert native is not None
        with native:
            outs.append(linear(native, x, weight))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_linear_with_negative_rows_is_refused(native: Native) -> None:
    """A size of ours gone wrong must be an error with its number, not a crash."""
    with pytest.raises(NativeError, match="-3"):
        native.linear(Linear(type=Type.F32, tokens=1, rows=-3, columns=4))


def test_linear_with_unknown_type_is_refused(native: Native) -> None:
    """Weights read in the wrong width."""
    with pytest.raises(NativeError, match="got 7"):
        native.linear(Linear(type=7, tokens=1, rows=3, columns=4))
