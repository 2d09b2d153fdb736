"""What Triton's interpreter needs here that it does not bring.

Triton 3.6 turns a loop bound into an int by `int(array of one element)`; NumPy 2.4 refuses that.
"""

from __future__ import annotations

from typing import Any

import pytest

interpreter: Any = pytest.importorskip(
    "triton.runtime.interpreter", reason="expected Triton, got none installed"
)


@pytest.fixture(autouse=True)
def scalar_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels loop up to values. Import this name into a test file to switch it on there."""
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)
