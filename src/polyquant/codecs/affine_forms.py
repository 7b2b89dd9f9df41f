"""Conversions between affine-quantized codecs that keep every code unchanged.

    msModelSlim, GPTQ, AWQ, compressed-tensors, ChatGLM     codes, scales and offsets per row or group
    q8_0, q5_0   8 bits, groups of 32                   q4_0   4 bits, groups of 32; code - 8
    ternaries    -1, 0, +1 with one scale, or one per 256 or 32 columns

A GPTQ weight with a group index per column ("act") has no contiguous groups: only its dequantized values carry over.
ggml blocks store scales in half precision: codes are unchanged, and each weight changes by at most 2^-11 of its
value (more where a scale is below 6e-5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.capabilities import Grouped, Ordered, WithOffsets
from polyquant.codecs.chatglm_int import ChatGLMInt
from polyquant.codecs.compressed_tensors import CompressedTensors
from polyquant.codecs.fp8 import FP8
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import CodecError
from polyquant.types import F32, I8, U8, Affine, Blocks, Codec, Parts, Shape, Ternary, Weight, as_matrix

__all__ = [
    "affine_of",
    "as_blocks",
    "blocks_of",
    "exact_msmodelslim",
    "floats_of",
    "only_read",
    "recoded",
    "reordered",
    "same_codes",
]

_BLOCKS = {"q8_0": 8, "q5_0": 8, "q4_0": 4}
"""Block types with codes centred on 0 -> bits per code."""
_TERNARY_GROUPS = {"tq1_0": 256, "tq2_0": 256, "trinity.tq2_0": 32}
_WORDS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
_BLOCK = 32
_TYPES = ("q4_0", "q4_1", "q8_0")
"""ggml types that can hold the codes of other codecs."""


def floats_of(config: Mapping[str, Any]) -> str:
    """Return the float codec for a model's decoded weights: the dtype of its config.json, else bf16."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("torch_dtype", "dtype"):
            dtype = place.get(key)
            if isinstance(dtype, str) and dtype.removeprefix("torch.") in _WORDS:
                return _WORDS[dtype.removeprefix("torch.")]
    return "bf16"


def only_read(codec: Codec) -> bool:
    """True for codecs that GGUF, Trellis and Hugging Face folders are never written with: they must be converted."""
    return codec.form is Affine or isinstance(codec, FP8)


# ------------------------------------------------------------ into affine codes


def affine_of(codec: Codec, parts: Parts, shape: Shape) -> Affine | None:
    """Return a weight's affine codes; None for a codec that is not affine. Raises CodecError if a part does not fit."""
    if codec.form is Affine:
        codes: Affine = codec.unpack(parts, shape)
        return codes
    if codec.form is Ternary:
        return _of_ternary(codec.unpack(parts, shape))
    if codec.name in _BLOCKS:
        return _of_blocks(codec.name, codec.unpack(parts, shape).blocks, as_matrix(shape))
    return None


def _of_ternary(form: Ternary) -> Affine:
    groups = form.scale.shape[-1]
    scale = np.ascontiguousarray(np.broadcast_to(form.scale.reshape(-1, groups), (len(form.codes), groups)))
    return Affine(8, form.codes, scale, np.zeros_like(scale))


def _of_blocks(name: str, blocks: U8, matrix: tuple[int, int]) -> Affine:
    """uint8 [rows, K / 32 * size] of q8_0, q5_0 or q4_0: d f16, the fifth bits for q5_0, then codes."""
    rows, k = matrix
    cells = blocks.reshape(rows, k // _BLOCK, -1)
    scale = np.ascontiguousarray(cells[:, :, :2]).view("<f2")[:, :, 0].astype(np.float32)
    if name == "q8_0":
        codes = np.ascontiguousarray(cells[:, :, 2:]).view(np.int8)
    else:
        nibbles = cells[:, :, -16:]
        codes = np.concatenate([nibbles & 15, nibbles >> 4], 2).astype(np.int8)
        if name == "q5_0":
            fifth = np.unpackbits(cells[:, :, 2:6], axis=2, bitorder="little").astype(np.int8)
            codes += fifth << 4
        codes -= np.int8(16 if name == "q5_0" else 8)
    return Affine(_BLOCKS[name], codes.reshape(rows, k), scale, np.zeros_like(scale))


# ------------------------------------------------------------ msModelSlim


def exact_msmodelslim(codec: Codec, shape: Shape) -> MsModelSlim | None:
    """Return the msModelSlim codec (default layout) that holds a weight's codes unchanged, or None."""
    if isinstance(codec, MsModelSlim):
        return codec
    bits, group = 8, 0
    if len(shape) != 2 or (isinstance(codec, Ordered) and codec.ordered):
        return None
    if isinstance(codec, CompressedTensors) and codec.dynamic and codec.bits == 8 and not (codec.group or codec.zeros):
        return MsModelSlim("w8a8.dynamic")
    if codec.form is Affine and isinstance(codec, Grouped):
        bits, group = (8 if codec.bits == 8 else 4), codec.group
    elif codec.form is Ternary:
        group = _TERNARY_GROUPS.get(codec.name, 0)
    elif codec.name in _BLOCKS:
        bits, group = _BLOCKS[codec.name], _BLOCK
    elif not isinstance(codec, ChatGLMInt):  # 4-bit codes are stored as int8 there
        return None
    if group and shape[1] % group:
        return None
    return MsModelSlim(f"w{bits}a16", 0 if group == shape[1] else group)


def same_codes(weight: Weight, target: Codec) -> bool:
    """True if `target` can hold a weight's codes unchanged.

    It needs at least as many bits and scales, and room for the offsets, which are read where they decide.
    """
    codec, shape = weight.codec, weight.shape
    if target.name in _TYPES:
        return target.name in as_blocks(codec, shape) and (target.name == "q4_1" or not _offsets(weight).any())
    exact = exact_msmodelslim(codec, shape)
    if exact is None or not isinstance(target, MsModelSlim):
        return False
    if target.static and (not exact.static or _offsets(weight).any()):
        return False  # the input quantization parameters are unknown, or the weights have offsets
    if target.tensor and not exact.tensor:
        return False
    return target.bits >= _bits(codec, exact) and target.groups(shape) % exact.groups(shape) == 0


def _bits(codec: Codec, exact: MsModelSlim) -> int:
    return codec.bits if isinstance(codec, ChatGLMInt) else exact.bits


# ------------------------------------------------------------ ggml blocks


def as_blocks(codec: Codec, shape: Shape) -> tuple[str, ...]:
    """Return the ggml types that can hold a weight's codes if its offsets allow, smallest first.

    () if groups are not whole blocks.
    """
    exact = exact_msmodelslim(codec, shape) if codec.form is Affine else None
    if exact is None or shape[1] % _BLOCK or exact.group % _BLOCK:
        return ()
    return _TYPES if _bits(codec, exact) == 4 else ("q8_0",)


def blocks_of(weight: Weight) -> str | None:
    """Return the smallest ggml type that holds this weight's codes, or None. Reads its offsets."""
    types = as_blocks(weight.codec, weight.shape)
    if not types or not _offsets(weight).any():
        return types[0] if types else None
    return "q4_1" if "q4_1" in types else None


def _offsets(weight: Weight) -> NDArray[Any]:
    """Return the zero points of a weight, in any shape; a single 0 if it has none."""
    if isinstance(weight.codec, WithOffsets):
        return weight.codec.offsets(weight.parts, weight.shape)
    return np.zeros(1, np.float32)


def recoded(codes: Affine, target: Codec) -> dict[str, NDArray[Any]]:
    """Pack codes as parts of a codec that holds them (`same_codes`).

    Raises CodecError for offsets or scales it cannot store.
    """
    if isinstance(target, MsModelSlim):
        return target.pack(replace(codes, bits=target.bits) if codes.bits < target.bits else codes)
    blocks = _packed_blocks(codes, target.name)
    return dict(target.pack(Blocks(target.name, blocks)))


def reordered(codes: Affine, order: NDArray[np.int64]) -> Affine:
    """Permute rows: row i of the result is row order[i] of `codes`."""
    grid = codes.activation
    if grid is not None:
        deq = grid.deq_scale if grid.deq_scale.size == 1 else grid.deq_scale[order]
        grid = replace(grid, deq_scale=deq, quant_bias=grid.quant_bias[order])
    return replace(
        codes, codes=codes.codes[order], scale=codes.scale[order], offset=codes.offset[order], activation=grid
    )


def _packed_blocks(codes: Affine, name: str) -> U8:
    rows, k = codes.codes.shape
    times = k // _BLOCK // codes.scale.shape[1]
    scale, offset = np.repeat(codes.scale, times, 1), np.repeat(codes.offset, times, 1)  # [rows, K / 32]
    if offset.any() and name != "q4_1":
        raise CodecError(f"{name} has no offsets", found=f"offsets up to {np.abs(offset).max():g}", hint="requantize")
    cells = codes.codes.reshape(rows, k // _BLOCK, _BLOCK)
    fields = [_half(scale)]
    if name == "q4_1":
        fields.append(_half(np.float32(-8) * scale - offset * scale))
    fields.append(cells.view(np.uint8) if name == "q8_0" else _nibbles(cells))
    return np.concatenate(fields, 2).reshape(rows, -1)


def _half(values: F32) -> U8:
    """float32 [rows, blocks] -> half-precision bytes, uint8 [rows, blocks, 2].

    Raises CodecError on overflow or underflow.
    """
    with np.errstate(over="ignore"):
        half = values.astype("<f2")
    if not np.isfinite(half).all() or ((half == 0) & (values != 0)).any():
        raise CodecError(
            "scales do not fit half precision",
            found=f"{np.abs(values).min():g} to {np.abs(values).max():g}",
            hint="choose f16",
        )
    return half[:, :, None].view(np.uint8)


def _nibbles(cells: I8) -> U8:
    """int8 [..., 32] from -8 to 7 -> uint8 [..., 16]: the first half in the low nibbles."""
    raised = (cells + np.int8(8)).astype(np.uint8)
    return np.asarray(raised[..., :16] | raised[..., 16:] << 4)
