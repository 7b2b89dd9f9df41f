"""Weights of other tools' quantized checkpoints among the tensors of a Hugging Face folder: config.json says which method, one module each reads it.

    gptq                X.qweight X.qzeros X.scales [X.g_idx]                                     formats/huggingface/gptq.py
    awq                 X.qweight X.qzeros X.scales                                               formats/huggingface/awq.py
    compressed-tensors  X.weight | X.weight_packed X.weight_shape, X.weight_scale, ...            formats/huggingface/compressed.py
    fp8, fbgemm_fp8     X.weight, X.weight_scale | X.weight_scale_inv                             formats/huggingface/fp8.py
    chatglm             X.weight X.weight_scale, config.json's own key quantization_bit           formats/huggingface/chatglm.py

The first tools wrote quantize_config.json (GPTQ) or quant_config.json (AWQ) instead, ModelOpt hf_quant_config.json: read where config.json says nothing.
What none of them decodes is refused: formats/huggingface/undecoded.py.
The linear module X becomes one weight X.weight [N, K]; X.bias stays a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from polyquant.codecs.affine_reader import FLOAT_TYPES
from polyquant.codecs.dtypes import BY_NUMPY
from polyquant.errors import CodecError, InputError
from polyquant.storage import folder as folders
from polyquant.storage import strict_json
from polyquant.types import Codec, Shape

__all__ = ["Described", "Found", "Method", "Read", "fitting", "float_word", "method_of", "require", "with_older_files"]


MODELOPT = "hf_quant_config.json"


class Described(Protocol):
    """What is needed of a tensor."""

    @property
    def dtype(self) -> str:
        """safetensors' name."""

    @property
    def shape(self) -> Shape:
        """Row-major."""


Read = Callable[[str], NDArray[Any]]
"""Name of a small tensor (group indices, shapes) -> its numbers."""


@dataclass(frozen=True, slots=True)
class Found:
    """One weight. tensors: part -> name in the file. spare: further tensors that are not carried along; lost: those of them that say something."""

    name: str
    shape: Shape
    codec: Codec
    tensors: Mapping[str, str]
    spare: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class Method(Protocol):
    """What a module of this room brings."""

    def modules(self, tensors: Mapping[str, Described]) -> Iterator[str]:
        """Linear modules that are quantized, in file order."""

    def weight_of(
        self, module: str, tensors: Mapping[str, Described], said: Mapping[str, Any], read: Read
    ) -> Found | str:
        """The weight of a module; the name of its scheme where that is not decoded. said: quantization_config. Raises InputError."""


def method_of(config: Mapping[str, Any]) -> tuple[Method, Mapping[str, Any]] | None:
    """The module that reads the weights of this config.json, and what it says; None where nothing of ours is said."""
    from polyquant.formats.huggingface import awq, chatglm, compressed, fp8, gptq

    if isinstance(config.get("quantization_bit"), int) and config["quantization_bit"]:
        return chatglm, config
    said = config.get("quantization_config")
    method = said.get("quant_method") if isinstance(said, dict) else None
    known: dict[str, Method] = {
        "gptq": gptq, "awq": awq, "compressed-tensors": compressed, "fp8": fp8, "fbgemm_fp8": fp8,
    }  # fmt: skip
    return (known[method], said) if isinstance(said, dict) and isinstance(method, str) and method in known else None


def with_older_files(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """config.json as if it said what ModelOpt, and the first GPTQ and AWQ tools, put into a file of their own beside it. Raises InputError."""
    if "quantization_config" in config:
        return config
    path = folders.member(folder, MODELOPT)
    if path is not None:
        said = strict_json.typed(strict_json.read(path), dict, MODELOPT, file=path).get("quantization")
        if isinstance(said, dict):
            return {**config, "quantization_config": {"quant_method": "modelopt", **said}}
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        path = folders.member(folder, name)
        if path is not None:
            said = strict_json.typed(strict_json.read(path), dict, name, file=path)
            return {**config, "quantization_config": {"quant_method": method, **said}}
    return config


def require(module: str, part: str, tensors: Mapping[str, Described], rank: int) -> Described:
    """A tensor of a module. Raises InputError if it is not there or has another number of dimensions."""
    found = tensors.get(f"{module}.{part}")
    if found is None:
        raise InputError(
            f"quantized weight lacks {part}",
            tensor=module,
            hint="finish the download, or take the folder from its source again",
        )
    if len(found.shape) != rank or 0 in found.shape:
        raise InputError(
            f"{part} has another form",
            tensor=module,
            expected=f"{rank} dimensions, none empty",
            found=list(found.shape),
        )
    return found


def float_word(module: str, part: str, tensor: Described) -> str:
    """What a codec's name calls the dtype of scales. Raises InputError for what is no float of 16 or 32 bits."""
    words = {BY_NUMPY[dtype]: word for word, dtype in FLOAT_TYPES.items()}
    if tensor.dtype not in words:
        raise InputError(f"{part} is of another type", tensor=module, expected=", ".join(words), found=tensor.dtype)
    return words[tensor.dtype]


def fitting(
    module: str, shape: Shape, codec: Codec, tensors: Mapping[str, Described], spare: tuple[str, ...] = ()
) -> Found:
    """The weight, if every part has the dtype and shape of its spec. Raises InputError."""
    try:
        specs = codec.specs(shape)
    except CodecError as e:
        raise InputError(e.message, tensor=module, expected=e.expected, found=e.found) from None
    for part, spec in specs.items():
        tensor = tensors.get(f"{module}.{part}")
        if tensor is None:
            raise InputError(f"quantized weight lacks {part}", tensor=module, expected=", ".join(specs))
        scalar = tensor.shape == () and spec.shape == (1,)
        if (tensor.shape != spec.shape and not scalar) or tensor.dtype != BY_NUMPY[spec.dtype]:
            raise InputError(
                f"{part} does not fit the weight",
                tensor=module,
                expected=f"{BY_NUMPY[spec.dtype]} {list(spec.shape)}",
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )
    there = tuple(f"{module}.{part}" for part in spare if f"{module}.{part}" in tensors)
    return Found(f"{module}.weight", shape, codec, {part: f"{module}.{part}" for part in specs}, there)
