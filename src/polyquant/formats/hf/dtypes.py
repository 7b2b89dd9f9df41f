"""safetensors' dtype names <-> our plain codecs, and the packed BitNet pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from polyquant.codecs.opaque_dtype import OpaqueDtype
from polyquant.errors import PlanError
from polyquant.registry import codec
from polyquant.types import Codec, Shape

__all__ = ["NUMPY", "PACKED", "WORDS", "bitnet_codec", "codec_of", "stored_tensors"]

PLAIN = {
    "F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "I64": "i64", "I32": "i32", "I16": "i16", "I8": "i8",
    "U64": "u64", "U32": "u32", "U16": "u16", "U8": "u8", "BOOL": "bool", "F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2",
}  # fmt: skip
WORDS = {name: dtype for dtype, name in PLAIN.items()}
NUMPY: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"), "U8": np.dtype("u1"),
}  # fmt: skip
_BY_NUMPY = {dtype: word for word, dtype in NUMPY.items()}
PACKED = "hf_bitnet."


def codec_of(dtype: str, nbytes: int) -> Codec:
    """The codec of a safetensors dtype; an opaque one where we cannot decode it."""
    if dtype in PLAIN:
        return codec(PLAIN[dtype])
    return OpaqueDtype(type_id=-1, nbytes=nbytes, dtype=dtype)


def bitnet_codec(config: Mapping[str, Any]) -> Codec | None:
    """The codec of packed linears if config.json says BitNet. linear_class alone decides what the scale means."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "bitnet":
        return None
    kind = "autobitlinear" if quantization.get("linear_class") == "autobitlinear" else "bitlinear"
    return codec(PACKED + kind)


def stored_tensors(name: str, shape: Shape, target: Codec) -> list[tuple[str, str, str, Shape]]:
    """(part, name in the file, dtype, shape in the file) of one weight. Raises PlanError for codecs that have no place here."""
    if isinstance(target, OpaqueDtype):
        return [("bytes", name, target.dtype, shape)]
    if target.name in WORDS:
        return [("blocks", name, WORDS[target.name], shape)]
    if not target.name.startswith(PACKED):
        raise PlanError(
            f"a Hugging Face folder cannot hold {target.name}",
            tensor=name,
            hint="choose bf16, f16, f32 or hf_bitnet.autobitlinear",
        )
    if not name.endswith(".weight"):
        raise PlanError("only tensors called *.weight can be packed", tensor=name, found=target.name)
    stem = name.removesuffix("weight")
    return [(part, stem + part, _BY_NUMPY[spec.dtype], spec.shape) for part, spec in target.specs(shape).items()]
