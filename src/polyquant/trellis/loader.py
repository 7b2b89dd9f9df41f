"""Weights of a Trellis folder, layer by layer: v2, v3 and every dialect, told apart by what lies there.

    loader = TrellisModelLoader("models/Model-Trellis-v3")
    for weights in loader:                                  # one layer at a time, in order
        w = weights["model.layers.0.mlp.gate_proj.weight"].dequantize()

Opening reads headers. A layer is read when it is asked for, and only its tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyquant.capabilities import WithBits
from polyquant.codecs.trellis import Trellis
from polyquant.codecs.trellis_forms import exact_trellis
from polyquant.errors import InputError, UnknownNameError, UnsupportedError
from polyquant.opening import open_checkpoint
from polyquant.types import F32, U8, Checkpoint, Floats, TrellisCodes, Weight

__all__ = ["TrellisModelLoader", "TrellisWeight", "as_trellis", "require_finite"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True, eq=False)
class TrellisWeight:
    """One quantized weight [N, K] in memory, in the axes of Trellis v3.

    indices: uint8 [ceil(K / 16), ceil(N / 16), 32 * bits]; scales: float32 [groups, N]; su: float32 [K]; sv: float32 [N].
    codec says what the indices mean; shape is (N, K) = (outputs, inputs). lut: the codebook of a weight that brings its own.
    """

    name: str
    shape: tuple[int, int]
    codec: Trellis
    indices: U8
    scales: F32
    su: F32
    sv: F32
    lut: F32 | None = None

    @property
    def bits(self) -> int:
        """Bits of an index."""
        return self.codec.bits

    @property
    def parts(self) -> dict[str, NDArray[Any]]:
        """The components by name, as `codec` takes them."""
        found: dict[str, NDArray[Any]] = {"indices": self.indices, "scales": self.scales, "su": self.su, "sv": self.sv}
        return found if self.lut is None else {**found, "lut": self.lut}

    @property
    def nbytes(self) -> int:
        """Bytes of all components."""
        return sum(a.nbytes for a in self.parts.values())

    def dequantize(self) -> F32:
        """float32 [N, K]."""
        return self.codec.dequantize(self.parts, self.shape)


def require_finite(name: str, parts: Mapping[str, NDArray[Any]], file: object) -> None:
    """Raises InputError for scales or signs that hold NaN or infinity: they would spread to every later token."""
    for part, array in parts.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InputError(
                f"{part} holds NaN or infinity", file=file, tensor=name, hint="polyquant validate shows more"
            )


def as_trellis(weight: Weight, *, file: object = None) -> TrellisWeight:
    """A quantized weight of any Trellis dialect, read into memory in the axes of v3; its codes are not touched.

    Raises UnsupportedError for another kind of weight, InputError for components that are not finite.
    """
    codec: Any = weight.codec
    if codec.form is not TrellisCodes:
        raise UnsupportedError("not a trellis weight", tensor=weight.name, found=codec.name)
    n, k = weight.shape
    parts: Mapping[str, NDArray[Any]] = weight.read()
    if (exact := exact_trellis(codec, weight.shape)) is not codec:
        parts = exact.pack(codec.unpack(parts, weight.shape))
    require_finite(weight.name, parts, file)
    return TrellisWeight(weight.name, (n, k), exact, **parts)


class TrellisModelLoader:
    """Quantized weights by layer and by name. Closing is optional; `with` does it."""

    def __init__(self, path: str | os.PathLike[str], *, repair: bool = False, axes: str | None = None) -> None:
        """repair: give what the quantizer of Metal Marlin's files meant instead of what its decoder makes of them. axes: "kn" or "nk", how tiles
        lie where the folder does not show it.

        Raises InputError for a folder that is broken, UnsupportedError for one that holds no Trellis.
        """
        self.path = Path(path)
        self.repair, self.axes = repair, axes
        self.checkpoint: Checkpoint = open_checkpoint(self.path, repair=repair, axes=axes)
        if not any(w.codec.form is TrellisCodes for w in self.checkpoint.values()):
            raise UnsupportedError(
                "no trellis weights here", file=self.path, found=self.checkpoint.format, hint="polyquant inspect shows what there is"
            )  # fmt: skip

    def __repr__(self) -> str:
        return f"<TrellisModelLoader {self.path} {self.format}, {self.get_num_layers()} layers>"

    @property
    def format(self) -> str:
        """ "trellis-v2" or "trellis-v3"."""
        return self.checkpoint.format

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json."""
        return self.checkpoint.config

    @cached_property
    def _layers(self) -> dict[int | None, list[str]]:
        """Layer -> names of its tensors, in file order; None: tensors of no layer."""
        found: dict[int | None, list[str]] = {}
        for name in self.checkpoint:
            match = _LAYER.search(name)
            found.setdefault(int(match[1]) if match else None, []).append(name)
        return found

    def _names(self, layer: int | None, *, quantized: bool) -> list[str]:
        if layer is not None and layer not in self._layers:
            raise UnknownNameError("layer", str(layer), [str(i) for i in self.layers])
        names = self._layers.get(layer, [])
        return [n for n in names if (self.checkpoint[n].codec.form is TrellisCodes) == quantized]

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers that have tensors, ascending."""
        return sorted(i for i in self._layers if i is not None)

    def get_num_layers(self) -> int:
        """How many layers have tensors."""
        return len(self.layers)

    def __len__(self) -> int:
        return self.get_num_layers()

    def layer_names(self, layer: int | None) -> list[str]:
        """Names of the quantized weights of a layer (None: of no layer), in file order. Raises UnknownNameError."""
        return self._names(layer, quantized=True)

    def load_layer(self, layer: int) -> dict[str, TrellisWeight]:
        """Quantized weights of one layer by name; nothing else is read. Raises UnknownNameError, InputError."""
        return {name: as_trellis(self.checkpoint[name], file=self.path) for name in self._names(layer, quantized=True)}

    def load_floats(self, layer: int | None = None) -> dict[str, F32]:
        """Unquantized tensors of one layer (norms, biases), or of no layer (embeddings, final norm, head), as float32."""
        return {name: self.load_float(name) for name in self._names(layer, quantized=False)}

    def load_weight(self, name: str) -> TrellisWeight:
        """One quantized weight by its full name, or without the `.weight` at its end. Raises UnknownNameError, UnsupportedError, InputError."""
        return as_trellis(self._weight(name), file=self.path)

    def load_float(self, name: str) -> F32:
        """One unquantized tensor as float32. Raises UnknownNameError, UnsupportedError."""
        weight = self._weight(name)
        if weight.codec.form is not Floats:
            raise UnsupportedError("this weight is quantized", tensor=weight.name, hint="load_weight reads it")
        return weight.codec.dequantize(weight.read(), weight.shape)

    def _weight(self, name: str) -> Weight:
        for candidate in (name, f"{name}.weight"):
            if candidate in self.checkpoint:
                return self.checkpoint[candidate]
        raise UnknownNameError("tensor", name, list(self.checkpoint))

    def __iter__(self) -> Iterator[dict[str, TrellisWeight]]:
        """Layer after layer; each is read when its turn comes."""
        for layer in self.layers:
            yield self.load_layer(layer)

    @cached_property
    def quantization(self) -> Mapping[str, int]:
        """Bits of each quantized weight by name."""
        weights = [w for w in self.checkpoint.values() if w.codec.form is TrellisCodes]
        return MappingProxyType({w.name: w.codec.bits if isinstance(w.codec, WithBits) else 0 for w in weights})

    def get_quantization_info(self) -> dict[str, Any]:
        """format, average_bits_per_weight (every stored byte of the quantized weights counted), layers, weights, and codecs: name -> number of weights."""
        weights = [w for w in self.checkpoint.values() if w.codec.form is TrellisCodes]
        count = sum(int(np.prod(w.shape, dtype=object)) for w in weights)
        names = [w.codec.name for w in weights]
        return {
            "format": self.format,
            "average_bits_per_weight": 8 * sum(w.nbytes for w in weights) / count,
            "layers": self.get_num_layers(),
            "weights": len(weights),
            "codecs": {name: names.count(name) for name in sorted(set(names))},
        }

    def close(self) -> None:
        """Forget what was opened; files are held by nothing but the arrays that were read."""
        self._layers.clear()
        self.checkpoint = Checkpoint(self.checkpoint.format, self.path, {})

    def __enter__(self) -> TrellisModelLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
