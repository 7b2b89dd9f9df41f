"""The memory that caches may use by default."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_memory", "default_memory"]

_LEAST = 256 << 20
_UNKNOWN = 4 << 30
_MEMINFO, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return the bytes that this process can allocate without swapping: of the machine, or of its container."""
    free = _free()
    try:
        most = (_GROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_GROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return free
    return min(free, max(0, int(most) - used)) if most.isdigit() else free


def _free() -> int:
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines() if ":" in line)
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # Windows
        return _UNKNOWN


def default_memory(weights: int) -> int:
    """Return half of the memory that is left when the weights, in bytes, are cached by the system."""
    return max(_LEAST, (available_memory() - weights) // 2)
