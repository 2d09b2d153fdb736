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


class Uploads:
    """Host arrays to new device tensors, several in one copy, through a ring of pinned buffers.

    A buffer comes up again after `ring` uploads: by then its copy must be over. Allocating pinned
    memory for each array instead costs up to a millisecond while the GPU is busy.
    """

    def __init__(self, device: torch.device, num_bytes: int, ring: int) -> None:
        self._device = device
        self._ring = [torch.zeros(num_bytes, dtype=torch.uint8).pin_memory() for _ in range(ring)]
        self._next = 0

    def send(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        """Enqueue the copy on the current stream; one tensor for each array, of its dtype."""
        size = sum(-(-a.nbytes // _ALIGN) * _ALIGN for a in arrays.values())
        self._next = (self._next + 1) % len(self._ring)
        pinned = self._ring[self._next]
        if size > pinned.numel():
            pinned = torch.zeros(size, dtype=torch.uint8).pin_memory()
        whole, start = pinned.numpy(), 0
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        out: dict[str, Tensor] = {}
        for name, array in arrays.items():
            whole[start : start + array.nbytes].view(array.dtype)[:] = array
            dtype = torch.as_tensor(np.zeros(1, array.dtype)).dtype
            out[name] = memory[start : start + array.nbytes].view(dtype)
            start += -(-array.nbytes // _ALIGN) * _ALIGN
        memory.copy_(pinned[:size], non_blocking=True)
        return out
