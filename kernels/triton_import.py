"""The one place that asks whether Triton is there. Kernel files import from here and so load without it.

Without Triton the names are stand-ins good enough to define kernels, not to launch them: `HAS_TRITON` says which.
`INTERPRETED` is true when Triton runs kernels on the CPU (its own setting TRITON_INTERPRET=1, for tests).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

triton: Any
tl: Any
tl_cuda: Any
libdevice: Any
"""Untyped: its own types say that a kernel takes tl.constexpr where a launch passes plain values."""

try:
    import triton
    import triton.language as tl
    from triton.language.extra import cuda as tl_cuda
    from triton.language.extra import libdevice

    HAS_TRITON = True
    INTERPRETED = bool(triton.knobs.runtime.interpret)
except ImportError:

    class _Absent:
        """Stands in for the modules: `jit`, plain or with options, hands the function back, which nobody calls."""

        def jit(
            self, function: Callable[..., Any] | None = None, **_options: Any
        ) -> Callable[..., Any]:
            return self.jit if function is None else function

        def __getattr__(self, name: str) -> Any:
            return None

    triton = _Absent()
    tl = _Absent()
    tl_cuda = _Absent()
    libdevice = _Absent()
    HAS_TRITON = False
    INTERPRETED = False

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "early_launch",
    "libdevice",
    "next_power_of_2",
    "tl",
    "tl_cuda",
    "triton",
]


@cache
def early_launch(device: torch.device) -> bool:
    """Whether kernels on the device may start before the previous one ends (compute capability 9.0 and up)."""
    return (
        device.type == "cuda"
        and not INTERPRETED
        and torch.cuda.get_device_capability(device)[0] >= 9
    )


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n and at least 1."""
    return 1 << max(n - 1, 0).bit_length()
