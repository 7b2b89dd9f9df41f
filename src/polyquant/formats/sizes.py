"""Parse sizes in bytes."""

from __future__ import annotations

import re

from polyquant.errors import PlanError

__all__ = ["DEFAULT_SHARD_SIZE", "memory_bytes", "shard_bytes"]

DEFAULT_SHARD_SIZE = "2GB"
_UNITS = {"": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("IB", 1024))
}


def shard_bytes(size: int | str) -> int:
    """Parse '2GB' (powers of 1000), '2GiB' or a number of bytes. Raises PlanError."""
    nbytes = _parsed(size)
    if nbytes is None:
        raise PlanError("not a shard size", expected='"1GB", "2GB", "5GB", "10GB" or a number of bytes', found=size)
    return nbytes


def memory_bytes(size: int | str) -> int:
    """Parse a memory limit like `shard_bytes`. Raises PlanError."""
    nbytes = _parsed(size)
    if nbytes is None:
        raise PlanError("not a memory size", expected='"500MB", "2GB", "8GiB" or a number of bytes', found=size)
    return nbytes


def _parsed(size: int | str) -> int | None:
    """Return a number of bytes of at least 1; None for other values."""
    if isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    else:
        match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*([KMGT]I?B)?", str(size).strip().upper(), re.ASCII)
        nbytes = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    return nbytes if nbytes >= 1 else None
