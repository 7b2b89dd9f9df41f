"""Loader of Trellis folders, layer by layer: v2, v3 and every dialect, detected from the files.

    loader = TrellisModelLoader("models/Model-Trellis-v3")
    for weights in loader:                                  # one layer at a time, in order
        w = weights["model.layers.0.mlp.gate_proj.weight"].dequantize()

Opening reads only headers. The tensors of a layer are read on request.
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
    """One quantized weight [N, K] in memory, with the axes of Trellis v3.

    indices: uint8 [ceil(K / 16), ceil(N / 16), 32 * bits]; scales: float32 [groups, N]; su: float32 [K]; sv: float32
    [N]. codec: defines the indices; shape: (N, K) = (outputs, inputs). lut: the weight's own codebook, if any.
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
        """Bits per index."""
        return self.codec.bits

    @property
    def parts(self) -> dict[str, NDArray[Any]]:
        """The components by name, as `codec` expects them."""
        components: dict[str, NDArray[Any]] = {
            "indices": self.indices,
            "scales": self.scales,
            "su": self.su,
            "sv": self.sv,
        }
        return components if self.lut is None else {**components, "lut": self.lut}

    @property
    def nbytes(self) -> int:
        """Bytes of all components."""
        return sum(a.nbytes for a in self.parts.values())

    def dequantize(self) -> F32:
        """Return the weight as float32 [N, K]."""
        return self.codec.dequantize(self.parts, self.shape)


def require_finite(name: str, parts: Mapping[str, NDArray[Any]], file: object) -> None:
    """Raise InputError if scales or signs contain NaN or infinity, which would spread to every later token."""
    for part, array in parts.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InputError(
                f"{part} contains NaN or infinity", file=file, tensor=name, hint="run polyquant validate for details"
            )


def as_trellis(weight: Weight, *, file: object = None) -> TrellisWeight:
    """Read a quantized weight of any Trellis dialect into memory, with the axes of v3 and unchanged codes.

    Raises UnsupportedError for other kinds of weights, InputError for components that are not finite.
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
    """Quantized weights by layer and by name. Closing is optional; `with` is supported."""

    def __init__(self, path: str | os.PathLike[str], *, repair: bool = False, axes: str | None = None) -> None:
        """Open a folder. Raises InputError for a broken folder, UnsupportedError for one without Trellis weights.

        repair: decode Metal Marlin's files as its quantizer intended instead of as its decoder does. axes: "kn" or
        "nk", the orientation of tiles if the folder does not tell.
        """
        self.path = Path(path)
        self.repair, self.axes = repair, axes
        self.checkpoint: Checkpoint = open_checkpoint(self.path, repair=repair, axes=axes)
        if not any(w.codec.form is TrellisCodes for w in self.checkpoint.values()):
            raise UnsupportedError(
                "no trellis weights in this folder",
                file=self.path,
                found=self.checkpoint.format,
                hint="run polyquant inspect to see its content",
            )

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
        """Layer -> names of its tensors, in file order; None: tensors outside the layers."""
        layers: dict[int | None, list[str]] = {}
        for name in self.checkpoint:
            match = _LAYER.search(name)
            layers.setdefault(int(match[1]) if match else None, []).append(name)
        return layers

    def _names(self, layer: int | None, *, quantized: bool) -> list[str]:
        if layer is not None and layer not in self._layers:
            raise UnknownNameError("layer", str(layer), [str(i) for i in self.layers])
        names = self._layers.get(layer, [])
        return [n for n in names if (self.checkpoint[n].codec.form is TrellisCodes) == quantized]

    @property
    def layers(self) -> list[int]:
        """Indices of the layers that have tensors, ascending."""
        return sorted(i for i in self._layers if i is not None)

    def get_num_layers(self) -> int:
        """Return the number of layers that have tensors."""
        return len(self.layers)

    def __len__(self) -> int:
        return self.get_num_layers()

    def layer_names(self, layer: int | None) -> list[str]:
        """Return the names of a layer's quantized weights (None: those outside the layers), in file order.

        Raises UnknownNameError.
        """
        return self._names(layer, quantized=True)

    def load_layer(self, layer: int) -> dict[str, TrellisWeight]:
        """Return the quantized weights of one layer by name; no other tensor is read.

        Raises UnknownNameError, InputError.
        """
        return {name: as_trellis(self.checkpoint[name], file=self.path) for name in self._names(layer, quantized=True)}

    def load_floats(self, layer: int | None = None) -> dict[str, F32]:
        """Return the unquantized tensors of a layer (norms, biases) as float32.

        None: those outside (embeddings, final norm, head).
        """
        return {name: self.load_float(name) for name in self._names(layer, quantized=False)}

    def load_weight(self, name: str) -> TrellisWeight:
        """Return one quantized weight by name, with or without `.weight`.

        Raises UnknownNameError, UnsupportedError, InputError.
        """
        return as_trellis(self._weight(name), file=self.path)

    def load_float(self, name: str) -> F32:
        """Return one unquantized tensor as float32. Raises UnknownNameError, UnsupportedError."""
        weight = self._weight(name)
        if weight.codec.form is not Floats:
            raise UnsupportedError("this weight is quantized", tensor=weight.name, hint="use load_weight")
        return weight.codec.dequantize(weight.read(), weight.shape)

    def _weight(self, name: str) -> Weight:
        for candidate in (name, f"{name}.weight"):
            if candidate in self.checkpoint:
                return self.checkpoint[candidate]
        raise UnknownNameError("tensor", name, list(self.checkpoint))

    def __iter__(self) -> Iterator[dict[str, TrellisWeight]]:
        """Iterate over the layers; each is read when it is reached."""
        for layer in self.layers:
            yield self.load_layer(layer)

    @cached_property
    def quantization(self) -> Mapping[str, int]:
        """Return the bits of each quantized weight by name."""
        weights = [w for w in self.checkpoint.values() if w.codec.form is TrellisCodes]
        return MappingProxyType({w.name: w.codec.bits if isinstance(w.codec, WithBits) else 0 for w in weights})

    def get_quantization_info(self) -> dict[str, Any]:
        """Return format, average_bits_per_weight, layers, weights, and codecs: name -> number of weights.

        The average counts every stored byte of the quantized weights.
        """
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
        """Release the checkpoint; only arrays already read keep files open."""
        self._layers.clear()
        self.checkpoint = Checkpoint(self.checkpoint.format, self.path, {})

    def __enter__(self) -> TrellisModelLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
