"""Watching a word of memory without the native library: a thread looks every half millisecond."""

from __future__ import annotations

import os
import threading
import time

_LOOK_S = 0.0005
"""At half the thread wakes the interpreter more than it helps; at double tokens come a millisecond
late."""


class PollWatch:
    """Owns the thread. Does what native.Watch does, slower."""

    def __init__(self, word: memoryview, eventfd: int) -> None:
        self._word = word
        self._eventfd = eventfd
        self._target = 0
        self._armed = threading.Event()
        self._is_ending = False
        self._seen_ns = 0
        self._thread = threading.Thread(target=self._serve, name="freetoken-watch", daemon=True)
        self._thread.start()

    def arm(self, number: int) -> None:
        """Say that `number` is going to be written."""
        self._target = number
        self._armed.set()

    def seen_ns(self) -> int:
        """When the last change was seen, on the clock of time.monotonic_ns()."""
        return self._seen_ns

    def close(self) -> None:
        """End and join the thread. Closing twice does nothing."""
        self._is_ending = True
        self._armed.set()
        self._thread.join()

    def _serve(self) -> None:
        seen = 0
        while True:
            self._armed.wait()
            while self._word[0] <= seen and not self._is_ending:
                time.sleep(_LOOK_S)
            if self._is_ending:
                return
            seen = self._word[0]
            self._seen_ns = time.monotonic_ns()
            if seen >= self._target:
                self._armed.clear()
                if self._target > seen:  # armed again meanwhile
                    self._armed.set()
            os.eventfd_write(self._eventfd, 1)
