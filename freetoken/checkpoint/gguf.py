"""GGUF checkpoints: one file, or all pieces of a split one, as named tensors and metadata.

Headers are read and checked when a file is opened; data only in `read`. Knows no architecture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from freetoken.checkpoint.dequant import dequantize
from freetoken.checkpoint.gguf_header import GgufHeader, GgufTensor, read_header
from freetoken.checkpoint.source import StoredTensor
from freetoken.checkpoint.weight_file import WeightFile
from freetoken.errors import WeightError
from freetoken.native import Native

_PIECE = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufFile:
    """Owns the open files of one checkpoint. Reads are safe from several threads."""

    def __init__(self, path: Path, native: Native | None = None) -> None:
        """Open `path` and, if it is a piece of a split file, the others. See `open_gguf`."""
        self.path = path
        self._native = native
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: Mapping[str, object] = {}
        """Plain values: str, int, float, bool, list. Of the first piece, which holds all of it."""
        self._places: dict[str, tuple[WeightFile, GgufTensor]] = {}
        self._files: list[WeightFile] = []
        try:
            pieces = _pieces(path)
            for number, piece in enumerate(pieces):
                self._add(piece, number, len(pieces))
        except BaseException:
            self.close()
            raise

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one tensor dequantised to `dtype`, see TensorSource."""
        raw = self.read_raw(name)
        tensor = self.tensors[name]
        return dequantize(raw, tensor.format, dtype, self._native).view(tensor.shape)

    def read_raw(self, name: str) -> Tensor:
        """Return a tensor's bytes as stored, [nbytes] uint8 of its own memory. Raises as `read`."""
        place = self._places.get(name)
        if place is None:
            raise WeightError(f"expected a tensor {name!r} in {self.path}, found none of that name")
        file, tensor = place
        return file.read_tensor(name, tensor.offset, tensor.nbytes)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _add(self, path: Path, number: int, count: int) -> None:
        file = WeightFile(path)
        self._files.append(file)
        header = read_header(file)
        _check_piece(header, path, number, count)
        if number == 0:
            self.metadata = header.metadata
        for tensor in header.tensors:
            known = self.tensors.get(tensor.name)
            if known is not None:
                raise WeightError(
                    f"tensor {tensor.name!r} is in two pieces, {known.file} and {path.name}"
                )
            self.tensors[tensor.name] = StoredTensor(
                tensor.name, tensor.shape, tensor.format, tensor.nbytes, path
            )
            self._places[tensor.name] = file, tensor


def open_gguf(path: Path, native: Native | None = None) -> GgufFile:
    """Open a GGUF file and check its header and the bounds of every tensor.

    Of a split file (`NAME-00001-of-00003.gguf`) any piece may be given; all must lie in one folder.
    `native` speeds up reading; it must stay open as long as the file.
    Raises WeightError: no GGUF file, cut short, a tensor type that cannot be read, a piece missing.
    """
    return GgufFile(path, native)


def _pieces(path: Path) -> list[Path]:
    match = _PIECE.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    pieces = [
        path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)
    ]
    missing = [piece.name for piece in pieces if not piece.is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (
            f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        )
        raise WeightError(
            f"{len(missing)} of {count} pieces missing in {path.parent}: {shown}; download them"
        )
    return pieces


def _check_piece(header: GgufHeader, path: Path, number: int, count: int) -> None:
    stated = header.metadata.get("split.count", 0)
    own = header.metadata.get("split.no", 0)
    if isinstance(stated, int) and stated > 1 and (stated, own) != (count, number):
        raise WeightError(
            f"expected piece {number + 1} of {count} by the name, got piece {own!r} (from 0) of"
            f" {stated} by the"
            f" header of {path}; give the pieces their names back (NAME-00001-of-{stated:05d}.gguf)"
        )
