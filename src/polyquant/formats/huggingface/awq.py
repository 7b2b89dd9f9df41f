"""AWQ weights of a Hugging Face folder (AutoAWQ, version gemm). Layout: codecs/awq.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyquant.codecs.affine_forms import integers_of
from polyquant.codecs.awq import AWQ
from polyquant.errors import InputError, PlanError
from polyquant.formats.huggingface.gptq import modules as _with_qweight
from polyquant.formats.huggingface.scheme import Described, QuantizedWeight, Read, fitting, float_word, require
from polyquant.formats.huggingface.schemes import LinearLayers, group_sizes, linear_names
from polyquant.types import Codec, Shape, TensorSpec

__all__ = ["SCHEME", "modules", "weight_of"]


def modules(tensors: Mapping[str, Described]) -> Iterator[str]:
    """Modules with a tensor X.qweight."""
    return _with_qweight(tensors)


def weight_of(
    module: str, tensors: Mapping[str, Described], settings: Mapping[str, Any], read: Read
) -> QuantizedWeight:
    """Read 4-bit codes in the order of the gemm kernel. Raises InputError."""
    del read
    version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", settings.get("w_bit", 4))
    backend = settings.get("backend")
    if version != "gemm" or bits != 4 or backend == "llm-awq":
        raise InputError(
            "this variant of AWQ is not supported",
            tensor=module,
            expected="AutoAWQ version gemm, 4 bits",
            found=f"version {version}, {bits} bits" + (", llm-awq" if backend == "llm-awq" else ""),
        )
    k, words = require(module, "qweight", tensors, 2).shape
    scales = require(module, "scales", tensors, 2)
    groups = scales.shape[0]
    if k % groups:
        raise InputError("groups do not divide the inputs", tensor=module, expected=f"a divisor of {k}", found=groups)
    codec = AWQ(k // groups if groups > 1 else 0, float_word(module, "scales", scales))
    return fitting(module, (8 * words, k), codec, tensors)


class _AWQ(LinearLayers):
    """Writing AWQ."""

    name, title = "awq", "AWQ weights"

    def holds(self, codec: Codec) -> bool:
        """True for AWQ codecs."""
        return isinstance(codec, AWQ)

    def holding(self, codec: Codec, shape: Shape) -> Codec | None:
        """The same group, half-precision scales; None for codes of more than 4 bits."""
        have = integers_of(codec)
        if isinstance(codec, AWQ):
            return codec
        if have is None or have.bits > 4 or len(shape) != 2 or shape[0] % 8:
            return None
        return AWQ(have.group if have.group < shape[1] else 0)

    def settings(self, tensors: Sequence[TensorSpec], config: Mapping[str, Any]) -> dict[str, Any]:
        """quantization_config. Raises PlanError for several group sizes."""
        del config
        groups = set(group_sizes(tensors).values())
        if len(groups) > 1:
            raise PlanError("an AWQ folder has one group size", found=", ".join(map(str, sorted(groups))))
        plain = [m for m in linear_names(tensors, quantized=False, scheme=self) if m != "lm_head"]
        return {
            "quantization_config": {
                "quant_method": "awq", "bits": 4, "group_size": groups.pop() or -1, "zero_point": True,
                "version": "gemm", "modules_to_not_convert": plain or None,
            }
        }  # fmt: skip


SCHEME = _AWQ()
