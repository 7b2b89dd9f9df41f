"""The paths of the golden vectors, and a way to read them. Provenance: the README in each folder of tests/vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np

VECTORS = Path(__file__).parent / "vectors"


def arrays(path: str) -> dict[str, np.ndarray]:
    """All arrays of tests/vectors/<path> (an .npz)."""
    with np.load(VECTORS / path) as z:
        return {k: z[k] for k in z.files}


def cases(z: dict[str, np.ndarray], prefix: str = "packed") -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(suffix, packed, dequantized) of every pair in a ggml vector file."""
    twins = ((key, key.replace("packed", "dequant")) for key in z if key.startswith(prefix))
    return [(key.removeprefix(prefix), z[key], z[twin]) for key, twin in twins if twin in z]
