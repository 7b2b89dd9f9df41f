"""Codecs of the tensors of a Hugging Face folder, and the stored tensors of a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyquant.codecs.affine_codec import AffineCodec
from polyquant.codecs.dtypes import word_of
from polyquant.codecs.exl3 import EXL3
from polyquant.codecs.float_codec import FloatCodec
from polyquant.codecs.hf_mxfp4 import HF_MXFP4
from polyquant.codecs.read_only import ReadOnlyBlocks
from polyquant.errors import PlanError
from polyquant.formats.huggingface import mxfp4
from polyquant.formats.huggingface.exl3 import stored_names
from polyquant.formats.huggingface.schemes import Scheme, StoredTensor, scheme_of, stored_parts
from polyquant.registry import codec
from polyquant.types import Codec, TensorSpec

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
    if word_of(codec) is not None or isinstance(codec, EXL3) or codec is HF_MXFP4 or codec.name.startswith(PACKED):
        return True
    return scheme_of(codec) is not None


def of_other_tools(codec: Codec) -> bool:
    """True for the codecs of other tools' quantized folders, of which some are also written."""
    return isinstance(codec, AffineCodec | FloatCodec | ReadOnlyBlocks)


def stored_tensors(tensor: TensorSpec, chosen: Scheme | None = None) -> list[StoredTensor]:
    """The tensors in the file of one weight. chosen: the scheme of the folder.

    Raises PlanError for unsupported codecs.
    """
    name, shape, target = tensor.name, tensor.shape, tensor.codec
    if (dtype := word_of(target)) is not None:
        return [StoredTensor(part, name, dtype, shape) for part in target.specs(shape)]
    if chosen is not None and chosen.holds(target):
        return chosen.stored(tensor)
    if target is not HF_MXFP4 and (scheme := scheme_of(target)) is not None:
        return scheme.stored(tensor)
    if isinstance(target, EXL3):
        return [StoredTensor(*entry) for entry in stored_names(name, shape, target)]
    if target is HF_MXFP4:
        if not name.endswith(mxfp4.BLOCKS):
            raise PlanError("only stacks of experts named *_blocks can be MXFP4 in a Hugging Face folder", tensor=name)
        return [StoredTensor(*entry) for entry in mxfp4.stored_names(name, shape)]
    if not target.name.startswith(PACKED):
        raise PlanError(
            f"a Hugging Face folder cannot store {target.name}",
            tensor=name,
            hint=next(
                (f"add --to {to}" for word, to in _ELSEWHERE.items() if target.name.startswith(word)),
                "choose bf16, f16, f32, compressed.p4.g128, gptq.4.g128 or awq.4.g128",
            ),
        )
    return stored_parts(tensor)
