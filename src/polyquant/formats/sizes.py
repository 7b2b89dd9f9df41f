"""Sizes of shards as people write them."""

from __future__ import annotations

import re

from polyquant.errors import PlanError

__all__ = ["DEFAULT_SHARD_SIZE", "shard_bytes"]

DEFAULT_SHARD_SIZE = "2GB"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def shard_bytes(size: int | str) -> int:
    """'2GB' (powers of 1000, as hubs count), '2GiB' or a number of bytes -> bytes. Raises PlanError for anything else."""
    if isinstance(size, int) and not isinstance(size, bool):
        found = size
    else:
        match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*([KMG]I?B)?", str(size).strip().upper(), re.ASCII)
        found = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if found < 1:
        raise PlanError("no size of a shard", expected='"1GB", "2GB", "5GB", "10GB" or a number of bytes', found=size)
    return found
