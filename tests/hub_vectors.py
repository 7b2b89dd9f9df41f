"""Golden folders of quantized models, made by the real libraries: tests/vectors/hub/README.md."""

import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np

HUB = Path(__file__).parent / "vectors" / "hub"


def folder(case):
    return HUB / case


def hashes(family):
    """Case -> weight name -> SHA-256 of the library's dequantized values, as bytes of bfloat16, row by row."""
    return json.loads((HUB / f"{family}.json").read_text(encoding="utf-8"))


def rounded(values):
    """Values rounded to bfloat16, as float32."""
    return np.asarray(values).astype(ml_dtypes.bfloat16).astype(np.float32)


def digest(values):
    """The hash of float32 values that bfloat16 can hold."""
    return hashlib.sha256(np.asarray(values, ml_dtypes.bfloat16).tobytes()).hexdigest()


def logits(case):
    """Tokens [n] and the library's logits, float32 [n, vocabulary]."""
    with np.load(HUB / case / "logits.npz") as found:
        return found["tokens"][0], np.asarray(found["logits"], np.float32).reshape(len(found["tokens"][0]), -1)
