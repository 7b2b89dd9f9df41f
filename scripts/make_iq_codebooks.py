"""Write src/polyquant/codecs/iq_codebooks.bin from the codebooks of the gguf package (pip install gguf).

Needed only if ggml changes a codebook. The file is described in polyquant/codecs/iq_codebooks.py.
"""

from __future__ import annotations

from pathlib import Path

import gguf.quants
import numpy as np

from polyquant.codecs.iq_codebooks import CODEBOOKS, FILE


def digits(name: str) -> np.ndarray:
    """Return the entries as u16 [entries]: the level index of each value, lowest digit first."""
    book = CODEBOOKS[name]
    peer = getattr(gguf.quants, "IQ1_S" if name == "iq1" else name.upper())
    peer.init_grid()
    values = peer.grid.reshape(book.entries, book.width)
    index = np.searchsorted(book.levels, values)
    if not np.array_equal(np.take(book.levels, index), values):
        raise SystemExit(f"{name}: values outside the levels {book.levels}")
    packed = (index << (book.bits * np.arange(book.width))).sum(axis=1)
    if not (np.diff(packed) > 0).all():
        raise SystemExit(f"{name}: entries are not in ascending order")
    return packed.astype("<u2")


if __name__ == "__main__":
    Path(FILE).write_bytes(b"".join(digits(name).tobytes() for name in CODEBOOKS))
