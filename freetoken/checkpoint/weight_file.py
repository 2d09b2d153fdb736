"""One open weight file: positioned reads, and what a file that is not a weight file looks like.

Bytes only: no container format, no tensor types.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from freetoken.errors import WeightError

_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"<!doctype html", "an HTML page (an error page saved by a download?)"),
    (b"<html", "an HTML page (an error page saved by a download?)"),
    (b"<?xml", "an XML page (an error page saved by a download?)"),
    (b"version https://git-lfs", "a Git LFS pointer; run `git lfs pull` in its folder"),
    (b"gguf", "a GGUF file"),
    (b"fugg", "a big-endian GGUF file"),
    (b"ggjt", "a GGML file of before GGUF; convert it again"),
    (b"pk\x03\x04", "a zip archive (a pickled PyTorch file?)"),
    (b"\x1f\x8b", "a gzip archive"),
)


class WeightFile:
    """Owns one open file.

    Reads are positioned, so threads may share it, and copy, so a file that shrinks while it is
    read ends in an error instead of a bus fault.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`; raises WeightError if it cannot be read or is no regular file."""
        self.path = path
        try:
            self._handle = path.open("rb", buffering=0)
        except OSError as error:
            raise WeightError(
                f"cannot open {path}: {error.strerror}; check the path and its permissions"
            ) from error
        status = os.fstat(self._handle.fileno())
        if not stat.S_ISREG(status.st_mode):
            self._handle.close()
            raise WeightError(f"expected a regular file, got something else at {path}")
        self.size_bytes = status.st_size

    def fileno(self) -> int:
        return self._handle.fileno()

    def read_bytes(self, offset: int, num_bytes: int) -> bytes:
        """Return up to `num_bytes` from `offset`; fewer at the end of the file."""
        return os.pread(self._handle.fileno(), num_bytes, offset)

    def read_tensor(self, name: str, offset: int, num_bytes: int) -> Tensor:
        """Return [num_bytes] uint8 in memory of its own; `name` is only for the error text."""
        out = torch.empty(num_bytes, dtype=torch.uint8)
        if self._handle.closed:
            raise WeightError(f"cannot read {name!r}: {self.path} is closed")
        view = memoryview(cast("bytearray", out.numpy()))
        done = 0
        while done < num_bytes:
            got = os.preadv(self._handle.fileno(), [view[done:]], offset + done)
            if got == 0:
                raise WeightError(
                    f"{self.path} became shorter while open: tensor {name!r} misses"
                    f" {num_bytes - done} of {num_bytes} bytes; restore the file and start again"
                )
            done += got
        return out

    def close(self) -> None:
        self._handle.close()


def describe_start(head: bytes) -> str:
    """Say what a file that begins with `head` is, for an error text."""
    if not head:
        return "an empty file"
    if not head.strip(b"\0"):
        return "a file that begins with zeros (a download that reserved its space and stopped?)"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for start, meaning in _STARTS:
        if text.startswith(start):
            return meaning
    return f"a file that begins with {head[:8]!r}"
