"""The tensors of a checkpoint by the decoder's names (GGUF's), whichever format they lie in, with their shapes and codecs checked.

Only vectors are read; a matrix stays in its file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from polyquant.architectures import layer_numbers
from polyquant.architectures.record import Architecture
from polyquant.architectures.tensors import without_ones
from polyquant.capabilities import MaybeIntegers, Opaque
from polyquant.errors import CodecError, InputError, UnsupportedError, printable
from polyquant.operations import Stack
from polyquant.runtime.derived import made
from polyquant.runtime.linear import Linear
from polyquant.runtime.ternarize import ternarized
from polyquant.types import F32, Checkpoint, Floats, Rounding, Shape, TensorMap, Weight

__all__ = ["Tensors"]

_COMPUTED = re.compile(
    r".*(rotary_(pos_)?emb\.inv_freq|\.attention\.(masked_)?bias|norm\.module\.(weight|bias))"
)  # what others say too


@dataclass(frozen=True, slots=True)
class Tensors:
    """names: decoder's name -> tensor's name in the checkpoint. derived: decoder's name -> what makes it of tensors of the checkpoint, where it is no
    tensor by itself (splits, stacks, changed values). numbers: key in GGUF -> a number for each layer (record.LayerNumber). rounding: of the activations of quantized weights.

    masters: float matrices of the layers are BitNet master weights, made ternary in memory. used: the names asked for so far; made: the
    matrices that were made ternary.
    """

    checkpoint: Checkpoint
    names: dict[str, str]
    architecture: Architecture
    rounding: Rounding
    masters: bool = False
    derived: Mapping[str, TensorMap] = field(default_factory=dict)
    numbers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    made: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        return name in self.names or name in self.derived

    def floats(self, name: str) -> F32:
        """The tensor of that name as floats of its own shape. Raises as `weight`."""
        found = self.derived[name].shape if name in self.derived else self.checkpoint[self.names[name]].shape
        return np.asarray(self.weight(name, found).dequantize(), np.float32)

    def weight(self, name: str, shape: Shape) -> Weight:
        """The tensor of that name. Raises InputError if it is missing or has another shape, UnsupportedError if it cannot be decoded."""
        if name not in self:
            shown = name if self.checkpoint.naming == "gguf" else self.architecture.names.to_hf(name) or name
            raise InputError("a tensor that the decoder needs is missing", file=self.checkpoint.path, tensor=shown)
        self.used.add(name)
        found = made(self.checkpoint, self.derived[name]) if name in self.derived else self.checkpoint[self.names[name]]
        return self._checked(found, shape)

    def stack(self, name: str, shape: Shape) -> Weight | Sequence[Weight]:
        """The matrices [experts, n, k] of that name, as they lie: one weight, or one for each expert. Raises as `weight`."""
        wanted = self.derived.get(name)
        if wanted is None or not isinstance(wanted.op, Stack) or wanted.shape != shape:
            return self.weight(name, shape)
        self.used.add(name)
        return [self._checked(self.checkpoint[source], shape[1:]) for source in wanted.sources]

    def _checked(self, found: Weight, shape: Shape) -> Weight:
        """The weight, of this shape and of a codec that can be computed with. Raises InputError, UnsupportedError."""
        file = self.checkpoint.path
        if found.shape != shape and self.checkpoint.naming == "gguf" and without_ones(shape) == found.shape:
            found = replace(found, shape=shape)
        if found.shape != shape:
            raise InputError(
                "wrong shape for this configuration",
                file=file,
                tensor=found.name,
                expected=list(shape),
                found=list(found.shape),
            )
        if isinstance(found.codec, Opaque):
            raise UnsupportedError(
                f"stored as {found.codec.name}, which cannot be decoded", file=file, tensor=found.name
            )
        if isinstance(found.codec, MaybeIntegers) and found.codec.is_integer:
            raise UnsupportedError(
                f"whole numbers ({found.codec.name}) are no weights by themselves",
                file=file,
                tensor=found.name,
                hint="their scales belong to a quantization that is not read here",
            )
        try:
            found.codec.specs(found.shape)
        except CodecError as e:
            raise InputError(
                e.message, file=file, tensor=found.name, expected=e.expected, found=e.found, hint=e.hint
            ) from e
        return found

    def vector(self, name: str, size: int) -> F32:
        """A norm's weight or a bias, float32 [size]."""
        return np.ascontiguousarray(self.weight(name, (size,)).dequantize(), np.float32)

    def linear(self, k: int, outputs: Sequence[tuple[str, int]]) -> Linear:
        """Matrices [n, k] that share one input: pairs (name without suffix, n). A `.bias` is added where there is one."""
        weights = [self._matrix(name, (n, k)) for name, n in outputs]
        bias = [self.vector(f"{name}.bias", n) if f"{name}.bias" in self else None for name, n in outputs]
        return Linear(weights, bias, self.rounding)

    def _matrix(self, name: str, shape: Shape) -> Weight:
        found = self.weight(f"{name}.weight", shape)
        if self.masters and found.codec.form is Floats and name.startswith("blk."):
            self.made.add(name)
            return ternarized(found, file=self.checkpoint.path)
        return found

    def noted(self) -> Checkpoint:
        """The checkpoint, with what was done to it and what was left aside among its notes."""
        notes = []
        if self.made:
            notes.append(f"{len(self.made)} BitNet master weights were made ternary in memory (absmean)")
        used = {self.names[name] for name in self.used if name not in self.derived}
        used |= {source for name in self.used if name in self.derived for source in self.derived[name].sources}
        left = [
            n for n in self.checkpoint
            if n not in used and not _COMPUTED.fullmatch(n) and layer_numbers.find(n, self.architecture) is None
        ]  # fmt: skip
        if left:
            notes.append(
                f"{len(left)} tensors are not part of this decoder and are not used (first: {printable(left[0])})"
            )
        return replace(self.checkpoint, notes=(*self.checkpoint.notes, *notes))
