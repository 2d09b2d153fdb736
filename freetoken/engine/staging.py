"""Host values on their way to a GPU: one pinned buffer a step, one copy, fixed addresses on the
device.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_RING = 4
"""Staging buffers. Two steps may be in flight and a third being filled; one is spare."""

_ALIGN = 16

Array = NDArray[np.generic]


class Staging:
    """Named arrays of one length. Owns their device memory and a ring of pinned copies.

    device  name to tensor [rows]: the same address in every step, so a captured graph may read it
    """

    def __init__(
        self, fields: Mapping[str, type[np.generic]], rows: int, device: torch.device
    ) -> None:
        starts: dict[str, int] = {}
        size = 0
        for name, dtype in fields.items():
            starts[name] = size
            size += -(-rows * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._ring = [torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in range(_RING)]
        self._arrays: list[dict[str, Array]] = []
        for pinned in self._ring:
            whole = pinned.numpy()
            self._arrays.append(
                {
                    name: whole[starts[name] :][: rows * np.dtype(dtype).itemsize].view(dtype)
                    for name, dtype in fields.items()
                }
            )
        self.device: dict[str, Tensor] = {}
        for name, dtype in fields.items():
            part = self._memory[starts[name] :][: rows * np.dtype(dtype).itemsize]
            self.device[name] = part.view(torch.as_tensor(np.zeros(1, dtype)).dtype)
        self._next = 0

    def begin(self) -> dict[str, Array]:
        """The next step's host arrays, to be written before `send`."""
        self._next = (self._next + 1) % _RING
        return self._arrays[self._next]

    def send(self) -> None:
        """Enqueue the copy of what was written since `begin` on the current stream."""
        self._memory.copy_(self._ring[self._next], non_blocking=True)
