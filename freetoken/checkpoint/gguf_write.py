"""Write a GGUF file: version 3, little-endian. Pairs may be copied from another file as they lie
there.

Knows the container only. The reader is `gguf_header.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.gguf_header import MAGIC, STRING, UINT32, padded

_VERSION = 3


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to be written. `parts` are its bytes, made when they are written."""

    name: str
    shape: tuple[int, ...]
    """In torch order; written reversed."""
    type_id: int
    nbytes: int
    parts: Iterable[NDArray[np.uint8]]


def encode_pair(key: str, value: str | int) -> bytes:
    """Return one metadata pair; an int is stored as 32 unsigned bits."""
    if isinstance(value, str):
        return _encode_text(key) + struct.pack("<I", STRING) + _encode_text(value)
    return _encode_text(key) + struct.pack("<II", UINT32, value)


def encode_header(pairs: Sequence[bytes], tensors: Sequence[OutputTensor], alignment: int) -> bytes:
    """Return everything before the first tensor's data, padding included."""
    out = bytearray(MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(pairs)))
    out += b"".join(pairs)
    offset = 0
    for tensor in tensors:
        out += _encode_text(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        out += struct.pack("<IQ", tensor.type_id, offset)
        offset += padded(tensor.nbytes, alignment)
    return bytes(out) + bytes(padded(len(out), alignment) - len(out))


def write_tensor(file: BinaryIO, tensor: OutputTensor, alignment: int) -> None:
    """Append one tensor and its padding; tensors must be written in the header's order."""
    written = sum(file.write(part.data) for part in tensor.parts)
    assert written == tensor.nbytes, (tensor.name, written, tensor.nbytes)
    file.write(bytes(padded(written, alignment) - written))


def _encode_text(text: str) -> bytes:
    content = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(content)) + content
