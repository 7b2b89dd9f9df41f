"""GPTQ weights of a Hugging Face folder (AutoGPTQ, GPTQModel). Layout: codecs/gptq.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polyquant.codecs.affine_forms import integers_of
from polyquant.codecs.gptq import BITS, GPTQ
from polyquant.errors import InputError, PlanError
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read, fitting, float_word, require
from polyquant.formats.huggingface.schemes import LinearLayers, StoredTensor, group_sizes, linear_names, stored_parts
from polyquant.types import Codec, Shape, TensorSpec

__all__ = ["SCHEME", "modules", "weight_of"]


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with a tensor X.qweight."""
    return (name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight"))


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight:
    """Read one weight. Bits come from config.json, or from g_idx, which shows K, if this module differs. Raises
    InputError.
    """
    packing = settings.get("checkpoint_format", settings.get("format", "gptq"))
    if packing not in ("gptq", "gptq_v2"):
        raise InputError(
            "GPTQ weights in a kernel-specific order are not supported",
            tensor=module,
            expected="checkpoint_format gptq or gptq_v2",
            found=packing,
        )
    words, n = require(module, "qweight", tensors, 2).shape
    scales = require(module, "scales", tensors, 2)
    index = tensors.get(f"{module}.g_idx")
    bits = settings.get("bits")
    k = words * 32 // bits if isinstance(bits, int) and bits in BITS else 0
    if index is not None and len(index.shape) == 1 and index.shape[0]:
        k = index.shape[0]
        bits = 32 * words // k
    if bits not in BITS or k * bits != 32 * words:
        raise InputError(
            "unsupported GPTQ weight",
            tensor=module,
            expected="2, 3, 4 or 8 bits that fill the words",
            found=f"bits {settings.get('bits')}, {words} rows of words",
        )
    groups = scales.shape[0]
    if k % groups:
        raise InputError("groups do not divide the inputs", tensor=module, expected=f"a divisor of {k}", found=groups)
    group = k // groups if groups > 1 else 0
    ordered = index is not None and not _counts_up(f"{module}.g_idx", index, k // groups, read)
    dtype = float_word(module, "scales", scales)
    codec = GPTQ(bits, group, settings.get("sym") is True, packing == "gptq_v2", ordered, dtype)
    return fitting(module, (n, k), codec, tensors, spare=("g_idx",))


def _counts_up(name: str, index: Described, group: int, read: Read) -> bool:
    """True if column k is in group k // group."""
    if index.dtype != "I32" or len(index.shape) != 1:
        raise InputError(
            "g_idx has an unexpected shape or dtype",
            tensor=name,
            expected="I32 [K]",
            found=f"{index.dtype} {list(index.shape)}",
        )
    return bool(np.array_equal(read(name), np.arange(index.shape[0]) // group))


class _GPTQ(LinearLayers):
    """Writing GPTQ."""

    name, title = "gptq", "GPTQ weights"

    def holds(self, codec: Codec) -> bool:
        """True for GPTQ codecs."""
        return isinstance(codec, GPTQ)

    def holding(self, codec: Codec, shape: Shape) -> Codec | None:
        """The same groups and half-precision scales; the next wider bits of 2, 3, 4 and 8. Symmetric codes stay so."""
        have = integers_of(codec)
        if isinstance(codec, GPTQ) or have is None or len(shape) != 2:
            return codec if isinstance(codec, GPTQ) else None
        bits = next(b for b in BITS if b >= have.bits)
        if shape[0] * bits % 32 or shape[1] * bits % 32:
            return None
        group = have.group if have.group < shape[1] else 0
        return GPTQ(bits, group, sym=have.zero == "none", ordered=have.ordered)

    def stored(self, tensor: TensorSpec) -> list[StoredTensor]:
        """The parts, and the trivial g_idx that readers expect."""
        out = stored_parts(tensor)
        assert isinstance(tensor.codec, GPTQ)
        if not tensor.codec.ordered:
            k = tensor.shape[1]
            index = np.arange(k, dtype="<i4") // (tensor.codec.group or max(1, k))
            name = tensor.name.removesuffix("weight") + "g_idx"
            out.append(StoredTensor(None, name, "I32", (k,), index.tobytes()))
        return out

    def settings(self, tensors: Sequence[TensorSpec], config: Mapping[str, Any]) -> dict[str, Any]:
        """quantization_config: the most common codec, and `dynamic` for the modules that differ."""
        del config
        groups = group_sizes(tensors)
        codecs = [t.codec for t in tensors if isinstance(t.codec, GPTQ)]
        each = {t.name: (t.codec.bits, groups[t.name]) for t in tensors if isinstance(t.codec, GPTQ)}
        bits, group = Counter(each.values()).most_common(1)[0][0]
        if len({c.v2 for c in codecs}) > 1:
            raise PlanError("a GPTQ folder has zero points of one version", found="v1 and v2")
        dynamic: dict[str, Any] = {}
        for name, own in each.items():
            if own != (bits, group):
                module = re.escape(name.removesuffix(".weight"))
                dynamic[f"+:^{module}$"] = {"bits": own[0], "group_size": own[1] or -1}
        plain = linear_names(tensors, quantized=False, scheme=self)
        dynamic |= {f"-:^{re.escape(module)}$": {} for module in plain if module != "lm_head"}
        packing = "gptq_v2" if codecs[0].v2 else "gptq"
        head = any(t.name == "lm_head.weight" and isinstance(t.codec, GPTQ) for t in tensors)
        return {
            "quantization_config": {
                "quant_method": "gptq", "method": "gptq", "bits": bits, "group_size": group or -1,
                "desc_act": any(c.ordered for c in codecs), "sym": all(c.sym for c in codecs), "lm_head": head,
                "checkpoint_format": packing, "format": packing, "pack_dtype": "int32",
                **({"dynamic": dynamic} if dynamic else {}),
            }
        }  # fmt: skip


SCHEME = _GPTQ()
