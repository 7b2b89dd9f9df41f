"""Safetensors dtype names <-> plain codecs and numpy dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from polyquant.codecs.opaque_dtype import OpaqueDtype
from polyquant.registry import codec
from polyquant.types import Codec

__all__ = ["BY_NUMPY", "NUMPY", "PLAIN", "WORDS", "codec_of", "word_of"]

PLAIN = {
    "F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "I64": "i64", "I32": "i32", "I16": "i16", "I8": "i8",
    "U64": "u64", "U32": "u32", "U16": "u16", "U8": "u8", "BOOL": "bool", "F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2",
}  # fmt: skip
WORDS = {name: dtype for dtype, name in PLAIN.items()}
NUMPY: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"), "U8": np.dtype("u1"),
    "U32": np.dtype("<u4"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}  # fmt: skip
BY_NUMPY = {dtype: word for word, dtype in NUMPY.items()}


def codec_of(dtype: str, nbytes: int) -> Codec:
    """Return the codec of a safetensors dtype; an opaque codec if it cannot be decoded."""
    if dtype in PLAIN:
        return codec(PLAIN[dtype])
    return OpaqueDtype(type_id=-1, nbytes=nbytes, dtype=dtype)


def word_of(codec: Codec) -> str | None:
    """Return the safetensors dtype of a plain or opaque codec (one part, stored as an array of that dtype).

    None for any other codec.
    """
    return codec.dtype if isinstance(codec, OpaqueDtype) else WORDS.get(codec.name)
