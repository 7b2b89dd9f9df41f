"""Small conversions of every kind, for tests that run them in parts or on workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden import VECTORS

__all__ = ["JOBS", "SOURCE", "content"]

SOURCE = VECTORS / "models/tiny-llama-tied/hf"
TEXT = Path(__file__).with_name("test_parts.py")
"""Calibration text: any file of some thousand characters."""
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "gguf": ("out.gguf", {"recipe": "q4_k_m"}),
    "sharded": ("out", {"to": "hf", "shard_bytes": 200_000}),
    "trellis": ("out", {"to": "trellis-v3", "bits": 3, "effort": "fast"}),
    "msmodelslim": ("out", {"to": "msmodelslim", "codec": "w8a16"}),
    "calibrated": ("out", {"bits": 3, "effort": "fast", "to": "trellis-v3", "calibration": TEXT}),
    "ranges": ("out", {"to": "msmodelslim", "codec": "w8a8", "calibration": TEXT}),
    "allocated": ("out", {"to": "trellis-v3", "effort": "fast", "target_bpw": 3.5}),
}
"""Name -> name of the output in its folder, options of `convert`."""


def content(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
