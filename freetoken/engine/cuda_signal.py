"""How a GPU step's ids reach the loop: pinned memory, a word that says which step they are of, a
watcher.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque

import numpy as np
import torch
from torch import Tensor

from freetoken.device.completion import Completion
from freetoken.device.poll_watch import PollWatch
from freetoken.engine.cuda_choice import Chosen
from freetoken.engine.staging import Uploads
from freetoken.kernels.publish_step import publish_step
from freetoken.native import Watch, open_library

_KEPT = 2000

_RING = 4
"""Rows of results: two steps in flight, one being read, one spare."""


class CudaSignal:
    """Owns the pinned memory, the completion and what watches the word. Made inside the loop."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._uploads = Uploads(device, max_rows * 8 + 64, ring=_RING)
        self._ids = torch.zeros(_RING, max_rows, dtype=torch.int64).pin_memory()
        self._word = torch.zeros(1, dtype=torch.int64).pin_memory()
        address = self._word.data_ptr()
        word = memoryview((ctypes.c_uint64 * 1).from_address(address)).cast("B").cast("Q")
        self._completion = Completion(word)
        library = open_library()
        self.wake_ups_us: deque[float] = deque(maxlen=_KEPT)
        """From the word's change, as the watcher saw it, to this coroutine; the last steps'."""
        eventfd = self._completion.eventfd
        self._watch = (
            PollWatch(word, eventfd) if library is None else Watch(library, address, eventfd)
        )

    def expect(self, number: int) -> None:
        """A step is about to be launched: watch for its end."""
        self._watch.arm(number)

    def send(self, number: int, chosen: list[Chosen], last_ids: Tensor) -> None:
        """Enqueue the hand-over of a step's ids on the current stream.

        last_ids  [slots] int64, gets each slot's new id for the next step
        """
        device = last_ids.device
        if chosen:
            ids = torch.cat([c.ids for c in chosen])
            is_sound = torch.cat([c.is_sound for c in chosen])
        else:
            ids = torch.empty(0, dtype=torch.int64, device=device)
            is_sound = torch.empty(0, dtype=torch.int8, device=device)
        owners = np.array([s for c in chosen for s in c.slots], np.int64)
        slots = self._uploads.send({"slots": owners})["slots"]
        row = self._ids[number % _RING]
        publish_step(
            ids, is_sound, slots, last_ids, number=number, host_ids=row, host_word=self._word
        )

    def ids(self, number: int, rows: int) -> list[int]:
        """A finished step's ids; -1 for a row that was not sound. From the loop."""
        return self._ids[number % _RING].numpy()[:rows].tolist()

    def fail(self, number: int) -> None:
        """Wake the waiter of a step that could not be launched."""
        self._completion.signal(number)

    async def wait(self, number: int, limit_s: float) -> None:
        """See Completion.wait."""
        began_ns = time.monotonic_ns()
        await self._completion.wait(number, limit_s)
        seen_ns = self._watch.seen_ns()
        if seen_ns >= began_ns:  # otherwise the step was over before anybody waited
            self.wake_ups_us.append((time.monotonic_ns() - seen_ns) / 1e3)

    def close(self) -> None:
        """Stop watching. The device must have no step left."""
        self._watch.close()
        self._completion.close()
