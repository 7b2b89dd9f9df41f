"""quantization_config.json of a Trellis v3 folder: type, size and error of each quantized weight.

    {"quantization_version": "trellis_v3", "quantization_method": ...,
     "global_config":   {average_bits_per_weight, target_bits, hadamard_transform, tile_size, codebook_size,
                         scale_groups, codebook},
     "tensor_metadata": {NAME: {bits, shape [K, N], mse, original_bytes, original_dtype, compressed_bytes,
                                compression_ratio, hadamard}},
     "layer_allocation": {"0": {"mlp.gate_proj": 3}}}

Every figure except `mse` follows from names, shapes and codecs. The mean squared error is known when its tensor is
finished, so it has a slot of fixed width (`MSE_BYTES`) in text that is otherwise complete before any payload.
`compressed_bytes` counts all components of a weight including padding; `compression_ratio` = original_bytes /
compressed_bytes, where `original_dtype` is the stored type of the original.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyquant.codecs.trellis import Trellis
from polyquant.formats.trellis.options import METHODS
from polyquant.types import Shape, TensorSpec, TrellisCode

__all__ = [
    "FILE",
    "METHODS",
    "MSE_BYTES",
    "WITHOUT_PLUGIN",
    "Origin",
    "config_entry",
    "config_text",
    "effective_bits",
    "mse_text",
    "target_bits",
]

FILE = "quantization_config.json"
WITHOUT_PLUGIN = "this is a Trellis model: import polyquant.hf first (pip install 'polyquant[transformers]')"
"""The value of `transformers_weights` in config.json of a Trellis folder.

transformers would initialize a model with an unknown quantization method randomly. But it rejects a weights name that
is not a file name, quoting this text. The plugin removes the entry before transformers reads it.
"""
MSE_BYTES = 14
"""Length of every `mse` string: 1.23456789e-04."""

_HOLE = 10 ** (MSE_BYTES - 1)
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks|blk)\.(\d+)\.(.+?)(?:\.weight)?")


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a quantized weight: its bytes and dtype there, and the stated error of unchanged codes.

    mse: None if it is to be measured while the weight is written.
    """

    nbytes: int
    dtype: str
    mse: float | None = None


def mse_text(mse: float) -> bytes:
    """A mean squared error as a JSON number of exactly MSE_BYTES characters. Less than 1e-99 is zero."""
    text = f"{mse if mse >= 1e-99 else 0.0:.8e}".encode()
    assert len(text) == MSE_BYTES, f"a mean squared error of {mse}"
    return text


def effective_bits(tensors: Sequence[TensorSpec]) -> float:
    """Bits per weight of these tensors, every component byte counted; 0 without tensors."""
    equal: dict[tuple[int, Shape], int] = {}  # 70,000 experts have few shapes
    stored = 0
    for t in tensors:
        key = id(t.codec), t.shape
        if key not in equal:
            equal[key] = sum(s.nbytes for s in t.codec.specs(t.shape).values())
        stored += equal[key]
    return 8 * stored / max(1, sum(math.prod(t.shape) for t in tensors))


def target_bits(tensors: Sequence[TensorSpec]) -> int:
    """The width of most quantized weights; the smaller one if two are equally common."""
    weights: Counter[int] = Counter()
    for t in sorted(tensors, key=lambda t: _trellis(t).bits):
        weights[_trellis(t).bits] += math.prod(t.shape)
    return weights.most_common(1)[0][0] if weights else 0


def config_entry(tensors: Sequence[TensorSpec], method: str) -> dict[str, Any]:
    """The entry `quantization_config` of config.json, by which transformers finds the plugin and the config file."""
    return {
        "quant_method": "polyquant_trellis",
        "quantization_version": "trellis_v3",
        "quantization_method": method,
        "bits": target_bits(tensors),
        "bits_per_weight": round(effective_bits(tensors), 4),
        "config_file": FILE,
    }


def config_text(
    tensors: Sequence[TensorSpec], origins: Mapping[str, Origin], method: str, target: int | None = None
) -> tuple[bytes, dict[str, int]]:
    """The file's text for these quantized weights (codecs: Trellis), and the offsets of the errors still to be
    measured.
    """
    common = _common_code(tensors)
    content = {
        "quantization_version": "trellis_v3",
        "quantization_method": method,
        "global_config": {
            "average_bits_per_weight": round(effective_bits(tensors), 6),
            "target_bits": target_bits(tensors) if target is None else target,
            "hadamard_transform": any(_code(t).hadamard != (1, 1) for t in tensors),
            "tile_size": 16,
            "codebook_size": 1 << common[1],
            "scale_groups": "per_tensor"
            if all(_trellis(t).group_count(t.shape) == 1 for t in tensors)
            else "per_group",
            "codebook": _codebook(common),
        },
        "tensor_metadata": {},
        "layer_allocation": _allocation(tensors),
    }
    entries = '"tensor_metadata": {\n    ' + _entries(tensors, origins, common) + "\n  }"
    outside = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    text = bytearray(outside.replace('"tensor_metadata": {}', entries, 1).encode())
    holes, at = {}, 0
    for i, t in enumerate(tensors):
        # This cannot occur in a string, where its quotes would be escaped.
        at = text.index(b'"mse": %d' % (_HOLE + i), at) + len('"mse": ')
        stated = origins[t.name].mse
        if stated is None:
            holes[t.name] = at
        else:
            text[at : at + MSE_BYTES] = mse_text(stated)
    return bytes(text), holes


def _trellis(tensor: TensorSpec) -> Trellis:
    assert isinstance(tensor.codec, Trellis)
    return tensor.codec


def _code(tensor: TensorSpec) -> TrellisCode:
    return _trellis(tensor).code(tensor.shape)


def _common_code(tensors: Sequence[TensorSpec]) -> tuple[str, int, str]:
    """(codebook, window_bits, tile_order) of most weights."""
    weights: Counter[tuple[str, int, str]] = Counter()
    for t in tensors:
        code = _code(t)
        weights[code.codebook, code.window_bits, code.tile_order] += math.prod(t.shape)
    return weights.most_common(1)[0][0]


def _codebook(code: tuple[str, int, str]) -> dict[str, Any]:
    return dict(zip(("type", "window_bits", "tile_order"), code, strict=True))


def _entries(tensors: Sequence[TensorSpec], origins: Mapping[str, Origin], common: tuple[str, int, str]) -> str:
    """The text of all entries. Equal ones are made once: an indented one takes json 20 microseconds, of 70,000."""
    made: dict[tuple[int, Shape, int, str], str] = {}
    out = []
    for number, tensor in enumerate(tensors):
        origin = origins[tensor.name]
        key = id(tensor.codec), tensor.shape, origin.nbytes, origin.dtype
        if key not in made:
            made[key] = json.dumps(_entry(tensor, origin, common), indent=2, ensure_ascii=False).replace("\n", "\n    ")
        entry = made[key].replace(f'"mse": {_HOLE}', f'"mse": {_HOLE + number}', 1)
        out.append(f"{json.dumps(tensor.name, ensure_ascii=False)}: {entry}")
    return ",\n    ".join(out)


def _entry(tensor: TensorSpec, origin: Origin, common: tuple[str, int, str]) -> dict[str, Any]:
    code, (n, k) = _code(tensor), tensor.shape
    stored = sum(s.nbytes for s in tensor.codec.specs(tensor.shape).values())
    own = (code.codebook, code.window_bits, code.tile_order)
    return {
        "bits": code.bits,
        "shape": [k, n],
        "mse": _HOLE,
        "original_bytes": origin.nbytes,
        "original_dtype": origin.dtype,
        "compressed_bytes": stored,
        "compression_ratio": round(origin.nbytes / stored, 4),
        "hadamard": list(code.hadamard),
        **({} if own == common else {"codebook": _codebook(own)}),
    }


def _allocation(tensors: Sequence[TensorSpec]) -> dict[str, dict[str, int]]:
    """Layer -> module -> bits."""
    layers: dict[int, dict[str, int]] = {}
    for t in tensors:
        if (match := _LAYER.fullmatch(t.name)) is not None:
            modules = layers.setdefault(int(match[1]), {})
            # Of two stacks of layers (text and vision) the second one uses full names.
            modules[match[2] if match[2] not in modules else t.name] = _trellis(t).bits
    return {str(number): layers[number] for number in sorted(layers)}
