"""Codecs of the tensors of a Hugging Face folder, and the stored tensors of a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyquant.codecs.affine_reader import AffineReader
from polyquant.codecs.dtypes import BY_NUMPY, word_of
from polyquant.codecs.exl3 import EXL3
from polyquant.codecs.fp8 import FP8
from polyquant.codecs.hf_mxfp4 import HF_MXFP4
from polyquant.errors import PlanError
from polyquant.formats.huggingface import mxfp4
from polyquant.formats.huggingface.exl3 import stored_names
from polyquant.registry import codec
from polyquant.types import Codec, Shape

__all__ = ["PACKED", "bitnet_codec", "holds", "of_other_tools", "stored_tensors"]

PACKED = "hf_bitnet."
_ELSEWHERE = {"trellis.": "trellis-v3", "w8a": "msmodelslim", "w4a": "msmodelslim"}
"""Prefix of a codec's name -> the format that supports it."""


def bitnet_codec(config: Mapping[str, Any]) -> Codec | None:
    """The codec of packed linear layers if config.json declares BitNet. linear_class alone determines the meaning of
    the scale.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "bitnet":
        return None
    kind = "autobitlinear" if quantization.get("linear_class") == "autobitlinear" else "bitlinear"
    return codec(PACKED + kind)


def holds(codec: Codec) -> bool:
    """True if a folder that we write can hold the codec."""
    return word_of(codec) is not None or isinstance(codec, EXL3) or codec is HF_MXFP4 or codec.name.startswith(PACKED)


def of_other_tools(codec: Codec) -> bool:
    """True for the codecs of other tools' quantized folders, which are read and never written."""
    return isinstance(codec, AffineReader | FP8)


def stored_tensors(name: str, shape: Shape, target: Codec) -> list[tuple[str, str, str, Shape]]:
    """(part, name in the file, dtype, shape in the file) of one weight. Raises PlanError for unsupported codecs."""
    if (dtype := word_of(target)) is not None:
        return [(part, name, dtype, shape) for part in target.specs(shape)]
    if isinstance(target, EXL3):
        return stored_names(name, shape, target)
    if target is HF_MXFP4:
        if not name.endswith(mxfp4.BLOCKS):
            raise PlanError("only stacks of experts named *_blocks can be MXFP4 in a Hugging Face folder", tensor=name)
        return mxfp4.stored_names(name, shape)
    if not target.name.startswith(PACKED):
        raise PlanError(
            f"a Hugging Face folder cannot store {target.name}",
            tensor=name,
            hint=next(
                (f"add --to {to}" for word, to in _ELSEWHERE.items() if target.name.startswith(word)),
                "choose bf16, f16, f32, hf_bitnet.autobitlinear or exl3.4.mul1",
            ),
        )
    if not name.endswith(".weight"):
        raise PlanError("only tensors named *.weight can be packed", tensor=name, found=target.name)
    stem = name.removesuffix("weight")
    return [(part, stem + part, BY_NUMPY[spec.dtype], spec.shape) for part, spec in target.specs(shape).items()]
