"""Quantization schemes that no codec decodes: what config.json calls them, and the tensors that betray them where it says nothing.

A folder with such weights can be looked at (`Checkpoint.undecoded` says why not more). Its tensors would otherwise pass for weights: packed integers
of another shape, 8-bit floats without their scales.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
"""Integers that codes are packed into. BOOL and 64 bits are masks, positions and shapes."""
_KEYS = ("quantization", "quantization_config", "compression_config")
"""Of config.json; the first is MLX's, which repeats it as the second."""
_NESTED = 2
"""Levels of config.json below the first at which a scheme is looked for: text_config, and what that holds."""
_STATE = "bitsandbytes__"
_SIGNS = {
    "absmax": "bitsandbytes 4-bit", "SCB": "bitsandbytes int8", "weight_scale_2": "ModelOpt nvfp4", "weight_global_scale": "compressed-tensors nvfp4",
    "weight_packed": "compressed-tensors packed codes", "bitmask": "compressed-tensors sparse bitmask", "_weight_qdata": "torchao", "_data": "quanto",
    "qweight": "GPTQ or AWQ codes", "W_q": "HQQ",
}  # fmt: skip
"""Last word of the name of an integer tensor, or of a scale beside an integer weight, that one scheme alone has -> the scheme; most telling first."""
_PAIRS = (("_blocks", "_scales", "mxfp4 blocks"), (".codes", ".codebooks", "AQLM"))
"""Ends of the names of codes, and of what stands beside them -> the scheme."""
_SCALES = (
    ".weight_scale_inv", ".weight_scale", ".weight_scales", ".scale_weight", ".scales", ".scale", "_scale_inv", "_scale", "_scales",
)  # fmt: skip
"""What the name of a scale adds to that of its weight, or of its module."""
_BUFFERS = re.compile(r"(attn|attention)\.(masked_)?bias$|_(ids|index|indices|mask|buckets)$")
"""Ends of the names of integer matrices that are no weights."""
_TOOLS = {
    "MLX": "dequantize it with mlx_lm.convert --dequantize, or start from the float model",
    "bitsandbytes": "load it in transformers, call model.dequantize() and save that, or start from the float model",
}
_OTHERWISE = "start from the float model, or dequantize it with the program that made it"


def find_undecoded(
    files: Mapping[str, Path],
    tensors: Mapping[str, Described],
    claimed: Mapping[str, object],
    left: Sequence[tuple[str, str]],
    config: Mapping[str, Any],
    folder: Path | None,
) -> tuple[Undecoded | None, frozenset[str]]:
    """Why the weights cannot be used, and the tensors that are no numbers; None where every weight decodes.

    files: tensor -> its file; claimed: tensors of decoded weights; left: (module, scheme) that a decoder knows and does not decode; folder: None for
    a single file, beside which config.json is not read.
    """
    free = {n: t for n, t in tensors.items() if n not in claimed}
    found = suspects(free, tensors)
    said = declared(config, decoded=bool(claimed))
    if method_of(config) is not None:
        bare = (
            n for n, t in free.items() if t.dtype in _EIGHT | _CODES and len(t.shape) > 1 and not _BUFFERS.search(n)
        )
        found |= {n: f"{tensors[n].dtype} without a scale" for n in bare if n not in found}
    if not found and not left and said is None:
        return None, frozenset()
    module, scheme = left[0] if left else ("", said or next(iter(found.values())))
    own = (f"{module}.{part}" for part in ("weight_packed", "weight"))
    first = next((n for n in own if n in tensors), None) if left else next(iter(found), None)
    described = bool(left) or said is not None
    hint = next((h for tool, h in _TOOLS.items() if scheme.startswith(tool)), _OTHERWISE)
    if not described:
        scheme += ", not described by config.json" if folder is not None else ""
        again = (
            "open its folder, whose config.json says"
            if folder is None
            else "take config.json from the model's source again, it says"
        )
        hint = f"{again} how such codes are decoded"  # fmt: skip
    reason = Undecoded(
        scheme,
        "HF061" if described else "HF065",
        files[first] if first is not None else (folder or Path()) / "config.json",
        first,
        None if first is None else f"{tensors[first].dtype} {list(tensors[first].shape)}",
        hint,
    )
    return reason, frozenset(n for n, t in free.items() if t.dtype in PLAIN and (n in found or t.dtype not in _FLOATS))


# ---------------------------------------------------------------- what config.json says


def declared(config: Mapping[str, Any], *, decoded: bool = False) -> str | None:
    """The name of a scheme that config.json names and no module of this package decodes; None where it names none. decoded: some weights were."""
    top = config.get("quantization_config")
    method = top.get("quant_method") if isinstance(top, dict) else None
    if method_of(config) is not None:
        rotated = method == "compressed-tensors" and isinstance(top, dict) and _rotated(top)
        if rotated or decoded:
            return "compressed-tensors with transforms" if rotated else None
    for level, key, said, inside in _sayings(config, 0):
        if said is top and (method in ("bitnet", METHOD) or method_of(config) is not None):
            continue
        if (name := _mlx(said) if key == _KEYS[0] else _name(said, inside)) is not None:
            return name + (", described below the top of config.json" if level else "")
    return None


def _sayings(config: Mapping[str, Any], level: int) -> Iterator[tuple[int, str, Mapping[str, Any], Mapping[str, Any]]]:
    """(level, key, value, config that it stands in) of every description of a quantization."""
    for key in _KEYS:
        if isinstance(said := config.get(key), dict):
            yield level, key, said, config
    if level < _NESTED:
        for key, inner in config.items():
            if isinstance(inner, dict) and key not in _KEYS:
                yield from _sayings(inner, level + 1)


def _rotated(said: Mapping[str, Any]) -> bool:
    """True if weights lie rotated, and the model is to turn its activations."""
    transforms = said.get("transform_config")
    return isinstance(transforms, dict) and bool(transforms.get("config_groups"))


def _name(said: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """The scheme for people, e.g. "modelopt FP8"; None where no scheme of weights is said."""
    method, bits, group = said.get("quant_method"), said.get("bits"), said.get("group_size")
    if method is None and (type(bits) is not int or type(group) is not int):
        return None
    if method == "modelopt" and not (said.get("quant_algo") or said.get("config_groups")):
        return None  # of the cache of keys and values alone
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        return "gpt-oss mxfp4"
    kinds = {
        "modelopt": said.get("quant_algo"),
        "bitsandbytes": said.get("bnb_4bit_quant_type", "4-bit") if said.get("load_in_4bit") else "int8",
        "torchao": _torchao(said),
        "compressed-tensors": said.get("format"),
    }
    kind = kinds.get(method) if isinstance(method, str) else None
    words = [
        "an unnamed method" if method is None else printable(method, 40),
        *([printable(kind, 60)] if kind else []),
        *([f"{bits}-bit"] if type(bits) is int else []),
    ]
    return " ".join(words) + (f", group {group}" if type(group) is int else "")


def _mlx(said: Mapping[str, Any]) -> str | None:
    """MLX's description: defaults, and an entry for each layer that differs."""
    bits, group = said.get("bits"), said.get("group_size")
    if type(bits) is not int or type(group) is not int:
        return None
    others = {v["bits"] for v in said.values() if isinstance(v, dict) and type(v.get("bits")) is int} - {bits}
    mixed = f", mixed with {', '.join(map(str, sorted(others)))}-bit" if others else ""
    return f"MLX {bits}-bit {printable(said.get('mode') or 'affine', 20)}, group {group}{mixed}"


def _torchao(said: Mapping[str, Any]) -> object:
    """The class of the configuration."""
    kind = said.get("quant_type")
    inner = kind.get("default") if isinstance(kind, dict) else kind
    return inner.get("_type", "") if isinstance(inner, dict) else inner or ""


# ---------------------------------------------------------------- what the tensors show


def suspects(free: Mapping[str, Described], tensors: Mapping[str, Described]) -> dict[str, str]:
    """Tensors that are no weights by themselves -> scheme, the most telling first. free: those that no decoder claims; tensors: all of the folder."""
    signs = []
    ranks = {word: i for i, word in enumerate(_SIGNS)}
    for name in free:
        stem, _, word = name.rpartition(".")
        if word.startswith(_STATE) and (weight := stem.removesuffix(".quant_state")) in tensors:
            signs.append((-1, weight, f"bitsandbytes {word.removeprefix(_STATE)}"))
        elif word in _SIGNS and (codes := _codes_beside(name, stem, tensors)) is not None:
            signs.append((ranks[word], codes, _SIGNS[word]))
        for end, other, scheme in _PAIRS:
            if name.endswith(end) and name.removesuffix(end) + other in tensors and free[name].dtype in _CODES:
                signs.append((len(ranks), name, scheme))
    told: dict[str, str] = {}
    for _, codes, scheme in sorted(signs, key=lambda sign: sign[0]):
        told.setdefault(codes, scheme)
    for name, tensor in free.items():
        if name not in told and (plain := _without_sign(name, tensor, tensors)) is not None:
            told[name] = plain
    return told


def _codes_beside(name: str, stem: str, tensors: Mapping[str, Described]) -> str | None:
    """The tensor of the codes that a sign belongs to; None if it holds no integers: floats may have any name."""
    for codes in (name, stem, f"{stem}.weight", f"{stem}.weight_packed"):
        if codes in tensors and tensors[codes].dtype in _CODES:
            return codes
    return None


def _without_sign(name: str, tensor: Described, tensors: Mapping[str, Described]) -> str | None:
    """What a tensor whose name tells nothing is taken for; None for one that may be what it says."""
    weight = name.endswith(".weight")
    if tensor.dtype in _FLOATS:
        if not weight or len(tensor.shape) < 2:
            return None
        scale = next((s for s in ("_scale_inv", "_scale") if name + s in tensors), None)
        return None if scale is None else f"floats beside weight{scale}"
    if tensor.dtype not in PLAIN or _BUFFERS.search(name):
        return None
    stems = (name.removesuffix(".weight"), name)
    scale = next((add.lstrip("._") for add in _SCALES for stem in stems if stem + add in tensors), None)
    beside = "" if scale is None else f" beside {scale}"
    if tensor.dtype in _EIGHT:
        return f"8-bit floats{beside}" if beside else None
    if weight or (beside and tensor.dtype in _CODES):
        return ("MLX codes, " if tensor.dtype == "U32" and scale == "scales" else "integers, ") + tensor.dtype + beside
    return None
