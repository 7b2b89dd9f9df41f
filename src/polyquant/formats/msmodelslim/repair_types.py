"""What the layers of a folder are whose description is missing or wrong: from what is left of it, file names, and the shapes of the tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import InputError, PlanError, UnknownNameError
from polyquant.formats.msmodelslim.check_layers import stored
from polyquant.formats.msmodelslim.description import FLOAT, KINDS, PARTS, split
from polyquant.formats.msmodelslim.infer import Facts, codec_for
from polyquant.formats.msmodelslim.survey import Stored, Survey
from polyquant.types import Shape

__all__ = ["Layer", "layers"]

_RECOMPUTED = ("deq_scale", "quant_bias")


@dataclass(frozen=True, slots=True)
class Layer:
    """A quantized layer. parts: those that are there; missing: those that can be recomputed."""

    name: str
    codec: MsModelSlim
    shape: Shape
    parts: dict[str, Stored]
    missing: tuple[str, ...]


def layers(found: Survey, kind: str | None) -> list[Layer]:
    """Every quantized layer. kind: word of the description for layers whose type nothing tells.

    Raises PlanError if a layer lacks what cannot be recomputed, or its type cannot be told; UnknownNameError for a word that is no type.
    """
    if kind is not None and kind.upper() not in KINDS:
        raise UnknownNameError("type", kind, [w.lower() for w in KINDS])
    grouped: dict[str, dict[str, Stored]] = {}
    for tensor, at in found.tensors.items():
        layer, part = split(tensor)
        if part in PARTS:
            grouped.setdefault(layer, {})[part] = at
    return [_layer(found, name, parts, kind) for name, parts in grouped.items() if _quantized(found, name, parts)]


def _quantized(found: Survey, name: str, parts: dict[str, Stored]) -> bool:
    """True for codes with scales of a type that is ours to read."""
    word = found.word(f"{name}.weight")
    if word is not None and word != FLOAT and word not in KINDS:
        return False
    if "weight" not in parts and len(parts) > 0:
        raise PlanError(
            "cannot be mended: the layer's weight is missing", tensor=f"{name}.weight", hint="quantize the model again"
        )
    return parts["weight"].entry.dtype == "I8" or len(parts) > 1


def _layer(found: Survey, name: str, parts: dict[str, Stored], kind: str | None) -> Layer:
    facts = {part: Facts(at.entry.dtype, at.entry.shape) for part, at in parts.items()}
    missing: tuple[str, ...] = ()
    if "input_scale" in parts and "weight_scale" in parts and parts["weight_scale"].entry.shape:
        missing = tuple(p for p in _RECOMPUTED if p not in parts)
        n = parts["weight_scale"].entry.shape[0]
        wide = found.model_dtype is None or found.model_dtype[0] != "BF16"
        facts |= {p: Facts("I32" if p == "quant_bias" else "I64" if wide else "F32", (n,)) for p in missing}
    possible: dict[str, tuple[MsModelSlim, Shape]] = {}
    refused: InputError | None = None
    hints = list(dict.fromkeys(_hints(found, name, parts, kind)))
    for word in [*hints, *(w for w in KINDS if w not in hints)]:
        packed = "version" in found.description.whole or (word.startswith("W4") and _wide_codes(parts["weight"]))
        try:
            possible[word] = codec_for(KINDS[word], facts, group_size=found.description.group_size, packed=packed)
        except InputError as e:
            refused = refused or e
    if not possible:
        assert refused is not None
        raise PlanError(
            f"cannot be mended: {refused.message}", tensor=f"{name}.weight", expected=refused.expected, found=refused.found,
            hint="quantize this layer again",
        )  # fmt: skip
    told = next((w for w in hints if w in possible), None)
    if told is None and len(possible) > 1:
        raise PlanError(
            "nothing tells the type of this layer",
            tensor=f"{name}.weight",
            expected=" or ".join(possible),
            hint="say it with --type",
        )
    codec, shape = possible[told or next(iter(possible))]
    return Layer(name, codec, shape, parts, missing)


def _hints(found: Survey, name: str, parts: dict[str, Stored], kind: str | None) -> Iterator[str]:
    """Words that may be this layer's, the likeliest first: what most of its tensors are called, what was asked for, the model's type."""
    own = Counter(w for part in parts if (w := found.word(f"{name}.{part}")) in KINDS)
    yield from (word for word, _ in own.most_common())
    if kind is not None:
        yield kind.upper()
    named = found.files.stem.removeprefix("quant_model_weight").removeprefix("s").removeprefix("_").upper()
    if named in KINDS:
        yield named
    whole = found.description.whole.get("model_quant_type")
    if whole in KINDS:
        yield str(whole)


def _wide_codes(weight: Stored) -> bool:
    """True if bytes hold more than one 4-bit code, by the first rows."""
    if weight.entry.dtype != "I8" or not weight.entry.shape:
        return False
    block = stored(weight).read(0, min(64, weight.entry.shape[0]))
    return bool(((block < -8) | (block > 7)).any())
