"""The tensors of a checkpoint under the decoder's names (GGUF's), from any format, with shapes and codecs checked.

Only vectors are read; a matrix stays in its file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from polyquant.architectures import layer_numbers
from polyquant.architectures.record import Architecture
from polyquant.architectures.tensors import without_ones
from polyquant.capabilities import MaybeIntegers, Opaque, claims
from polyquant.errors import CodecError, InputError, UnsupportedError, printable
from polyquant.operations import Stack
from polyquant.runtime import headers_only
from polyquant.runtime.derived import materialize
from polyquant.runtime.linear import Linear
from polyquant.runtime.ternarize import ternarized
from polyquant.types import F32, Checkpoint, Floats, Rounding, Shape, TensorMap, Weight

__all__ = ["Tensors"]

_COMPUTED = (
    "rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", ".attention.bias", ".attention.masked_bias",
    "norm.module.weight", "norm.module.bias",
)  # fmt: skip
"""Ends of the names of tensors that are stored redundantly."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Access to the tensors of a checkpoint.

    names: decoder's name -> name in the checkpoint. derived: decoder's name -> the map that makes it from stored
    tensors, if it is not stored in that form (splits, stacks, changed values). numbers: GGUF key -> a value per layer
    (record.LayerNumber). rounding: of the activations of quantized weights.

    masters: float matrices of the layers are BitNet master weights, made ternary in memory. used: the names requested
    so far. made: the matrices that were made ternary.
    """

    checkpoint: Checkpoint
    names: dict[str, str]
    architecture: Architecture
    rounding: Rounding
    masters: bool = False
    derived: Mapping[str, TensorMap] = field(default_factory=dict)
    numbers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    ternary: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        return name in self.names or name in self.derived

    def floats(self, name: str) -> F32:
        """Return the tensor of that name as floats in its stored shape. Raises as `weight`."""
        shape = self.derived[name].shape if name in self.derived else self.checkpoint[self.names[name]].shape
        return np.asarray(self.weight(name, shape).dequantize(), np.float32)

    def weight(self, name: str, shape: Shape) -> Weight:
        """Return the tensor of that name.

        Raises InputError if it is missing or its shape differs, UnsupportedError if it cannot be decoded.
        """
        if name not in self:
            shown = name if self.checkpoint.naming == "gguf" else self.architecture.names.to_hf(name) or name
            raise InputError("a tensor required by the decoder is missing", file=self.checkpoint.path, tensor=shown)
        self.used.add(name)
        weight = (
            materialize(self.checkpoint, self.derived[name])
            if name in self.derived
            else self.checkpoint[self.names[name]]
        )
        return self._checked(weight, shape)

    def stack(self, name: str, shape: Shape) -> Weight | Sequence[Weight]:
        """Return the matrices [experts, n, k] of that name in their stored layout: one weight, or one per expert.

        Raises as `weight`.
        """
        tensor_map = self.derived.get(name)
        if tensor_map is None or not isinstance(tensor_map.op, Stack) or tensor_map.shape != shape:
            return self.weight(name, shape)
        self.used.add(name)
        matrices = [self.checkpoint[source] for source in tensor_map.sources]
        usual = self._checked(matrices[0], shape[1:])
        return [w if _same_kind(w, usual) else self._checked(w, shape[1:]) for w in matrices]

    def _checked(self, weight: Weight, shape: Shape) -> Weight:
        """Return the weight after checking its shape and codec. Raises InputError, UnsupportedError."""
        file = self.checkpoint.path
        if weight.shape != shape and self.checkpoint.naming == "gguf" and without_ones(shape) == weight.shape:
            weight = replace(weight, shape=shape)
        if weight.shape != shape:
            raise InputError(
                "wrong shape for this configuration",
                file=file,
                tensor=weight.name,
                expected=list(shape),
                found=list(weight.shape),
            )
        stored = weight.codec.name
        if claims(weight.codec, Opaque):  # type: ignore[type-abstract]
            raise UnsupportedError(f"stored as {stored}, which cannot be decoded", file=file, tensor=weight.name)
        if claims(weight.codec, MaybeIntegers) and weight.codec.is_integer:  # type: ignore[type-abstract]
            raise UnsupportedError(
                f"integers ({stored}) are not usable as weights without their scales",
                file=file,
                tensor=weight.name,
                hint="their scales belong to an unsupported quantization",
            )
        try:
            weight.codec.specs(weight.shape)
        except CodecError as e:
            raise InputError(
                e.message, file=file, tensor=weight.name, expected=e.expected, found=e.found, hint=e.hint
            ) from e
        return weight

    def vector(self, name: str, size: int) -> F32:
        """Return a norm's weight or a bias, float32 [size]."""
        return np.ascontiguousarray(self.weight(name, (size,)).dequantize(), np.float32)

    def linear(self, k: int, outputs: Sequence[tuple[str, int]]) -> Linear:
        """Return matrices [n, k] with a common input: pairs (name without suffix, n). A `.bias` is added if present."""
        weights = [self._matrix(name, (n, k)) for name, n in outputs]
        bias = [self.vector(f"{name}.bias", n) if f"{name}.bias" in self else None for name, n in outputs]
        return Linear(weights, bias, self.rounding)

    def _matrix(self, name: str, shape: Shape) -> Weight:
        weight = self.weight(f"{name}.weight", shape)
        if self.masters and weight.codec.form is Floats and name.startswith("blk."):
            self.ternary.add(name)
            if headers_only.active():
                return weight
            return ternarized(weight, file=self.checkpoint.path)
        return weight

    def noted(self) -> Checkpoint:
        """Return the checkpoint, with notes about converted and unused tensors."""
        notes = []
        if self.ternary:
            notes.append(f"{len(self.ternary)} BitNet master weights were made ternary in memory (absmean)")
        used = {self.names[name] for name in self.used if name not in self.derived}
        used |= {source for name in self.used if name in self.derived for source in self.derived[name].sources}
        unused = [
            n for n in self.checkpoint
            if n not in used and not n.endswith(_COMPUTED) and layer_numbers.find(n, self.architecture) is None
        ]  # fmt: skip
        if unused:
            notes.append(
                f"{len(unused)} tensors are not part of this architecture and are not used "
                f"(first: {printable(unused[0])})"
            )
        return replace(self.checkpoint, notes=(*self.checkpoint.notes, *notes))


def _same_kind(weight: Weight, other: Weight) -> bool:
    """True if two weights have the same codec object and shape, as the experts of a folder do."""
    return weight.codec is other.codec and weight.shape == other.shape
