"""Codecs whose numbers are whole numbers on even levels, held against each other: which of them hold the same codes, so that a weight moves unchanged.

    msModelSlim, GPTQ, AWQ, compressed-tensors, ChatGLM     codes, scales and offsets of rows or groups
    q8_0, q5_0   8 bits, groups of 32                   q4_0   4 bits, groups of 32; code - 8
    ternaries    -1, 0, +1 and one scale, or one for each 256 or 32 columns

A GPTQ weight whose columns name their groups ("act") has no groups of neighbours: only its numbers can be carried over.
Into ggml blocks scales are rounded to half precision: codes stay, and so does every weight but for at most 2^-11 of its value (more where a
scale is below 6e-5).
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
"""Block types with codes around 0 -> the bits of our codes."""
_TERNARY_GROUPS = {"tq1_0": 256, "tq2_0": 256, "trinity.tq2_0": 32}
_WORDS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
_BLOCK = 32
_TYPES = ("q4_0", "q4_1", "q8_0")
"""ggml types that take codes of others."""


def floats_of(config: Mapping[str, Any]) -> str:
    """The float codec that decoded weights of a model get: the type that its config.json says, else bf16."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("torch_dtype", "dtype"):
            said = place.get(key)
            if isinstance(said, str) and said.removeprefix("torch.") in _WORDS:
                return _WORDS[said.removeprefix("torch.")]
    return "bf16"


def only_read(codec: Codec) -> bool:
    """True for weights that GGUF, Trellis and Hugging Face folders are never written with: they leave as other codes or as floats."""
    return codec.form is Affine or isinstance(codec, FP8)


# ------------------------------------------------------------ into affine codes


def affine_of(codec: Codec, parts: Parts, shape: Shape) -> Affine | None:
    """The codes of a weight on its levels; None for a codec whose numbers are not such. Raises CodecError if a part does not fit."""
    if codec.form is Affine:
        found: Affine = codec.unpack(parts, shape)
        return found
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
    """uint8 [rows, K / 32 * size] of q8_0, q5_0 or q4_0: d f16, then for 5 bits their highest, then codes."""
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
    """The msModelSlim codec that holds a weight's codes unchanged, in the layout of the defaults; None where there is none."""
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
    elif not isinstance(codec, ChatGLMInt):  # whose 4 bits lie in 8 in what the tool writes
        return None
    if group and shape[1] % group:
        return None
    return MsModelSlim(f"w{bits}a16", 0 if group == shape[1] else group)


def same_codes(weight: Weight, target: Codec) -> bool:
    """True if `target` holds a weight's codes unchanged: as wide or wider, with as many scales or more, and with its offsets, which are read where they
    decide."""
    have, shape = weight.codec, weight.shape
    if target.name in _TYPES:
        return target.name in as_blocks(have, shape) and (target.name == "q4_1" or not _offsets(weight).any())
    exact = exact_msmodelslim(have, shape)
    if exact is None or not isinstance(target, MsModelSlim):
        return False
    if target.static and (not exact.static or _offsets(weight).any()):
        return False  # nobody knows the grid of the inputs, or the weights have offsets
    if target.tensor and not exact.tensor:
        return False
    return target.bits >= _bits(have, exact) and target.groups(shape) % exact.groups(shape) == 0


def _bits(have: Codec, exact: MsModelSlim) -> int:
    return have.bits if isinstance(have, ChatGLMInt) else exact.bits


# ------------------------------------------------------------ ggml blocks


def as_blocks(codec: Codec, shape: Shape) -> tuple[str, ...]:
    """ggml types that hold the codes of a weight whose offsets suit them, the smallest first; none if its groups are not whole blocks."""
    exact = exact_msmodelslim(codec, shape) if codec.form is Affine else None
    if exact is None or shape[1] % _BLOCK or exact.group % _BLOCK:
        return ()
    return _TYPES if _bits(codec, exact) == 4 else ("q8_0",)


def blocks_of(weight: Weight) -> str | None:
    """The smallest ggml type that holds this weight's codes; its offsets are read. None where there is none."""
    types = as_blocks(weight.codec, weight.shape)
    if not types or not _offsets(weight).any():
        return types[0] if types else None
    return "q4_1" if "q4_1" in types else None


def _offsets(weight: Weight) -> NDArray[Any]:
    """What is subtracted from codes, in any shape: 0 for none."""
    if isinstance(weight.codec, WithOffsets):
        return weight.codec.offsets(weight.parts, weight.shape)
    return np.zeros(1, np.float32)


def recoded(codes: Affine, target: Codec) -> dict[str, NDArray[Any]]:
    """Codes as parts of another codec that holds them (`same_codes`). Raises CodecError for offsets and scales that it has no place for."""
    if isinstance(target, MsModelSlim):
        return target.pack(replace(codes, bits=target.bits) if codes.bits < target.bits else codes)
    blocks = _packed_blocks(codes, target.name)
    return dict(target.pack(Blocks(target.name, blocks)))


def reordered(codes: Affine, order: NDArray[np.int64]) -> Affine:
    """Row i is what row order[i] was."""
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
    """float32 [rows, blocks] -> its half-precision bytes, uint8 [rows, blocks, 2]. Raises CodecError for what overflows or vanishes."""
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
    """int8 [..., 32] from -8 to 7 -> uint8 [..., 16]: the first sixteen low, the others high."""
    raised = (cells + np.int8(8)).astype(np.uint8)
    return np.asarray(raised[..., :16] | raised[..., 16:] << 4)
