"""Access to the tensors of a layer part: by stem, with the shapes and the wiring of the architecture's record."""

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
from polyquant.runtime.state import StateSpec
from polyquant.runtime.tensors import Tensors
from polyquant.types import F32, Shape, Weight

__all__ = ["Place", "Site"]

_MOST = 1 << 26  # elements of a recurrent state; the largest known, of Nemotron-H 56B, has 2^22


@dataclass(frozen=True, slots=True)
class Site:
    """Layer `index` of a decoder under construction. c8: grids for rounding before the cache, None for a float
    cache."""

    tensors: Tensors
    architecture: Architecture
    hyper: Hyper
    index: int
    c8: C8 | None

    def norm(self, stem: str) -> Norm:
        """Return the norm of that stem. Raises InputError, UnsupportedError: see read_norm."""
        if stem == BARE:
            return bare_norm(self.hyper.hidden, self.hyper.norm_eps, self.architecture.norm)
        (size,) = self._shapes[stem]
        readers = [self._name(reader) for reader in self.architecture.readers_of(stem)]
        return read_norm(self.tensors, self._name(stem), size, self.hyper.norm_eps, readers, self.architecture.norm)

    def vector(self, stem: str) -> F32:
        """Return the weight of that stem, float32 [n]. Raises InputError."""
        (size,) = self._shapes[stem]
        return self.tensors.vector(f"{self._name(stem)}.weight", size)

    def linear(self, *stems: str) -> Linear:
        """Return matrices with a common input. Raises InputError."""
        shapes = self._shapes
        return self.tensors.linear(shapes[stems[0]][1], [(self._name(stem), shapes[stem][0]) for stem in stems])

    def matrix(self, stem: str, shape: Shape) -> F32:
        """Return the weight of that stem as floats. Raises InputError."""
        return np.ascontiguousarray(self.tensors.weight(f"{self._name(stem)}.weight", shape).dequantize(), np.float32)

    def array(self, name: str, shape: Shape) -> F32:
        """Return the tensor with this full name inside the layer as floats. Raises InputError."""
        return np.ascontiguousarray(self.tensors.weight(self._name(name), shape).dequantize(), np.float32)

    def states(self, *shapes: Shape) -> StateSpec:
        """Return the state of a recurrent part, arrays of these shapes.

        Raises InputError for implausible sizes, which no tensor's shape bounds.
        """
        if (size := max(math.prod(shape) for shape in shapes)) > _MOST:
            raise InputError(
                "a recurrent state of this size cannot be right",
                file=self.tensors.checkpoint.path,
                expected=f"at most {_MOST} elements per layer",
                found=size,
            )
        return StateSpec(states=shapes)

    def stack(self, stem: str, shape: Shape) -> Stack:
        """Return the matrices [experts, n, k] of that stem. Raises InputError."""
        return self.tensors.stack(f"{self._name(stem)}.weight", shape)

    def source(self, stem: str) -> Weight | None:
        """Return the stored tensor that contains the weight of that stem, None if it is stored separately."""
        tensor_map = self.tensors.derived.get(f"{self._name(stem)}.weight")
        return (
            self.tensors.checkpoint[tensor_map.sources[0]]
            if tensor_map is not None and len(tensor_map.sources) == 1
            else None
        )

    def optional_bias(self, stem: str, *shape: int) -> F32 | None:
        """Return the bias of that stem as floats of this shape, None if absent.

        Raises InputError if the size differs.
        """
        name = f"{self._name(stem)}.bias"
        if name not in self.tensors:
            return None
        values = self.tensors.floats(name)
        if values.size != math.prod(shape):
            raise InputError(
                "wrong shape for this configuration", tensor=name, expected=list(shape), found=list(values.shape)
            )
        return np.ascontiguousarray(values.reshape(shape), np.float32)

    def number(self, key: str) -> float:
        """Return this layer's entry of a list (record.LayerNumber), by its GGUF key."""
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
    """The attribute `key` of a part, which holds a linear. Calibration replaces it temporarily."""

    part: object
    key: str

    @property
    def linear(self) -> Any:
        """The current value."""
        return getattr(self.part, self.key)

    def put(self, linear: object) -> None:
        """Set a callable with the signature of the linear."""
        setattr(self.part, self.key, linear)
