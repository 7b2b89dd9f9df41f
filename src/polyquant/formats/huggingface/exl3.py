"""EXL3 weights among the tensors of a Hugging Face folder.

    X.trellis  X.suh  X.svh  [X.mul1 | X.mcg]      of linear module X: one weight X.weight [N, K]; X.bias is separate

config.json has quant_method "exl3"; a single file without config.json is recognised by its tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from polyquant.codecs.dtypes import BY_NUMPY
from polyquant.codecs.exl3 import BLOCK, EXL3, MULTIPLIERS
from polyquant.errors import CodecError, InputError
from polyquant.types import Shape, TensorSpec

__all__ = ["METHOD", "exl3_codec", "exl3_config", "modules", "stored_names", "weight_name"]

METHOD = "exl3"


class Described(Protocol):
    """Header data of a tensor."""

    @property
    def dtype(self) -> str:
        """The dtype's name in safetensors."""

    @property
    def shape(self) -> Shape:
        """The shape, row-major."""


def weight_name(module: str) -> str:
    """The weight name of a module: X.weight, as in the float model."""
    return module if module.endswith(".weight") else f"{module}.weight"


def modules(tensors: Iterable[str]) -> list[str]:
    """Modules with a tensor X.trellis, in order."""
    return [name.removesuffix(".trellis") for name in tensors if name.endswith(".trellis")]


def exl3_codec(module: str, tensors: Mapping[str, Described]) -> tuple[EXL3, Shape]:
    """Codec and logical shape [N, K] of a module. Raises InputError if a tensor is missing or does not fit."""
    trellis = tensors[f"{module}.trellis"]
    markers = [m for m in MULTIPLIERS if f"{module}.{m}" in tensors]
    if len(markers) > 1:
        raise InputError("EXL3 weight with two codebooks", tensor=module, found=", ".join(markers))
    rank_and_type = trellis.dtype, len(trellis.shape)
    if rank_and_type != ("I16", 3) or trellis.shape[2] % 16 or not 1 <= trellis.shape[2] // 16 <= 8:
        expected = "I16 [K / 16, N / 16, 16 * bits] with 1 to 8 bits"
        raise InputError(
            "EXL3 trellis has an unexpected shape or dtype",
            tensor=module,
            expected=expected,
            found=f"{trellis.dtype} {list(trellis.shape)}",
        )
    codec = EXL3(trellis.shape[2] // 16, markers[0] if markers else "3inst")
    shape = (16 * trellis.shape[1], 16 * trellis.shape[0])
    try:
        specs = codec.specs(shape)
    except CodecError as e:
        raise InputError(e.message, tensor=module, expected=f"multiples of {BLOCK}", found=e.found) from None
    for part, spec in specs.items():
        tensor = tensors.get(f"{module}.{part}")
        if tensor is None:
            raise InputError(f"EXL3 weight lacks {part}", tensor=module, expected=", ".join(specs))
        scalar = part in MULTIPLIERS and tensor.shape == ()
        if (tensor.shape != spec.shape and not scalar) or tensor.dtype != BY_NUMPY[spec.dtype]:
            expected = f"{BY_NUMPY[spec.dtype]} {list(spec.shape)}"
            raise InputError(
                f"EXL3 {part} does not fit",
                tensor=module,
                expected=expected,
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )
    return codec, shape


def stored_names(name: str, shape: Shape, codec: EXL3) -> list[tuple[str, str, str, Shape]]:
    """(part, name in the file, dtype, shape) of one weight."""
    module = name.removesuffix(".weight")
    return [(part, f"{module}.{part}", BY_NUMPY[s.dtype], s.shape) for part, s in codec.specs(shape).items()]


def exl3_config(tensors: Iterable[TensorSpec]) -> dict[str, Any] | None:
    """`quantization_config` of config.json for these weights; None if none is EXL3. bits: the mean of all weights
    except the head.
    """
    weights: dict[int, int] = {}
    codebooks, head = set(), 16
    for t in tensors:
        if not isinstance(t.codec, EXL3):
            continue
        codebooks.add(t.codec.codebook)
        if t.name == "lm_head.weight":
            head = t.codec.bits
        else:
            weights[t.codec.bits] = weights.get(t.codec.bits, 0) + t.shape[0] * t.shape[1]
    if not codebooks:
        return None
    total = sum(weights.values())
    bits = sum(b * n for b, n in weights.items()) / total if total else head
    return {"quant_method": METHOD, "bits": round(bits, 4), "head_bits": head, "codebook": ", ".join(sorted(codebooks))}
