"""What this machine has: memory that can still be used. No torch."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def available_ram_bytes() -> int:
    """Bytes that can be allocated without swapping: the kernel's estimate, or the container's limit
    if that is less.
    """
    available = _meminfo_available()
    for limit, usage in _CGROUP_LIMITS:
        if limit.is_file() and usage.is_file():
            text = limit.read_text().strip()
            if text.isdigit():
                available = min(available, max(0, int(text) - int(usage.read_text())))
    return available


def _meminfo_available() -> int:
    if not _MEMINFO.is_file():
        return 8 << 30  # no such file outside Linux: assume a small machine
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 << 30
