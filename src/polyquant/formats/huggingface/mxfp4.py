"""MXFP4 weights of a Hugging Face folder (quant_method "mxfp4": gpt-oss). Layout: codecs/hf_mxfp4.py.

    X_blocks U8 [experts, out, in / 32, 16]    X_scales U8 [experts, out, in / 32]

Together they are one weight X_blocks [experts, out, in]. As floats it is named X in transformers and transposed:
[experts, in, out].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyquant.architectures.fused import BLOCKS
from polyquant.codecs.dtypes import BY_NUMPY
from polyquant.codecs.float_forms import small_floats_of
from polyquant.codecs.hf_mxfp4 import HF_MXFP4
from polyquant.codecs.keeping import Fate, keeps
from polyquant.errors import InputError, PlanError
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read
from polyquant.formats.huggingface.schemes import StoredTensor
from polyquant.operations import SAME, Transpose, chain
from polyquant.types import Checkpoint, Codec, Shape, TensorMap, TensorSpec

__all__ = [
    "BLOCKS", "METHOD", "SCHEME", "as_floats", "as_stored", "modules", "mxfp4_config", "stored_names", "weight_of",
]  # fmt: skip

METHOD = "mxfp4"
SCALES = "_scales"
_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
_FLOATS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
"""Modules that stay float in gpt-oss, as listed in its config.json."""


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with a tensor X_blocks of bytes."""
    return (n.removesuffix(BLOCKS) for n, t in tensors.items() if n.endswith(BLOCKS) and t.dtype == "U8")


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight:
    """Read one weight. Raises InputError."""
    del settings, read
    blocks, scales = tensors[module + BLOCKS], tensors.get(module + SCALES)
    if scales is None:
        raise InputError("quantized weight lacks its scales", tensor=module, expected=module + SCALES)
    if len(blocks.shape) < 3 or blocks.shape[-1] != 16 or 0 in blocks.shape:
        raise InputError(
            "blocks have an unexpected shape",
            tensor=module,
            expected="U8 [experts, out, in / 32, 16]",
            found=list(blocks.shape),
        )
    if scales.shape != blocks.shape[:-1] or scales.dtype != "U8":
        raise InputError(
            "scales do not fit the weight",
            tensor=module,
            expected=f"U8 {list(blocks.shape[:-1])}",
            found=f"{scales.dtype} {list(scales.shape)}",
        )
    shape = (*blocks.shape[:-2], 32 * blocks.shape[-2])
    return QuantizedWeight(module + BLOCKS, shape, HF_MXFP4, {"blocks": module + BLOCKS, "scales": module + SCALES})


def stored_names(name: str, shape: Shape) -> list[tuple[str, str, str, Shape]]:
    """(part, name in the file, dtype, shape) of one weight X_blocks. Raises CodecError for rows that are not a multiple
    of 32.
    """
    module, grid = name.removesuffix(BLOCKS), (*shape[:-1], shape[-1] // 32)
    dtypes = {part: BY_NUMPY[spec.dtype] for part, spec in HF_MXFP4.specs(shape).items()}
    return [
        ("blocks", module + BLOCKS, dtypes["blocks"], (*grid, 16)),
        ("scales", module + SCALES, dtypes["scales"], grid),
    ]


def mxfp4_config(tensors: Sequence[TensorSpec]) -> dict[str, Any] | None:
    """`quantization_config` of config.json for these weights; None if none is MXFP4."""
    if not any(t.codec is HF_MXFP4 for t in tensors):
        return None
    return {"quant_method": METHOD, "modules_to_not_convert": _FLOATS}


def as_floats(tensor: TensorMap, source: Checkpoint) -> TensorMap:
    """Name and transpose an MXFP4 weight as transformers does for floats; other tensors are unchanged."""
    if not _is_packed(tensor, source) or not tensor.target.endswith(BLOCKS):
        return tensor
    *stack, n, k = tensor.shape
    return replace(tensor, target=tensor.target.removesuffix(BLOCKS), shape=(*stack, k, n), op=Transpose())


def as_stored(tensor: TensorMap, source: Checkpoint) -> TensorMap:
    """The inverse of `as_floats`."""
    if not _is_packed(tensor, source) or not isinstance(tensor.op, Transpose):
        return tensor
    return replace(tensor, target=tensor.source, shape=source[tensor.source].shape, op=SAME)


def _is_packed(tensor: TensorMap, source: Checkpoint) -> bool:
    return len(tensor.sources) == 1 and source[tensor.sources[0]].codec is HF_MXFP4


def _as_blocks(tensor: TensorMap) -> TensorMap:
    """A stack of experts X [experts, in, out] as X_blocks [experts, out, in]; other tensors are unchanged."""
    fits = len(tensor.shape) == 3 and tensor.target.endswith(_EXPERTS) and tensor.shape[1] % 32 == 0
    if not fits:
        return tensor
    stack, k, n = tensor.shape
    op = SAME if isinstance(tensor.op, Transpose) else chain(tensor.op, Transpose())
    return replace(tensor, target=tensor.target + BLOCKS, shape=(stack, n, k), op=op)


class _MXFP4:
    """Writing the experts of gpt-oss as MXFP4."""

    name, title = METHOD, "MXFP4 experts"

    def holds(self, codec: Codec) -> bool:
        """True for MXFP4."""
        return codec is HF_MXFP4

    def holding(self, codec: Codec, shape: Shape) -> Codec | None:
        """MXFP4 for MXFP4 in any order."""
        have = small_floats_of(codec)
        return HF_MXFP4 if have is not None and keeps(have, HF_MXFP4.floats).fate is not Fate.IMPOSSIBLE else None

    def quantizes(self, name: str, shape: Shape) -> bool:
        """Stacks of experts under the names of gpt-oss."""
        return name.endswith(BLOCKS) and len(shape) == 3

    def arranged(self, tensors: tuple[TensorMap, ...], config: Mapping[str, Any]) -> tuple[TensorMap, ...]:
        """The tensors, with the float experts of gpt-oss under the names and in the orientation of MXFP4."""
        del config
        return tuple(_as_blocks(tensor) for tensor in tensors)

    def stored(self, tensor: TensorSpec) -> list[StoredTensor]:
        """X_blocks and X_scales. Raises PlanError for another name."""
        if not tensor.name.endswith(BLOCKS):
            raise PlanError("only stacks of experts named *_blocks can be MXFP4 experts", tensor=tensor.name)
        return [StoredTensor(*entry) for entry in stored_names(tensor.name, tensor.shape)]

    def settings(self, tensors: Sequence[TensorSpec], config: Mapping[str, Any]) -> dict[str, Any]:
        """quantization_config; that of the source if it has one."""
        have = config.get("quantization_config")
        kept = isinstance(have, dict) and have.get("quant_method") == METHOD
        return {"quantization_config": have if kept else mxfp4_config(tensors)}


SCHEME = _MXFP4()
