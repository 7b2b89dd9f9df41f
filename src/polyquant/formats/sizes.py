"""Parse shard sizes."""

from __future__ import annotations

import re

from polyquant.errors import PlanError

__all__ = ["DEFAULT_SHARD_SIZE", "shard_bytes"]

DEFAULT_SHARD_SIZE = "2GB"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def shard_bytes(size: int | str) -> int:
    """Parse '2GB' (powers of 1000), '2GiB' or a number of bytes. Raises PlanError."""
    if isinstance(size, int) and not isinstance(size, bool):
        nbytes = size
    else:
        match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*([KMG]I?B)?", str(size).strip().upper(), re.ASCII)
        nbytes = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if nbytes < 1:
        raise PlanError("not a shard size", expected='"1GB", "2GB", "5GB", "10GB" or a number of bytes', found=size)
    return nbytes
