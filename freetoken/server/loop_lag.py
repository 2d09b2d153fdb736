"""How late the event loop runs what is due: always measured, shown in /v1/stats."""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass

_PERIOD_S = 0.01
"""A hundred looks a second cost 0.05 % of a core; half finds no more, double blurs a 5 ms target.
"""

_KEPT = 6000
"""The last minute."""


@dataclass(frozen=True, slots=True)
class LagFigures:
    """Lateness over the last minute, in milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float


class LoopLag:
    """Owns the record of one loop's lateness; `run` is a task of the root group."""

    def __init__(self) -> None:
        self._late_s = array("d")
        self._next = 0

    async def run(self) -> None:
        """Sleep a little, note how much too long it took; until cancelled."""
        clock = time.monotonic  # uvloop's own clock stands still while the loop is busy
        while True:
            due = clock() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            self.note(clock() - due)

    def note(self, late_s: float) -> None:
        """Keep one lateness, dropping the oldest beyond a minute."""
        late_s = max(late_s, 0.0)
        if len(self._late_s) < _KEPT:
            self._late_s.append(late_s)
        else:
            self._late_s[self._next] = late_s
            self._next = (self._next + 1) % _KEPT

    def figures(self) -> LagFigures:
        """Percentiles of what is kept; zeros before the first look."""
        ordered = sorted(self._late_s) or [0.0]
        last = len(ordered) - 1
        return LagFigures(
            p50_ms=1e3 * ordered[last // 2],
            p99_ms=1e3 * ordered[int(last * 0.99)],
            max_ms=1e3 * ordered[last],
        )
