"""Kernels run on the CPU here, in Triton's interpreter: tests/conftest.py switches it on.

With a GPU (`-m gpu`) the interpreter stays off and the same tests run compiled.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where this run's kernels work."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def generator() -> torch.Generator:
    """Numbers that are the same in each run; on the CPU, so that devices agree."""
    return torch.Generator().manual_seed(3)


@pytest.fixture(autouse=True)
def _bfloat16_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply bfloat16 matrices: Triton 3.6 multiplies their bit patterns as integers."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    dot = interpreter.InterpreterBuilder.create_dot

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle
        data = (handle.data.astype("uint32") << 16).view("float32")
        return interpreter.TensorHandle(data, interpreter.tl.float32)

    def dot_of_floats(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_of_floats)
