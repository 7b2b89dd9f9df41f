"""Open a GGUF with a large vocabulary: 150,000 tokens, 280,000 merges, 330 tensors.

polyquant reads headers and counts strings.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import polyquant
from measure import Row, Section, in_turn
from synthetic import write_large_header_gguf

BAR_MS = 30.0


def rows() -> Iterator[Row]:
    """Compare with the bar of 30 ms.

    gguf-py and llama.cpp (vocabulary only) take seconds and are timed once or twice.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.gguf"
        write_large_header_gguf(path)

        def ours() -> None:
            assert len(polyquant.open(path)) == 330

        (seconds,) = in_turn(ours, repeats=9)
        yield Row("polyquant.open, against 30 ms", "ms", 1e3 * seconds, BAR_MS, 1.0)

        def tokens() -> None:
            found = polyquant.open(path)
            assert len(list(found.metadata["tokenizer.ggml.tokens"])) == 150_000

        (decoded,) = in_turn(tokens, repeats=3)
        yield Row("the same, with all tokens as Python strings", "ms", 1e3 * decoded)
        if find_spec("gguf") is not None:
            from gguf import GGUFReader

            start = time.perf_counter()
            GGUFReader(path)
            yield Row("against gguf-py, one run", "ms", 1e3 * seconds, 1e3 * (time.perf_counter() - start))


SECTION = Section("open a GGUF of 150,000 tokens, 280,000 merges, 330 tensors", rows, peers=("gguf",))
