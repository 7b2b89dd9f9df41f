"""The memory allocator of the process."""

from __future__ import annotations

import ctypes
from functools import cache

__all__ = ["keep_freed_memory"]

_TRIM, _MAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_MAPPED, _KEPT = 32 << 20, 64 << 20


@cache
def keep_freed_memory() -> None:
    """Let malloc reuse up to 64 MB of freed memory instead of returning every large array to the system.

    Blocks of rows are allocated and freed all the time; mapping and clearing their pages takes up to two thirds of the
    time of a comparison and a third of that of a conversion. It is a setting of the whole process, with the limits to
    which glibc raises its own thresholds in programs that free large arrays. No effect on systems without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM, _KEPT)
        mallopt(_MAP, _MAPPED)
