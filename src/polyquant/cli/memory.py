"""The memory allocator of the process."""

from __future__ import annotations

import ctypes

_TRIM, _MAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_KEPT = 32 << 20


def keep_freed_memory() -> None:
    """Let malloc reuse up to 32 MB of freed memory instead of returning every large array to the system.

    Blocks of rows are allocated and freed all the time; mapping and clearing their pages took two thirds of the time of
    `compare`. No effect on systems without glibc. It is a setting of the whole process, so only the command line uses
    it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM, _KEPT)
        mallopt(_MAP, _KEPT)
