"""How much of a text a calibration reads."""

__all__ = ["SHARD", "TOKENS", "WINDOWS"]

WINDOWS, TOKENS = 128, 512
"""The most windows, and the tokens of each."""

SHARD = 8
"""Windows that are summed first: the result is the sum of the shards, so that processes can share the work."""
