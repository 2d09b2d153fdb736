"""Unpacking of GGUF blocks against gguf-py on random bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from freetoken.native import Format, Native, NativeError, Type, Unpack

SCALES_AT = {
    Format.Q4_0: [0],
    Format.Q4_1: [0, 2],
    Format.Q5_0: [0],
    Format.Q5_1: [0, 2],
    Format.Q8_0: [0],
    Format.Q4_K: [0, 2],
    Format.Q5_K: [0, 2],
    Format.Q6_K: [208],
}
"""Where the half-precision scales of a block lie; every other byte may hold anything."""


def random_blocks(form: Format, count: int, seed: int) -> np.ndarray:
    """Blocks [count, bytes] of random bytes whose scales are finite: normal, subnormal, zero."""
    rng = np.random.default_rng(seed)
    _, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(form)]
    blocks = rng.integers(0, 256, (count, num_bytes), dtype=np.uint8)
    for at in SCALES_AT[form]:
        bits = rng.integers(0, 0x7C00, count, dtype=np.uint16)
        bits |= rng.integers(0, 2, count, dtype=np.uint16) << 15
        bits[:3] = [0, 0x8000, 1]
        blocks[:, at : at + 2] = bits.view(np.uint8).reshape(count, 2)
    return blocks


def unpacked(native: Native, form: Format, blocks: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """All values of `blocks` in `dtype`, by the library."""
    values, _ = GGML_QUANT_SIZES[GGMLQuantizationType(form)]
    out = torch.full((blocks.shape[0] * values,), float("nan"), dtype=dtype)
    native.unpack(
        Unpack(
            format=form,
            type=Type.BF16 if dtype == torch.bfloat16 else Type.F32,
            elements=out.numel(),
            packed=blocks.ctypes.data,
            out=out.data_ptr(),
        )
    )
    return out


@pytest.mark.parametrize("form", list(Format), ids=lambda form: form.name.lower())
@pytest.mark.parametrize("count", [3, 1111], ids="blocks={}".format)
def test_unpack_is_bit_equal_to_gguf(native: Native, form: Format, count: int) -> None:
    """A fused multiply-add, a swapped nibble or a wrong six-bit scale."""
    blocks = random_blocks(form, count, seed=int(form))
    want = dequantize(blocks, GGMLQuantizationType(form)).reshape(-1)
    got = unpacked(native, form, blocks, torch.float32).numpy()
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("form", list(Format), ids=lambda form: form.name.lower())
def test_unpack_to_bf16_rounds_to_nearest_even(native: Native, form: Format) -> None:
    """Truncation, or ties that go up: torch rounds gguf-py's values as the oracle."""
    blocks = random_blocks(form, 515, seed=100 + int(form))
    want = torch.from_numpy(dequantize(blocks, GGMLQuantizationType(form)).reshape(-1)).bfloat16()
    got = unpacked(native, form, blocks, torch.bfloat16)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def test_unpack_of_infinite_scale_matches_gguf(native: Native) -> None:
    """A half-precision conversion that treats exponent 31 as a number."""
    blocks = random_blocks(Format.Q8_0, 8, seed=1)
    blocks[:, :2] = np.frombuffer(np.array([0x7C00, 0xFC00, 0x7E00], "<u2").tobytes(), np.uint8)[
        np.arange(16) % 6
    ].reshape(8, 2)
    with np.errstate(invalid="ignore"):
        want = dequantize(blocks, GGMLQuantizationType.Q8_0).reshape(-1)
    got = unpacked(native, Format.Q8_0, blocks, torch.float32).numpy()
    np.testing.assert_array_equal(got, want)


def test_unpack_of_part_of_a_block_is_refused(native: Native) -> None:
    """Reading past the end of a file's mapping."""
    with pytest.raises(NativeError, match="multiple of 256 elements, got 100"):
        native.unpack(Unpack(format=Format.Q4_K, type=Type.F32, elements=100))


def test_unpack_of_unknown_format_is_refused(native: Native) -> None:
    """A format we cannot read must not come out as silence."""
    with pytest.raises(NativeError, match="got 99"):
        native.unpack(Unpack(format=99, type=Type.F32, elements=256))
