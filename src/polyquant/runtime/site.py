"""Where a part of a layer gets its tensors: by their stems, with the shapes and the wiring that the architecture's record says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.parts import BARE
from polyquant.architectures.record import Architecture
from polyquant.errors import InputError
from polyquant.runtime.c8 import C8
from polyquant.runtime.expert_linear import Stack
from polyquant.runtime.linear import Linear
from polyquant.runtime.norm import Norm, bare_norm, read_norm
from polyquant.runtime.state import Keeps
from polyquant.runtime.tensors import Tensors
from polyquant.types import F32, Shape, Weight

__all__ = ["Place", "Site"]

_MOST = 1 << 26  # numbers of a recurrent state; the largest known, Nemotron-H's of 56B, has 2^22


@dataclass(frozen=True, slots=True)
class Site:
    """Layer `index` of a decoder that is being built. c8: levels for what goes into the cache, None where it takes floats."""

    tensors: Tensors
    architecture: Architecture
    hyper: Hyper
    index: int
    c8: C8 | None

    def norm(self, stem: str) -> Norm:
        """The norm of that stem. Raises InputError, UnsupportedError: see read_norm."""
        if stem == BARE:
            return bare_norm(self.hyper.hidden, self.hyper.norm_eps, self.architecture.norm)
        (size,) = self._shapes[stem]
        readers = [self._name(reader) for reader in self.architecture.behind(stem)]
        return read_norm(self.tensors, self._name(stem), size, self.hyper.norm_eps, readers, self.architecture.norm)

    def vector(self, stem: str) -> F32:
        """The weight of that stem, float32 [n]. Raises InputError."""
        (size,) = self._shapes[stem]
        return self.tensors.vector(f"{self._name(stem)}.weight", size)

    def linear(self, *stems: str) -> Linear:
        """Matrices that read the same. Raises InputError."""
        shapes = self._shapes
        return self.tensors.linear(shapes[stems[0]][1], [(self._name(stem), shapes[stem][0]) for stem in stems])

    def matrix(self, stem: str, shape: Shape) -> F32:
        """The weight of that stem as floats. Raises InputError."""
        return np.ascontiguousarray(self.tensors.weight(f"{self._name(stem)}.weight", shape).dequantize(), np.float32)

    def array(self, name: str, shape: Shape) -> F32:
        """The tensor of that whole name inside the layer as floats. Raises InputError."""
        return np.ascontiguousarray(self.tensors.weight(self._name(name), shape).dequantize(), np.float32)

    def states(self, *shapes: Shape) -> Keeps:
        """What a recurrent part keeps, arrays of these shapes. Raises InputError for more than any model has: their product is in no tensor's shape."""
        if (found := max(math.prod(shape) for shape in shapes)) > _MOST:
            raise InputError(
                "a recurrent state of this size cannot be right",
                file=self.tensors.checkpoint.path,
                expected=f"at most {_MOST} numbers a layer",
                found=found,
            )
        return Keeps(states=shapes)

    def stack(self, stem: str, shape: Shape) -> Stack:
        """The matrices [experts, n, k] of that stem. Raises InputError."""
        return self.tensors.stack(f"{self._name(stem)}.weight", shape)

    def whole(self, stem: str) -> Weight | None:
        """The stored tensor that the weight of that stem is a part of, None if it is stored by itself."""
        made = self.tensors.derived.get(f"{self._name(stem)}.weight")
        return self.tensors.checkpoint[made.sources[0]] if made is not None and len(made.sources) == 1 else None

    def optional_bias(self, stem: str, *shape: int) -> F32 | None:
        """The bias of that stem as floats of this shape, None if there is none. Raises InputError for another number of entries."""
        name = f"{self._name(stem)}.bias"
        if name not in self.tensors:
            return None
        found = self.tensors.floats(name)
        if found.size != math.prod(shape):
            raise InputError(
                "wrong shape for this configuration", tensor=name, expected=list(shape), found=list(found.shape)
            )
        return np.ascontiguousarray(found.reshape(shape), np.float32)

    def number(self, key: str) -> float:
        """This layer's entry of a list of numbers (record.LayerNumber), called by its key in GGUF."""
        return self.tensors.numbers[key][self.index]

    def __contains__(self, stem: str) -> bool:
        return f"{self._name(stem)}.weight" in self.tensors

    @property
    def _shapes(self) -> Mapping[str, Shape]:
        return self.architecture.layer.shapes(self.hyper, self.index)

    def _name(self, stem: str) -> str:
        return f"blk.{self.index}.{stem}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part keeps a linear: its attribute `key`. Calibration puts something else there for a while."""

    part: object
    key: str

    @property
    def linear(self) -> Any:
        """What is there."""
        return getattr(self.part, self.key)

    def put(self, linear: object) -> None:
        """Put a callable there that takes what the linear takes and gives what it gives."""
        setattr(self.part, self.key, linear)
