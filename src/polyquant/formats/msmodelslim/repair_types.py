"""Find the types of layers if the description is missing or wrong: from its remains, file names, and tensor shapes."""

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
    """A quantized layer. parts: existing ones; missing: those that can be recomputed."""

    name: str
    codec: MsModelSlim
    shape: Shape
    parts: dict[str, Stored]
    missing: tuple[str, ...]


def layers(contents: Survey, kind: str | None) -> list[Layer]:
    """All quantized layers. kind: type of layers whose type cannot be determined.

    Raises PlanError if a layer lacks a part that cannot be recomputed, or its type cannot be determined;
    UnknownNameError for an unknown type.
    """
    if kind is not None and kind.upper() not in KINDS:
        raise UnknownNameError("type", kind, [w.lower() for w in KINDS])
    grouped: dict[str, dict[str, Stored]] = {}
    for tensor, at in contents.tensors.items():
        layer, part = split(tensor)
        if part in PARTS:
            grouped.setdefault(layer, {})[part] = at
    return [_layer(contents, name, parts, kind) for name, parts in grouped.items() if _quantized(contents, name, parts)]


def _quantized(contents: Survey, name: str, parts: dict[str, Stored]) -> bool:
    """True for codes with scales of a known type."""
    word = contents.word(f"{name}.weight")
    if word is not None and word != FLOAT and word not in KINDS:
        return False
    if "weight" not in parts and len(parts) > 0:
        raise PlanError(
            "cannot be repaired: the layer's weight is missing",
            tensor=f"{name}.weight",
            hint="quantize the model again",
        )
    return parts["weight"].entry.dtype == "I8" or len(parts) > 1


def _layer(contents: Survey, name: str, parts: dict[str, Stored], kind: str | None) -> Layer:
    facts = {part: Facts(at.entry.dtype, at.entry.shape) for part, at in parts.items()}
    missing: tuple[str, ...] = ()
    if "input_scale" in parts and "weight_scale" in parts and parts["weight_scale"].entry.shape:
        missing = tuple(p for p in _RECOMPUTED if p not in parts)
        n = parts["weight_scale"].entry.shape[0]
        wide = contents.model_dtype is None or contents.model_dtype[0] != "BF16"
        facts |= {p: Facts("I32" if p == "quant_bias" else "I64" if wide else "F32", (n,)) for p in missing}
    possible: dict[str, tuple[MsModelSlim, Shape]] = {}
    refused: InputError | None = None
    hints = list(dict.fromkeys(_hints(contents, name, parts, kind)))
    for word in [*hints, *(w for w in KINDS if w not in hints)]:
        packed = "version" in contents.description.general or (word.startswith("W4") and _wide_codes(parts["weight"]))
        try:
            possible[word] = codec_for(KINDS[word], facts, group_size=contents.description.group_size, packed=packed)
        except InputError as e:
            refused = refused or e
    if not possible:
        assert refused is not None
        raise PlanError(
            f"cannot be repaired: {refused.message}",
            tensor=f"{name}.weight",
            expected=refused.expected,
            found=refused.found,
            hint="quantize this layer again",
        )
    hinted = next((w for w in hints if w in possible), None)
    if hinted is None and len(possible) > 1:
        raise PlanError(
            "the type of this layer cannot be determined",
            tensor=f"{name}.weight",
            expected=" or ".join(possible),
            hint="pass it with --type",
        )
    codec, shape = possible[hinted or next(iter(possible))]
    return Layer(name, codec, shape, parts, missing)


def _hints(contents: Survey, name: str, parts: dict[str, Stored], kind: str | None) -> Iterator[str]:
    """Possible types of this layer, the most likely first: of most of its tensors, the requested one, the model's."""
    own = Counter(w for part in parts if (w := contents.word(f"{name}.{part}")) in KINDS)
    yield from (word for word, _ in own.most_common())
    if kind is not None:
        yield kind.upper()
    named = contents.files.stem.removeprefix("quant_model_weight").removeprefix("s").removeprefix("_").upper()
    if named in KINDS:
        yield named
    overall = contents.description.general.get("model_quant_type")
    if overall in KINDS:
        yield str(overall)


def _wide_codes(weight: Stored) -> bool:
    """True if bytes contain more than one 4-bit code, judged by the first rows."""
    if weight.entry.dtype != "I8" or not weight.entry.shape:
        return False
    block = stored(weight).read(0, min(64, weight.entry.shape[0]))
    return bool(((block < -8) | (block > 7)).any())
