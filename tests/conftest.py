"""What every test gets: a time limit, and memory that is never accidentally zero."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

if not torch.cuda.is_available():
    # Triton runs kernels in its interpreter; it looks once, when the first kernel is imported.
    os.environ["TRITON_INTERPRET"] = "1"  # noqa: TID251

LIMIT_S = 20
"""Slowest honest test on two shared cores is about half of this; a hung one must not hold the
suite."""


GPU_LIMIT_S = 180
"""A test on a GPU compiles its kernels first."""


@pytest.fixture(autouse=True)
def _time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that runs over its limit, with the stacks of all threads; `limit(seconds)` raises
    it.
    """
    marker = request.node.get_closest_marker("limit")
    is_on_gpu = request.node.get_closest_marker("gpu") is not None
    seconds = marker.args[0] if marker else GPU_LIMIT_S if is_on_gpu else LIMIT_S

    def expire(_signal: int, _frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__)
        pytest.fail(f"expected an end within {seconds} s, still running", pytrace=True)

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def nan_empty() -> Iterator[None]:
    """Make torch.empty return NaN (integers: the largest value), so that an unwritten output
    element shows.
    """
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Undo what a test configures: a level left behind hides the next test's messages."""
    root, ours = logging.getLogger(), logging.getLogger("freetoken")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])
