"""compressed-tensors weights with integer codes in a Hugging Face folder (llm-compressor). Layout:
codecs/compressed_tensors.py.

compressed_floats.py reads and describes small floats. Other formats (marlin-24) are named but not decoded.
Static input scales, X.input_scale and X.input_zero_point, are parts of the weight if they are [1] and of the scales'
dtype; others are omitted with a note, since they do not change the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polyquant.codecs.affine_forms import integers_of
from polyquant.codecs.compressed_tensors import CompressedTensors
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import InputError, printable
from polyquant.formats.huggingface import compressed_floats
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read, fitting, float_word, require
from polyquant.formats.huggingface.schemes import LinearLayers, StoredTensor, group_sizes, linear_names, stored_parts
from polyquant.types import Codec, Shape, TensorSpec

__all__ = ["SCHEME", "modules", "weight_of"]

BITS = (4, 8, 2, 3, 5, 6, 7)
"""Packed widths, the common ones first."""
PACKED = "pack-quantized"
_DECODED = (PACKED, "int-quantized", *compressed_floats.FORMATS)
_BYTES = ("I8", "F8_E4M3", "F8_E5M2")
_GRID = ("input_scale", "input_zero_point", "input_global_scale")


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with X.weight_packed, or X.weight of 8 bits and a scale."""
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        small = part == "weight" and tensor.dtype in _BYTES and f"{module}.weight_scale" in tensors
        if part == "weight_packed" or small:
            yield module


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight | str:
    """Read one weight. The bits of packed codes follow from the number of words. Raises InputError."""
    if (floats := compressed_floats.weight_of(module, tensors, _groups(settings))) is not None:
        return _with_lost(module, floats, tensors)
    packed = f"{module}.weight_packed" in tensors
    if packed and (tensors[f"{module}.weight_packed"].dtype != "I32" or PACKED not in _formats(settings)):
        return _scheme(settings)
    if packed:
        shape = _shape(module, tensors, read)
        bits = _packed_bits(module, shape, require(module, "weight_packed", tensors, 2), settings)
        if bits not in BITS:
            return f"compressed-tensors {bits}-bit {PACKED}"
    else:
        n, k = require(module, "weight", tensors, 2).shape
        shape, bits = (n, k), _stored_bits(settings)
    scale = tensors.get(f"{module}.weight_scale")
    if scale is None:
        raise InputError("quantized weight lacks weight_scale", tensor=module)
    tensor = scale.shape == (1,)
    groups = 1 if tensor or len(scale.shape) != 2 else scale.shape[1]
    if groups < 1 or shape[1] % groups:
        raise InputError(
            "groups do not divide the inputs", tensor=module, expected=f"a divisor of {shape[1]}", found=groups
        )
    zero = tensors.get(f"{module}.weight_zero_point")
    static = "" if packed else _static(module, scale, tensors)
    codec = CompressedTensors(
        bits,
        packed,
        shape[1] // groups if groups > 1 else 0,
        "" if zero is None else "zp" if zero.dtype == "I8" else "zpp",
        tensor,
        _reordered(module, shape[1] // groups, tensors, read),
        float_word(module, "weight_scale", scale),
        any(
            _dynamic(group)
            for group in _groups(settings)
            if (group.get("format", settings.get("format")) == PACKED) is packed
        ),
        static,
    )
    return _with_lost(module, fitting(module, shape, codec, tensors, spare=("weight_shape", "weight_g_idx")), tensors)


def _with_lost(module: str, weight: QuantizedWeight, tensors: Mapping[str, Described]) -> QuantizedWeight:
    """The weight, with the scales of inputs that are not part of it."""
    taken = set(weight.tensors.values())
    lost = tuple(name for part in _GRID if (name := f"{module}.{part}") in tensors and name not in taken)
    return replace(weight, spare=weight.spare + lost, lost=lost)


def _formats(settings: Mapping[str, Any]) -> list[str]:
    """The formats of the groups, or of the folder if the groups have none."""
    formats = [f for group in _groups(settings) if isinstance(f := group.get("format"), str)]
    return list(dict.fromkeys(formats or [str(settings.get("format"))]))


def _scheme(settings: Mapping[str, Any]) -> str:
    """The name of an unsupported format."""
    formats = [f for f in _formats(settings) if f not in _DECODED] or _formats(settings)
    return f"compressed-tensors {printable(', '.join(formats), 80)}"


def _groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    return [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []


def _dynamic(group: Mapping[str, Any]) -> bool:
    """True if inputs are quantized to int8 per token."""
    inputs = group.get("input_activations")
    return (
        isinstance(inputs, dict)
        and inputs.get("dynamic") is True
        and inputs.get("num_bits") == 8
        and inputs.get("type") == "int"
    )


def _stored_bits(settings: Mapping[str, Any]) -> int:
    """4 for codes of 4 bits in bytes (W4A8): only if config.json declares it for every int-quantized weight."""
    weights = [
        g.get("weights") for g in _groups(settings) if g.get("format", settings.get("format")) == "int-quantized"
    ]
    return 4 if weights and all(isinstance(w, dict) and w.get("num_bits") == 4 for w in weights) else 8


def _static(module: str, scale: Described, tensors: Mapping[str, Described]) -> str:
    """The word in codec names for the input quantization that this weight stores."""
    inputs, zero = (tensors.get(f"{module}.{part}") for part in ("input_scale", "input_zero_point"))
    if inputs is None or inputs.shape != (1,) or inputs.dtype != scale.dtype:
        return ""
    if zero is None:
        return "static"
    return "szp" if zero.shape == (1,) and zero.dtype == "I8" else ""


def _shape(module: str, tensors: Mapping[str, Described], read: Read) -> tuple[int, int]:
    """N and K of packed codes. Raises InputError."""
    stored = require(module, "weight_shape", tensors, 1)
    if stored.shape != (2,) or stored.dtype not in ("I64", "I32"):
        raise InputError(
            "weight_shape has an unexpected shape or dtype",
            tensor=module,
            expected="I64 [2]",
            found=f"{stored.dtype} {list(stored.shape)}",
        )
    n, k = (int(x) for x in read(f"{module}.weight_shape"))
    return n, k


def _packed_bits(module: str, shape: tuple[int, int], words: Described, settings: Mapping[str, Any]) -> int:
    """4 or 8, whichever fits the number of words, or another width that config.json declares. Raises InputError."""
    n, k = shape
    weights = (g.get("weights") for g in _groups(settings))
    others: list[int] = [w["num_bits"] for w in weights if isinstance(w, dict) and type(w.get("num_bits")) is int]
    for bits in (*BITS, *others):
        if n > 0 and k > 0 and 0 < bits < 32 and words.shape == (n, -(-k * bits // 32)):
            return bits
    raise InputError(
        "weight_packed does not fit weight_shape",
        tensor=module,
        expected=f"4 or 8 bits for each of {list(shape)}",
        found=f"words {list(words.shape)}",
    )


def _reordered(module: str, group: int, tensors: Mapping[str, Described], read: Read) -> bool:
    """True if the group index is not ascending (act-order); -1 means no index."""
    index = tensors.get(f"{module}.weight_g_idx")
    if index is None:
        return False
    if index.dtype != "I32" or len(index.shape) != 1:
        raise InputError(
            "weight_g_idx has an unexpected shape or dtype",
            tensor=module,
            expected="I32 [K]",
            found=f"{index.dtype} {list(index.shape)}",
        )
    groups = read(f"{module}.weight_g_idx")
    return not ((groups == -1).all() or np.array_equal(groups, np.arange(len(groups)) // group))


class _CompressedTensors(LinearLayers):
    """Writing compressed-tensors."""

    name, title = "compressed-tensors", "compressed-tensors weights"

    def holds(self, codec: Codec) -> bool:
        """True for the codecs of compressed-tensors, integers and small floats."""
        return isinstance(codec, CompressedTensors) or compressed_floats.holds(codec)

    def holding(self, codec: Codec, shape: Shape) -> Codec | None:
        """Packed words of the same groups, and of 4 or 8 bits; zero points are packed where the source has any."""
        if (floats := compressed_floats.holding(codec, shape)) is not None:
            return floats
        have = integers_of(codec)
        if isinstance(codec, CompressedTensors) or have is None:
            return codec if have is not None else None
        if isinstance(codec, MsModelSlim) and codec.kind in ("w8a8", "w8a8s"):
            return CompressedTensors(8, False, dtype="f32", static="szp")
        if len(shape) != 2 or (have.group and shape[1] % have.group):
            return None
        zeros = "" if have.zero == "none" else "zpp"
        bits = 4 if have.bits <= 4 else 8
        return CompressedTensors(bits, True, have.group, zeros, have.tensor, have.ordered, have.scale)

    def stored(self, tensor: TensorSpec) -> list[StoredTensor]:
        """The parts, and weight_shape of packed codes."""
        if not isinstance(tensor.codec, CompressedTensors):
            return compressed_floats.stored(tensor)
        out = stored_parts(tensor)
        if tensor.codec.words:
            data = np.array(tensor.shape, "<i8").tobytes()
            name = tensor.name.removesuffix("weight") + "weight_shape"
            out.append(StoredTensor(None, name, "I64", (2,), data))
        return out

    def settings(self, tensors: Sequence[TensorSpec], config: Mapping[str, Any]) -> dict[str, Any]:
        """quantization_config as llm-compressor writes it, with a group per codec. All linear layers are targets if
        there is one codec. A source's scheme of the KV cache is kept with its scales.
        """
        sizes = group_sizes(tensors)
        own: dict[str, Codec] = {
            t.name: replace(t.codec, group=sizes[t.name]) if isinstance(t.codec, CompressedTensors) else t.codec
            for t in tensors
            if self.holds(t.codec)
        }
        codecs = {codec.name: codec for codec in own.values()}
        formats = {name: _format(codec) for name, codec in codecs.items()}
        groups = {}
        for i, (name, codec) in enumerate(codecs.items()):
            modules = [tensor.removesuffix(".weight") for tensor, its in own.items() if its == codec]
            targets = ["Linear"] if len(codecs) == 1 else modules
            groups[f"group_{i}"] = {"targets": targets, **_described(codec), "format": formats[name]}
        single = len(set(formats.values())) == 1
        return {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": next(iter(formats.values())) if single else "mixed-precision",
                "quantization_status": "compressed",
                "config_groups": groups,
                "ignore": linear_names(tensors, quantized=False, scheme=self),
                "kv_cache_scheme": _kv_cache(tensors, config),
                "global_compression_ratio": None,
                "sparsity_config": {},
                "transform_config": {},
                "version": _VERSION,
            }
        }


_VERSION = "0.19.0"
"""Version of compressed-tensors whose fields these are."""
_ZERO_POINTS = "torch.int8"


def _kv_cache(tensors: Sequence[TensorSpec], config: Mapping[str, Any]) -> Any:
    """The source's scheme of the KV cache, if its scales are among the tensors."""
    settings = config.get("quantization_config")
    scaled = any(t.name.endswith((".k_scale", ".v_scale")) for t in tensors)
    return settings.get("kv_cache_scheme") if scaled and isinstance(settings, Mapping) else None


def _format(codec: Codec) -> str:
    if not isinstance(codec, CompressedTensors):
        return compressed_floats.format_of(codec)
    return PACKED if codec.words else "int-quantized"


def _described(codec: Codec) -> dict[str, Any]:
    """The group entries `weights`, `input_activations` and `output_activations`."""
    if not isinstance(codec, CompressedTensors):
        return compressed_floats.described(codec)
    strategy = "tensor" if codec.tensor else "group" if codec.group else "channel"
    weights = _scheme_of(codec.bits, strategy, codec.group or None, symmetric=not codec.zeros) | {
        "observer": "memoryless_minmax", "actorder": "group" if codec.ordered else None,
    }  # fmt: skip
    inputs = None
    if codec.dynamic:
        inputs = _scheme_of(8, "token", None, symmetric=True) | {"dynamic": True}
    elif codec.static:
        inputs = _scheme_of(8, "tensor", None, symmetric=codec.static != "szp") | {"observer": "minmax"}
    return {"weights": weights, "input_activations": inputs, "output_activations": None}


def _scheme_of(bits: int, strategy: str, group: int | None, *, symmetric: bool) -> dict[str, Any]:
    """The fields of a quantization scheme of integers."""
    return {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group, "strategy": strategy,
        "block_structure": None, "dynamic": False, "actorder": None, "scale_dtype": None,
        "zp_dtype": None if symmetric else _ZERO_POINTS, "observer": None, "observer_kwargs": {},
    }  # fmt: skip


SCHEME = _CompressedTensors()
