"""What the loop needs of a runner: something that computes steps in order and says when each is
done.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from freetoken.engine.request import Chunk, StepResult


class Runner(Protocol):
    """Computes planned steps one after the other, away from the loop."""

    @property
    def depth(self) -> int:
        """Steps that may be in flight at once: 2 hides the planning of the next step behind the
        present one.
        """
        ...

    def warm(self, max_prefill_tokens: int) -> None:
        """Do everything that is slow the first time; blocks. Before the first launch."""
        ...

    def launch(self, number: int, chunks: Seq[Chunk]) -> None:
        """Enqueue a step and return at once. `number` rises by one from 1."""
        ...

    async def wait(self, number: int) -> StepResult:
        """Return the result of a launched step; steps are awaited in order. Raises DeviceError if
        the runner failed.
        """
        ...

    async def close(self) -> None:
        """Stop after the step being computed and free what the runner owns."""
        ...
