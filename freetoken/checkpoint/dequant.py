"""GGUF block formats to floating point in plain torch: the reference for native code.

One row of FORMATS each. Bytes in, values out: no files, no tensor names. All arithmetic is float32.
Every product of a block's scales and integers fits 24 bits, so results do not depend on whether a
multiplication and an addition are fused. Source of the layouts: the ggml project's block
definitions; parity with gguf-py, bit for bit, in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from freetoken.native import Format, Native, Type, Unpack

_CHUNK_ELEMENTS = 1 << 15
"""Values decoded at a time: the most that torch does without its own threads, whose barriers cost
more than they give here. Q4_1 to bf16 on 2 EPYC cores shared with other work, values a second: this
3e8, a half 2e8, eight times 5e8 with one torch thread but 5e7 with two. Callers bring threads."""

PLAIN: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F64": torch.float64,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
"""Formats that torch has itself."""

_NATIVE_TYPES: Mapping[torch.dtype, Type] = MappingProxyType(
    {torch.float32: Type.F32, torch.bfloat16: Type.BF16}
)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A quantised format: `elements` values are stored in `block_bytes` bytes."""

    elements: int
    block_bytes: int
    decode: Callable[[Tensor], Tensor]
    """[blocks, block_bytes] uint8 -> [blocks, elements] float32."""


def dequantize(raw: Tensor, name: str, dtype: torch.dtype, native: Native | None = None) -> Tensor:
    """Decode a tensor's bytes, with the native library's threads if given: the same bits, sooner.
    raw   [nbytes] uint8   contiguous, whole blocks
    name                   a key of FORMATS or PLAIN
    out   [values] `dtype`, rounded to nearest even from float32; shares memory with `raw` if
    nothing had to change
    Raises KeyError for an unknown format.
    """
    plain = PLAIN.get(name)
    if plain is not None:
        return raw.view(plain).to(dtype)
    row = FORMATS[name]
    blocks = raw.view(-1, row.block_bytes)
    if native is not None and dtype in _NATIVE_TYPES:
        return _unpack(native, blocks, name, dtype)
    out = torch.empty(blocks.shape[0], row.elements, dtype=dtype)
    step = _CHUNK_ELEMENTS // row.elements
    for start in range(0, blocks.shape[0], step):
        out[start : start + step] = row.decode(blocks[start : start + step])
    return out.view(-1)


def _unpack(native: Native, blocks: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    out = torch.empty(blocks.shape[0] * FORMATS[name].elements, dtype=dtype)
    call = Unpack(
        format=Format[name],
        type=_NATIVE_TYPES[dtype],
        elements=out.numel(),
        packed=blocks.data_ptr(),
        out=out.data_ptr(),
    )
    native.unpack(call)
    return out


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, [blocks, 1] float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """[blocks, groups, n] uint8 -> [blocks, groups, 2, n]: a group's low halves, then its high."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=-2)


def _bits(packed: Tensor) -> Tensor:
    """[blocks, 4] uint8 -> [blocks, 32] uint8: bit i of the little-endian word."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _q4_0(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, None, 2:]).flatten(1).view(torch.int8) - 8
    return _half(blocks, 0) * q


def _q4_1(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, None, 4:]).flatten(1)
    return (_half(blocks, 0) * q).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, None, 6:]).flatten(1) | (_bits(blocks[:, 2:6]) << 4)
    return _half(blocks, 0) * (q.view(torch.int8) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, None, 8:]).flatten(1) | (_bits(blocks[:, 4:8]) << 4)
    return (_half(blocks, 0) * q).add_(_half(blocks, 2))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, 12] uint8 -> scales and minima, each [blocks, 8] uint8 of 6 bits.

    Bytes 0-3 hold scales 0-3, bytes 4-7 minima 0-3, both in their low 6 bits; bytes 8-11 hold the
    low 4 bits of scales and minima 4-7, whose high 2 bits are the top bits of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 0x3F, (third & 0x0F) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 0x3F, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales, minima


def _k_affine(blocks: Tensor, q: Tensor) -> Tensor:
    """Return d * scale * q - dmin * minimum for q [blocks, 8, 32]; bytes 0-15 hold the factors."""
    scales, minima = _k_scales(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales).unsqueeze(-1)
    minimum = (_half(blocks, 2) * minima).unsqueeze(-1)
    return (scale * q).sub_(minimum).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    q = _nibbles(blocks[:, 16:].view(-1, 4, 32))
    return _k_affine(blocks, q.flatten(1, 2))


def _q5_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    high = (blocks[:, None, 16:48] >> shifts) & 1
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).flatten(1, 2)
    return _k_affine(blocks, low | (high << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of nibbles, 64 of bit pairs: two halves of 128 values, each four runs of 32."""
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8).unsqueeze(-1)
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3
    q = (low | (high << 4)).view(torch.int8) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return (scale.unsqueeze(-1) * q.reshape(-1, 16, 16)).flatten(1)


FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        "Q8_0": BlockFormat(32, 34, _q8_0),
        "Q4_0": BlockFormat(32, 18, _q4_0),
        "Q4_1": BlockFormat(32, 20, _q4_1),
        "Q5_0": BlockFormat(32, 22, _q5_0),
        "Q5_1": BlockFormat(32, 24, _q5_1),
        "Q4_K": BlockFormat(256, 144, _q4_k),
        "Q5_K": BlockFormat(256, 176, _q5_k),
        "Q6_K": BlockFormat(256, 210, _q6_k),
    }
)
