"""A checkpoint as named tensors, whatever its container. Knows no architecture and no container."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as its header describes it, its bounds already checked against the file."""

    name: str
    """As in the file."""
    shape: tuple[int, ...]
    """In torch order, [rows, cols]; GGUF stores it the other way round."""
    format: str
    """How values are stored: F32, BF16, Q4_1, F8_E4M3, ..."""
    nbytes: int
    file: Path


class TensorSource(Protocol):
    """Owns open files. `read` may run in several threads at once; `close` when none does."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one tensor in its own memory, dequantised or cast to `dtype`.
        out  shape as in `tensors[name]`, contiguous, on the CPU
        Raises WeightError if there is no such tensor, its format is not read, or the file shrank.
        """
        ...

    def close(self) -> None:
        """Close the files. Closing twice does nothing."""
        ...
