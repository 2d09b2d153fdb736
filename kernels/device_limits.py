"""What a launch may use of a device, and how it says so. Kernels choose smaller tiles where shared memory is short."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

LARGE_SHARED = 160 * 1024
"""sm_80, sm_90 and sm_100 have at least 163 KiB a block; sm_86, sm_89 and sm_120 have 99 KiB."""


@lru_cache(maxsize=16)
def has_large_shared(device: torch.device) -> bool:
    """Say whether a block may use LARGE_SHARED bytes of shared memory. True on a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= LARGE_SHARED


def run_options(num_warps: int, num_stages: int | None = None) -> dict[str, Any]:
    """Return Triton's own launch settings: warps of a program, and tiles of a loop on their way at once."""
    options: dict[str, Any] = {"num_warps": num_warps}
    return options if num_stages is None else options | {"num_stages": num_stages}
