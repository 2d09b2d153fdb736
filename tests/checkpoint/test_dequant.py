"""Block formats against gguf-py, bit for bit, in torch and in the native library."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken import native
from freetoken.checkpoint import dequant
from freetoken.checkpoint.dequant import FORMATS, dequantize
from tests.checkpoint.gguf_files import half_places, random_blocks

FORMAT_NAMES = list(FORMATS)


@pytest.fixture
def library() -> Iterator[native.Native | None]:
    """The native library, or None where it was not built."""
    loaded = native.load(threads=2)
    yield loaded
    if loaded is not None:
        loaded.close()


def oracle(raw: np.ndarray, name: str) -> torch.Tensor:
    """The values of packed blocks by gguf-py's formulas, flat."""
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(raw, GGMLQuantizationType[name])
    return torch.from_numpy(values.astype(np.float32)).flatten()


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare patterns, so that zero and minus zero differ."""
    bits = torch.int32 if got.dtype == torch.float32 else torch.int16
    assert torch.equal(got.view(bits), want.view(bits))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_dequantize_random_blocks_equals_gguf_py(name: str) -> None:
    """Catches a wrong nibble order, scale, sign or rounding in any format."""
    raw = random_blocks(name, (40, 2048))
    got = dequantize(torch.from_numpy(raw).flatten(), name, torch.float32)
    assert_same_bits(got, oracle(raw, name))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_dequantize_across_chunks_equals_one_chunk(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches blocks lost or doubled where one chunk ends and the last one is short."""
    raw = torch.from_numpy(random_blocks(name, (3, 2304))).flatten()
    whole = dequantize(raw, name, torch.float32)
    monkeypatch.setattr(dequant, "_CHUNK_ELEMENTS", 1024)
    assert_same_bits(dequantize(raw, name, torch.float32), whole)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantize_native_equals_torch(
    name: str, dtype: torch.dtype, library: native.Native | None
) -> None:
    """Catches text that depends on whether the native library was built."""
    if library is None:
        assert not (native.FOLDER / native.LIBRARY).exists()
        return
    raw = torch.from_numpy(random_blocks(name, (33, 1536))).flatten()
    assert_same_bits(dequantize(raw, name, dtype, library), dequantize(raw, name, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantize_to_half_rounds_the_float32_value(dtype: torch.dtype) -> None:
    """Catches arithmetic done in the target's precision instead of float32."""
    raw = random_blocks("Q5_K", (8, 512))
    got = dequantize(torch.from_numpy(raw).flatten(), "Q5_K", dtype)
    assert_same_bits(got, oracle(raw, "Q5_K").to(dtype))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_dequantize_plain_formats_equal_gguf_py(name: str) -> None:
    """Catches a reinterpreted half: BF16 read as F16 gives plausible nonsense."""
    values = np.random.default_rng(3).normal(size=(4, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, GGMLQuantizationType[name])
    got = dequantize(torch.from_numpy(raw.view(np.uint8)).flatten(), name, torch.float32)
    assert_same_bits(got, oracle(raw, name))


@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(FORMAT_NAMES))
@settings(max_examples=40, deadline=None)
def test_dequantize_any_bytes_equals_gguf_py(seed: int, name: str) -> None:
    """Catches rare codes: extreme scales, negative zero, subnormal halves."""
    raw = random_blocks(name, (1, 256), seed)
    got = dequantize(torch.from_numpy(raw).flatten(), name, torch.float32)
    assert_same_bits(got, oracle(raw, name))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_dequantize_no_blocks_gives_no_values(name: str) -> None:
    """Catches a division or a chunk loop that fails on a tensor with a zero dimension."""
    assert half_places(name)
    assert dequantize(torch.empty(0, dtype=torch.uint8), name, torch.float32).shape == (0,)
