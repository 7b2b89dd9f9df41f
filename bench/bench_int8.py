"""Compare the error of int8 activations with llama.cpp's on every golden model of tests/vectors/architectures.

Each model is converted to a Q8_0 GGUF in a temporary folder. Both programs score the same random tokens; the exact
logits are those with `activations="float"`. The figure is the median over tokens of the relative RMS error of the
logits: in a random mixture of experts a small error can route a token to a different expert, and such tokens do not
measure precision. Column `mean` includes them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import polyquant
from measure import Row, Section

MODELS = Path(__file__).resolve().parent.parent / "tests" / "vectors" / "architectures"
TEXTS, TOKENS = 20, 24
BY_LAYERS = ("baichuan", "exaone4")
"""llama.cpp derives positions (Baichuan) and windows (EXAONE 4) from the number of layers of the large models."""


def llama_cpp(path: Path, texts: NDArray[np.int64]) -> NDArray[np.float32] | None:
    """Return logits, float32 [samples, tokens, vocabulary]; None if llama.cpp is missing or cannot load the file."""
    if find_spec("llama_cpp") is None:
        return None
    from llama_cpp import Llama

    try:
        model = Llama(str(path), n_ctx=64, n_batch=64, n_threads=1, logits_all=True, verbose=False)
    except ValueError:
        return None
    scores = []
    for text in texts:
        model.reset()
        model.eval(text.tolist())
        scores.append(np.array(model.scores[: len(text)], np.float32))
    return np.stack(scores)


def errors(logits: NDArray[np.float32], exact: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the relative RMS error of each token, [samples * tokens]."""
    difference = np.square(logits.astype(np.float64) - exact).mean(-1)
    return np.sqrt(difference / np.square(exact.astype(np.float64)).mean(-1)).ravel()


def rows() -> Iterator[Row]:
    """Yield one row per model; bar: a median error of at most llama.cpp's."""
    with tempfile.TemporaryDirectory() as place:
        for folder in sorted(p for p in MODELS.iterdir() if p.is_dir()):
            path = Path(place) / f"{folder.name}.gguf"
            polyquant.quantize(folder, path, codec="q8_0", requantize=True, measure=False)
            try:
                model, exactly = polyquant.load(path), polyquant.load(path, activations="float")
                vocabulary = exactly.logits([1]).shape[-1]
            except polyquant.PolyquantError:  # an encoder: it has no logits
                continue
            texts = np.random.default_rng(0).integers(3, vocabulary, (TEXTS, TOKENS))
            exact = np.stack([exactly.logits(t.tolist()) for t in texts])
            ours = errors(np.stack([model.logits(t.tolist()) for t in texts]), exact)
            other = None if folder.name in BY_LAYERS else llama_cpp(path, texts)
            peer = None if other is None else errors(other, exact)
            extra = {"mean": float(ours.mean())} | ({} if peer is None else {"peer's mean": float(peer.mean())})
            median = None if peer is None else float(np.median(peer))
            yield Row(folder.name, "rel. RMS error", float(np.median(ours)), median, 1.0, extra=extra)
            path.unlink()


SECTION = Section("Int8 activations on random models, against llama.cpp", rows, peers=("llama-cpp-python",))
