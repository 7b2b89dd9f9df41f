"""Shared by the readers and writers of schemes with small floats: parts, their names in files, and their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyquant.codecs.dtypes import BY_NUMPY
from polyquant.codecs.fp8 import FP8
from polyquant.codecs.hf_mxfp4 import HF_MXFP4
from polyquant.codecs.hf_mxfp8 import HF_MXFP8
from polyquant.codecs.hf_nvfp4 import HFNvfp4
from polyquant.codecs.keeping import SmallFloats
from polyquant.errors import CodecError, InputError, PlanError
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, float_word, require
from polyquant.formats.huggingface.schemes import StoredTensor
from polyquant.types import Codec, Shape, TensorSpec

__all__ = [
    "KINDS", "Names", "fp8_weight", "held_fp8", "held_mx", "mxfp4_weight", "mxfp8_weight", "nvfp4_weight", "stored_as",
    "without",
]  # fmt: skip

KINDS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
Names = Mapping[str, str]
"""Part of a codec -> the word after the module in the file."""


@dataclass(frozen=True, slots=True)
class _Found:
    """One part in a file. shapes: those that are accepted. dtype: in safetensors, None for that of the codec."""

    word: str
    shapes: tuple[Shape, ...] = ()
    dtype: str | None = None


def placed(
    module: str, shape: Shape, codec: Codec, tensors: Mapping[str, Described], parts: Mapping[str, _Found]
) -> QuantizedWeight:
    """The weight, if every part has an accepted shape and the dtype of its spec. Raises InputError."""
    try:
        specs = codec.specs(shape)
    except CodecError as e:
        raise InputError(e.message, tensor=module, expected=e.expected, found=e.found) from None
    for part, spec in specs.items():
        found = parts[part]
        tensor = tensors.get(f"{module}.{found.word}")
        if tensor is None:
            raise InputError(f"quantized weight lacks {found.word}", tensor=module, expected=", ".join(_words(parts)))
        shapes, dtype = found.shapes or (spec.shape,), found.dtype or BY_NUMPY[spec.dtype]
        if tensor.shape not in shapes or tensor.dtype != dtype:
            raise InputError(
                f"{found.word} does not fit the weight",
                tensor=module,
                expected=f"{dtype} {' or '.join(str(list(s)) for s in shapes)}",
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )
    names = {part: f"{module}.{parts[part].word}" for part in specs}
    return QuantizedWeight(f"{module}.weight", shape, codec, names)


def _words(parts: Mapping[str, _Found]) -> list[str]:
    return [found.word for found in parts.values()]


# ---------------------------------------------------------------- reading


def fp8_weight(
    module: str, tensors: Mapping[str, Described], word: str, block: tuple[int, int] | None, *, blocks: bool = False
) -> QuantizedWeight:
    """A matrix X.weight of 8-bit floats with the scales X.WORD: one, one per row, or one per block.

    block: rows and columns in config.json. blocks: config.json declares blocks, even if there is only one.
    Raises InputError.
    """
    n, k = require(module, "weight", tensors, 2).shape
    scale = tensors[f"{module}.{word}"]
    powers = scale.dtype in ("F8_E8M0", "U8")
    dtype = "e8m0" if powers else float_word(module, word, scale)
    single, rows = scale.shape in ((), (1,)), scale.shape in ((n, 1), (n,))
    static = "input_scale" if _fits_inputs(tensors.get(f"{module}.input_scale"), dtype) else ""
    kind = KINDS[tensors[f"{module}.weight"].dtype]
    if blocks or not (single or rows):
        side = _side(module, block)
        codec = FP8(kind, side, False, word == "weight_scale_inv", dtype, bool(static))
        grid = (-(-n // side), -(-k // side))
        shapes: tuple[Shape, ...] = (grid, (grid[0], 1, grid[1], 1), *(((), (1,)) if grid == (1, 1) else ()))
    else:
        tensor = single and (n != 1 or scale.shape == ())
        codec = FP8(kind, 0, tensor, word == "weight_scale_inv", dtype, bool(static))
        shapes = ((), (1,)) if tensor else ((n, 1), (n,))
    parts = {
        "weight": _Found("weight"),
        codec.scale: _Found(word, shapes, scale.dtype if powers else None),
        "input_scale": _Found(static, ((), (1,))),
    }
    return placed(module, (n, k), codec, tensors, parts)


def _fits_inputs(tensor: Described | None, dtype: str) -> bool:
    """True for a scale of the inputs that the codec can hold."""
    words = {"f16": "F16", "bf16": "BF16", "f32": "F32", "e8m0": "F32"}
    return tensor is not None and tensor.shape in ((), (1,)) and tensor.dtype == words[dtype]


def _side(module: str, block: tuple[int, int] | None) -> int:
    """Side of the square blocks. Raises InputError."""
    if block is None or block[0] != block[1] or not 0 < block[0] < 1 << 20:
        raise InputError(
            "config.json does not specify the block size of the scales",
            tensor=module,
            expected="weight_block_size [128, 128]",
            found=None if block is None else list(block),
        )
    return block[0]


def mxfp4_weight(module: str, tensors: Mapping[str, Described], word: str, scales: str) -> QuantizedWeight:
    """Packed 4-bit floats X.WORD with powers of two X.SCALES. Raises InputError."""
    n, half = require(module, word, tensors, 2).shape
    return placed(module, (n, 2 * half), HF_MXFP4, tensors, {"blocks": _Found(word), "scales": _Found(scales)})


def mxfp8_weight(module: str, tensors: Mapping[str, Described]) -> QuantizedWeight:
    """8-bit floats X.weight with powers of two X.weight_scale. Raises InputError."""
    shape = require(module, "weight", tensors, 2).shape
    return placed(
        module, shape, HF_MXFP8, tensors, {"weight": _Found("weight"), "weight_scale": _Found("weight_scale")}
    )


def nvfp4_weight(module: str, tensors: Mapping[str, Described], codec: HFNvfp4, names: Names) -> QuantizedWeight:
    """Packed 4-bit floats with scales of 16 columns. Raises InputError."""
    n, half = require(module, names["weight"], tensors, 2).shape
    scalar: tuple[Shape, ...] = ((), (1,))
    parts = {part: _Found(word, scalar if line == 0 else ()) for part, word in names.items()
             for line in (codec.lines.get(part, 1),)}  # fmt: skip
    return placed(module, (n, 2 * half), codec, tensors, parts)


# ---------------------------------------------------------------- writing


def stored_as(tensor: TensorSpec, names: Names, shapes: Mapping[str, Shape]) -> list[StoredTensor]:
    """The parts of a weight X.weight as X.WORD. shapes: of parts whose shape in the file is another one.

    Raises PlanError for a name without .weight.
    """
    if not tensor.name.endswith(".weight"):
        raise PlanError("only tensors named *.weight can be quantized", tensor=tensor.name, found=tensor.codec.name)
    stem = tensor.name.removesuffix("weight")
    specs = tensor.codec.specs(tensor.shape)
    return [
        StoredTensor(part, stem + names.get(part, part), BY_NUMPY[spec.dtype], shapes.get(part, spec.shape))
        for part, spec in specs.items()
    ]


def held_mx(have: SmallFloats) -> Codec | None:
    """The codec with a power of two per 32 columns for such codes; None for others."""
    if have.scale != "e8m0" or have.block != (1, 32) or have.element == "e5m2":
        return None
    return HF_MXFP4 if have.element == "e2m1" else HF_MXFP8


def held_fp8(codec: Codec, *, inv: bool, dtype: str | None = None) -> FP8 | None:
    """The FP8 codec, with these names of its scales, for the codes of an FP8 codec; None for other codecs."""
    if not isinstance(codec, FP8) or codec.kind != "e4m3":
        return None
    return FP8(codec.kind, codec.block, codec.tensor, inv, dtype or codec.dtype, codec.static)


def without(tensors: Sequence[TensorSpec], names: Sequence[str]) -> list[str]:
    """Modules of linear layers that are not in `names`, in the order of the model."""
    taken = set(names)
    matrices = (t.name.removesuffix(".weight") for t in tensors if t.name.endswith(".weight") and len(t.shape) == 2)
    return [name for name in matrices if name not in taken]
