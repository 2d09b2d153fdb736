"""Root-mean-square norm of many rows, after adding to the residual stream. y = s / sqrt(mean(s^2) + eps) * weight, s = residual + x."""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels.device_limits import run_options
from freetoken.kernels.triton_import import next_power_of_2, tl, triton


def reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm and the sum, which is rounded to the dtype of the residual before it is normalised."""
    total = x if residual is None else (residual.float() + x.float()).to(residual.dtype)
    wide = total.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight.float()).to(x.dtype), total


@triton.jit
def _kernel(
    x,
    weight,
    residual,
    out,
    eps,
    width,
    x_stride,
    residual_stride,
    out_stride,
    RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    inside = cols < width
    values = tl.load(x + row * x_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        # Rounded before the norm: a later step that reads the stored sum must see what this one normalised.
        places = residual + row * residual_stride + cols
        total = (values + tl.load(places, mask=inside, other=0.0).to(tl.float32)).to(
            residual.dtype.element_ty
        )
        tl.store(places, total, mask=inside)
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    y = values * scale * tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + cols, y.to(out.dtype.element_ty), mask=inside)


def rms_norm_rows(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    num_warps: int | None = None,
) -> Tensor:
    """Normalise each row of x; with `residual`, add x to it in place first and normalise the sum.

    x         [tokens, width], rows of any stride
    weight    [width]
    residual  [tokens, width] or None; changed in place
    out       [tokens, width]; may be x itself; every element written
    num_warps of a program, for a bench; a row is one program
    Raises ValueError if shapes differ. Reference: `reference`, 1e-6 relative in fp32, 1e-2 in bf16. Source: arXiv 1910.07467.
    """
    tokens, width = x.shape
    tensors = (x, out) if residual is None else (x, out, residual)
    if weight.shape != (width,) or any(
        tensor.shape != x.shape or tensor.stride(1) != 1 for tensor in tensors
    ):
        raise ValueError(
            f"expected weight [{width}] and rows {tuple(x.shape)}, got {tuple(weight.shape)}, out {tuple(out.shape)}"
        )
    if tokens:
        lanes = next_power_of_2(width)
        _kernel[(tokens,)](
            x, weight, x if residual is None else residual, out, eps, width,
            x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0), RESIDUAL=residual is not None,
            WIDTH=lanes, **run_options(num_warps or min(16, max(1, lanes // 512))),
        )  # fmt: skip
    return out
