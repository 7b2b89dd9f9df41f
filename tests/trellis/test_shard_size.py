from __future__ import annotations

import pytest

from polyquant.errors import PlanError
from polyquant.formats.sizes import shard_bytes


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("1GB", 10**9), ("2GB", 2 * 10**9), ("5GB", 5 * 10**9), ("10GB", 10**10), ("1.5 gb", 15 * 10**8),
        ("500MB", 5 * 10**8),
        ("2GiB", 2 * 1024**3), (2 * 1024**3, 2 * 1024**3), ("4096", 4096),
    ],
)  # fmt: skip
def test_accepted_sizes(size, expected):
    assert shard_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "GB", "2XB", "-1GB", "0", 0, -1, True, "1e9", "٢GB"])
def test_invalid_sizes_are_one_line_errors(size):
    with pytest.raises(PlanError, match="not a shard size") as caught:
        shard_bytes(size)
    assert "\n" not in str(caught.value)
