"""MLX weights of a Hugging Face folder (mlx-lm). Layout: codecs/mlx.py.

    X.weight  u32 [N, words] or [E, N, words]     X.scales     X.biases; the modes mxfp4, nvfp4 and mxfp8 have none

config.json describes them under `quantization`, which `quantization_config` repeats: {group_size, bits, mode}, and an
entry per module that differs, or `false` for one that stays float. The embedding and the output head are quantized too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from polyquant.architectures.mlx_writing import mlx_layout
from polyquant.codecs.affine_forms import integers_of
from polyquant.codecs.dtypes import BY_NUMPY
from polyquant.codecs.float_forms import small_floats_of
from polyquant.codecs.keeping import Fate, keeps
from polyquant.codecs.mlx import BITS, GROUPS, MLX
from polyquant.codecs.mlx_floats import MODES, MLXFloats
from polyquant.errors import InputError, PlanError, printable
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read, float_word
from polyquant.formats.huggingface.schemes import StoredTensor
from polyquant.formats.linears import is_linear
from polyquant.types import Codec, Shape, TensorMap, TensorSpec, as_matrix

__all__ = ["KEY", "SCHEME", "modules", "settings_of", "weight_of"]

KEY = "quantization"
"""The key of config.json; "quantization_config" repeats it, and is read where it has no quant_method."""
_HEADS = frozenset({"embed_tokens", "lm_head", "wte", "word_embeddings", "embed_out", "output", "tok_embeddings"})
"""Embeddings and output heads, by the last word of the module."""
_STACKS = (".switch_mlp.", ".switch_glu.", ".experts.")


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """MLX's description in config.json; None if there is none."""
    repeated = config.get("quantization_config")
    named = isinstance(repeated, dict) and "quant_method" in repeated
    for settings in (config.get(KEY), None if named else repeated):
        if isinstance(settings, dict) and all(type(settings.get(key)) is int for key in ("bits", "group_size")):
            return settings
    return None


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with X.scales next to 32-bit words X.weight."""
    for name in tensors:
        module, _, part = name.rpartition(".")
        if part == "scales" and (words := tensors.get(f"{module}.weight")) is not None and words.dtype == "U32":
            yield module


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight | str:
    """Read one matrix or one stack of experts. Raises InputError."""
    del read
    own = _own_settings(module, settings)
    mode, bits, group = own.get("mode", "affine"), own.get("bits"), own.get("group_size")
    if mode in MODES:
        return _small_floats(module, str(mode), bits, group, tensors)
    if mode != "affine":
        return f"MLX {printable(bits, 20)}-bit {printable(mode, 20)}, group {printable(group, 20)}"
    if type(bits) is not int or type(group) is not int or bits not in BITS or group not in GROUPS:
        raise InputError(
            "config.json describes codes that MLX does not have",
            tensor=module,
            expected=f"bits {', '.join(map(str, BITS))}; group_size {', '.join(map(str, GROUPS))}",
            found=f"bits {printable(bits, 20)}, group_size {printable(group, 20)}",
        )
    codec = MLX(bits, group, float_word(module, "scales", tensors[f"{module}.scales"]))
    return _fitting(module, codec, tensors)


def _small_floats(
    module: str, mode: str, bits: object, group: object, tensors: Mapping[str, Described]
) -> QuantizedWeight:
    """Read small floats. Raises InputError."""
    codec = MLXFloats(mode)
    if (bits, group) != (codec.bits, codec.group):
        raise InputError(
            "config.json describes codes that MLX does not have",
            tensor=module,
            expected=f"{codec.bits} bits in groups of {codec.group} for mode {mode}",
            found=f"bits {printable(bits, 20)}, group_size {printable(group, 20)}",
        )
    if f"{module}.global_scale" in tensors:
        raise InputError("MLX weights with a scale of the tensor are not supported", tensor=module)
    return _fitting(module, codec, tensors)


def _own_settings(module: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The description of one module: its entry, or the defaults. Raises InputError."""
    own = settings.get(module, settings)
    if own is True:
        return settings
    if not isinstance(own, dict):
        raise InputError(
            "config.json and the tensors differ: quantized weights have no description there",
            tensor=module,
            expected="an object with bits and group_size",
            found=printable(own, 40),
        )
    return own


def _fitting(module: str, codec: MLX | MLXFloats, tensors: Mapping[str, Described]) -> QuantizedWeight:
    """The weight, if every part has the dtype and shape that config.json implies. Raises InputError."""
    words = tensors[f"{module}.weight"]
    if len(words.shape) not in (2, 3) or 0 in words.shape or words.shape[-1] * 32 % codec.bits:
        raise InputError(
            "weight has an unexpected shape",
            tensor=module,
            expected=f"[N, words] or [experts, N, words] of {codec.bits}-bit codes, none empty",
            found=list(words.shape),
        )
    shape = (*words.shape[:-1], words.shape[-1] * 32 // codec.bits)
    if shape[-1] % codec.granule[1]:
        raise InputError(
            "groups do not divide the inputs",
            tensor=module,
            expected=f"a multiple of {codec.granule[1]}",
            found=f"{shape[-1]} columns of {codec.name}",
        )
    specs = codec.specs(shape)
    for part, spec in specs.items():
        tensor, wanted = tensors.get(f"{module}.{part}"), (*shape[:-1], spec.shape[1])
        if tensor is None:
            raise InputError(f"quantized weight lacks {part}", tensor=module, expected=", ".join(specs))
        if tensor.shape != wanted or tensor.dtype != BY_NUMPY[spec.dtype]:
            raise InputError(
                f"{part} does not fit the weight",
                tensor=module,
                expected=f"{BY_NUMPY[spec.dtype]} {list(wanted)}, for {codec.name} as config.json describes",
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )
    return QuantizedWeight(f"{module}.weight", shape, codec, {part: f"{module}.{part}" for part in specs})


class _MLX:
    """Writing MLX."""

    name, title = "mlx", "MLX weights"

    def holds(self, codec: Codec) -> bool:
        """True for MLX codecs."""
        return isinstance(codec, MLX | MLXFloats)

    def holding(self, codec: Codec, shape: Shape) -> Codec | None:
        """The fewest bits and the largest group that hold the codes; the scales' dtype is that in which biases are
        exact.

        None for codes in other groups or in any order.
        """
        if self.holds(codec):
            return codec
        if (floats := small_floats_of(codec)) is not None:
            return next((c for c in map(MLXFloats, MODES) if keeps(floats, c.floats).fate is not Fate.IMPOSSIBLE), None)
        if (have := integers_of(codec)) is None:
            return None
        columns = as_matrix(shape)[1]
        size = have.group or columns
        group = next((g for g in reversed(GROUPS) if size % g == 0), None)
        if have.ordered or group is None or columns % group:
            return None
        # -zero * scale has more digits than the scale, unless the zero point is a power of two
        dtype = "f32" if have.zero == "integer" else have.scale
        return MLX(next(b for b in BITS if b >= have.bits), group, dtype)

    def quantizes(self, name: str, shape: Shape) -> bool:
        """Linear layers, stacks of experts, embeddings and output heads."""
        *path, last = name.split(".")
        if last != "weight" or not path or path[-1] == "kv_b_proj":  # which mlx-lm splits, quantizing it again
            return False
        if len(shape) == 3:
            return any(stack in name for stack in _STACKS)
        return is_linear(name, shape) or (len(shape) == 2 and path[-1] in _HEADS)

    def arranged(self, tensors: Sequence[TensorMap], config: Mapping[str, Any]) -> tuple[TensorMap, ...]:
        """Stacks of experts instead of separate ones, with mlx-lm's names. Raises InputError."""
        return mlx_layout(tensors, config)

    def stored(self, tensor: TensorSpec) -> list[StoredTensor]:
        """The parts; those of a stack have its dimensions. Raises PlanError for a name that is not X.weight."""
        if not tensor.name.endswith(".weight"):
            raise PlanError("only tensors named *.weight can be quantized", tensor=tensor.name, found=tensor.codec.name)
        stem = tensor.name.removesuffix("weight")
        return [
            StoredTensor(part, stem + part, BY_NUMPY[spec.dtype], (*tensor.shape[:-1], *spec.shape[1:]))
            for part, spec in tensor.codec.specs(tensor.shape).items()
        ]

    def settings(self, tensors: Sequence[TensorSpec], config: Mapping[str, Any]) -> dict[str, Any]:
        """`quantization` and its copy: that of most weights, and entries for the others."""
        sizes = Counter[str]()
        described = {t.name.removesuffix(".weight"): _described(t.codec) for t in tensors if self.holds(t.codec)}
        for tensor in tensors:
            if self.holds(tensor.codec):
                sizes[repr(_described(tensor.codec))] += prod(tensor.shape)
        usual = max(sizes, key=sizes.__getitem__)
        common = next(d for d in described.values() if repr(d) == usual)
        floats = [t.name.removesuffix(".weight") for t in tensors if self.quantizes(t.name, t.shape)]
        entries: dict[str, Any] = {name: False for name in floats if name not in described}
        entries |= {name: own for name, own in described.items() if own != common}
        return {KEY: common | entries, "quantization_config": common | entries, **_rope(config)}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE settings under the older keys too: mlx-lm reads those alone for some architectures, e.g. Qwen2."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return {}
    older = {"rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return {key: value for key, value in older.items() if key not in config}


def _described(codec: Codec) -> dict[str, Any]:
    """The entry of config.json for one codec."""
    assert isinstance(codec, MLX | MLXFloats)
    mode = "affine" if isinstance(codec, MLX) else codec.mode
    return {"group_size": codec.group, "bits": codec.bits, "mode": mode}


SCHEME = _MLX()
