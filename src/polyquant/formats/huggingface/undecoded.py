"""Detect unsupported quantization schemes: from config.json, or from the tensors if it has no description.

A folder with such weights can only be inspected (see `Checkpoint.undecoded`). Its tensors could otherwise be mistaken
for weights: packed integers of a different shape, 8-bit floats without their scales.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyquant.codecs.dtypes import PLAIN
from polyquant.errors import printable
from polyquant.formats.huggingface.exl3 import METHOD
from polyquant.formats.huggingface.quantized import method_of
from polyquant.formats.huggingface.scheme import Described
from polyquant.types import Undecoded

__all__ = ["declared", "find_undecoded", "suspects"]

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_EIGHT = frozenset({"F8_E4M3", "F8_E5M2"})
_CODES = frozenset({"I8", "U8", "I16", "U16", "I32", "U32"})
"""Integer types of packed codes. BOOL and 64-bit types are masks, positions and shapes."""
_KEYS = ("quantization", "quantization_config", "compression_config")
"""Keys of config.json; the first is MLX's, which repeats it as the second."""
_NESTED = 2
"""Number of nested levels of config.json that are searched: text_config, and its objects."""
_STATE = "bitsandbytes__"
_SIGNS = {
    "absmax": "bitsandbytes 4-bit",
    "SCB": "bitsandbytes int8",
    "weight_scale_2": "ModelOpt nvfp4",
    "weight_global_scale": "compressed-tensors nvfp4",
    "weight_packed": "compressed-tensors packed codes",
    "bitmask": "compressed-tensors sparse bitmask",
    "_weight_qdata": "torchao",
    "_data": "quanto",
    "qweight": "GPTQ or AWQ codes",
    "W_q": "HQQ",
}
"""Suffix of an integer tensor, or of a scale of an integer weight, that only one scheme uses -> the scheme; most
specific first.
"""
_PAIRS = (("_blocks", "_scales", "mxfp4 blocks"), (".codes", ".codebooks", "AQLM"))
"""Suffixes of codes and of their companions -> the scheme."""
_SCALES = (
    ".weight_scale_inv",
    ".weight_scale",
    ".weight_scales",
    ".scale_weight",
    ".scales",
    ".scale",
    "_scale_inv",
    "_scale",
    "_scales",
)
"""Suffix of a scale's name after the name of its weight or module."""
_OF_FLOATS = (".weight_scale", ".weight_scale_inv")
"""Suffixes of scales that make even a float weight suspect."""
_BUFFERS = re.compile(r"(attn|attention)\.(masked_)?bias$|_(ids|index|indices|mask|buckets)$")
"""Names of integer matrices that are not weights."""
_TOOLS = {
    "MLX": "dequantize it with mlx_lm.convert --dequantize, or start from the float model",
    "bitsandbytes": "load it in transformers, call model.dequantize() and save that, or start from the float model",
}
_OTHERWISE = "start from the float model, or dequantize it with the program that created it"


def find_undecoded(
    file_of: Callable[[str], Path],
    tensors: Mapping[str, Described],
    claimed: Mapping[str, object],
    left: Sequence[tuple[str, str]],
    config: Mapping[str, Any],
    folder: Path | None,
) -> tuple[Undecoded | None, frozenset[str]]:
    """Find the reason why weights cannot be used, and the undecodable tensors; None if every weight decodes.

    file_of: the file of a tensor; claimed: tensors of decoded weights; left: (module, scheme) that a reader recognises
    but cannot decode; folder: None for a single file, for which config.json is not read.
    """
    free = {n: t for n, t in tensors.items() if n not in claimed} if claimed else tensors
    guesses = suspects(free, tensors)
    name = declared(config, decoded=bool(claimed))
    if method_of(config) is not None:
        bare = (
            n for n, t in free.items() if t.dtype in _EIGHT | _CODES and len(t.shape) > 1 and not _BUFFERS.search(n)
        )
        guesses |= {n: f"{tensors[n].dtype} without a scale" for n in bare if n not in guesses}
    if not guesses and not left and name is None:
        return None, frozenset()
    module, scheme = left[0] if left else ("", name or next(iter(guesses.values())))
    own = (f"{module}.{part}" for part in ("weight_packed", "weight"))
    first = next((n for n in own if n in tensors), None) if left else next(iter(guesses), None)
    described = bool(left) or name is not None
    hint = next((h for tool, h in _TOOLS.items() if scheme.startswith(tool)), _OTHERWISE)
    if not described:
        scheme += ", not described by config.json" if folder is not None else ""
        again = (
            "open its folder, whose config.json describes"
            if folder is None
            else "copy config.json from the model's source, which describes"
        )
        hint = f"{again} how to decode such codes"  # fmt: skip
    reason = Undecoded(
        scheme,
        "HF061" if described else "HF065",
        file_of(first) if first is not None else (folder or Path()) / "config.json",
        first,
        None if first is None else f"{tensors[first].dtype} {list(tensors[first].shape)}",
        hint,
    )
    return reason, frozenset(
        n for n, t in free.items() if t.dtype in PLAIN and (n in guesses or t.dtype not in _FLOATS)
    )


# ---------------------------------------------------------------- config.json


def declared(config: Mapping[str, Any], *, decoded: bool = False) -> str | None:
    """The name of an unsupported scheme in config.json; None if there is none. decoded: some weights were decoded."""
    top = config.get("quantization_config")
    method = top.get("quant_method") if isinstance(top, dict) else None
    reader = method_of(config)
    if reader is not None:
        rotated = method == "compressed-tensors" and isinstance(top, dict) and _rotated(top)
        if rotated or decoded:
            return "compressed-tensors with transforms" if rotated else None
    for level, key, settings, inside in _descriptions(config, 0):
        if (settings is top and (method in ("bitnet", METHOD) or reader is not None)) or (
            reader is not None and settings is reader[1]
        ):
            continue
        if (name := _mlx(settings) if key == _KEYS[0] else _name(settings, inside)) is not None:
            return name + (", described below the top of config.json" if level else "")
    return None


def _descriptions(
    config: Mapping[str, Any], level: int
) -> Iterator[tuple[int, str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield (level, key, value, enclosing config) of every description of a quantization."""
    for key in _KEYS:
        if isinstance(settings := config.get(key), dict):
            yield level, key, settings, config
    if level < _NESTED:
        for key, inner in config.items():
            if isinstance(inner, dict) and key not in _KEYS:
                yield from _descriptions(inner, level + 1)


def _rotated(settings: Mapping[str, Any]) -> bool:
    """True if weights are rotated, so that the model must rotate its activations."""
    transforms = settings.get("transform_config")
    return isinstance(transforms, dict) and bool(transforms.get("config_groups"))


def _name(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """The display name of a scheme, e.g. "modelopt FP8"; None if weights are not quantized."""
    method, bits, group = settings.get("quant_method"), settings.get("bits"), settings.get("group_size")
    if method is None and (type(bits) is not int or type(group) is not int):
        return None
    if method == "modelopt" and not (settings.get("quant_algo") or settings.get("config_groups")):
        return None  # only the KV cache is quantized
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return "gpt-oss mxfp4"
    kinds = {
        "modelopt": settings.get("quant_algo"),
        "bitsandbytes": settings.get("bnb_4bit_quant_type", "4-bit") if settings.get("load_in_4bit") else "int8",
        "torchao": _torchao(settings),
        "compressed-tensors": settings.get("format"),
    }
    kind = kinds.get(method) if isinstance(method, str) else None
    words = [
        "an unnamed method" if method is None else printable(method, 40),
        *([printable(kind, 60)] if kind else []),
        *([f"{bits}-bit"] if type(bits) is int else []),
    ]
    return " ".join(words) + (f", group {group}" if type(group) is int else "")


def _mlx(settings: Mapping[str, Any]) -> str | None:
    """MLX's description: defaults, and an entry per layer that differs."""
    bits, group = settings.get("bits"), settings.get("group_size")
    if type(bits) is not int or type(group) is not int:
        return None
    others = {v["bits"] for v in settings.values() if isinstance(v, dict) and type(v.get("bits")) is int} - {bits}
    mixed = f", mixed with {', '.join(map(str, sorted(others)))}-bit" if others else ""
    return f"MLX {bits}-bit {printable(settings.get('mode') or 'affine', 20)}, group {group}{mixed}"


def _torchao(settings: Mapping[str, Any]) -> object:
    """The class name of the torchao configuration."""
    kind = settings.get("quant_type")
    inner = kind.get("default") if isinstance(kind, dict) else kind
    return inner.get("_type", "") if isinstance(inner, dict) else inner or ""


# ---------------------------------------------------------------- tensors


def suspects(free: Mapping[str, Described], tensors: Mapping[str, Described]) -> dict[str, str]:
    """Tensors that are not plain weights -> scheme, most specific first.

    free: tensors without a reader; tensors: all.
    """
    if not any(t.dtype not in _FLOATS or n.endswith(_OF_FLOATS) or _STATE in n for n, t in tensors.items()):
        return {}
    signs = []
    ranks = {word: i for i, word in enumerate(_SIGNS)}
    for name in free:
        stem, _, word = name.rpartition(".")
        if word.startswith(_STATE) and (weight := stem.removesuffix(".quant_state")) in tensors:
            signs.append((-1, weight, f"bitsandbytes {word.removeprefix(_STATE)}"))
        elif word in _SIGNS and (codes := _codes_of_sign(name, stem, tensors)) is not None:
            signs.append((ranks[word], codes, _SIGNS[word]))
        for end, other, scheme in _PAIRS:
            if name.endswith(end) and name.removesuffix(end) + other in tensors and free[name].dtype in _CODES:
                signs.append((len(ranks), name, scheme))
    schemes: dict[str, str] = {}
    for _, codes, scheme in sorted(signs, key=lambda sign: sign[0]):
        schemes.setdefault(codes, scheme)
    for name, tensor in free.items():
        if name not in schemes and (plain := _guessed(name, tensor, tensors)) is not None:
            schemes[name] = plain
    return schemes


def _codes_of_sign(name: str, stem: str, tensors: Mapping[str, Described]) -> str | None:
    """The codes tensor that a sign belongs to; None if it is not an integer tensor, since floats may have any name."""
    for codes in (name, stem, f"{stem}.weight", f"{stem}.weight_packed"):
        if codes in tensors and tensors[codes].dtype in _CODES:
            return codes
    return None


def _guessed(name: str, tensor: Described, tensors: Mapping[str, Described]) -> str | None:
    """The guessed scheme of a tensor with an unspecific name; None if it may be a plain tensor."""
    weight = name.endswith(".weight")
    if tensor.dtype in _FLOATS:
        if not weight or len(tensor.shape) < 2:
            return None
        scale = next((s for s in ("_scale_inv", "_scale") if name + s in tensors), None)
        return None if scale is None else f"floats with weight{scale}"
    if tensor.dtype not in PLAIN or _BUFFERS.search(name):
        return None
    stems = (name.removesuffix(".weight"), name)
    scale = next((add.lstrip("._") for add in _SCALES for stem in stems if stem + add in tensors), None)
    with_scale = "" if scale is None else f" with {scale}"
    if tensor.dtype in _EIGHT:
        return f"8-bit floats{with_scale}" if with_scale else None
    if weight or (with_scale and tensor.dtype in _CODES):
        return (
            ("MLX codes, " if tensor.dtype == "U32" and scale == "scales" else "integers, ") + tensor.dtype + with_scale
        )
    return None
