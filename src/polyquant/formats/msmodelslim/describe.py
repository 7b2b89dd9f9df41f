"""Write the description file of an msModelSlim folder: the type of every tensor, and keys about the model.

    {"model_quant_type": "W8A8", "kv_cache_type": "C8", "kv_quant_type": "C8",     v1: at the end
     "model.layers.0.self_attn.q_proj.weight": "W8A8",                             a tensor of a quantized linear layer
     "model.layers.0.self_attn.q_proj.bias": "FLOAT", ...}                         any other

Keys about the model, by dialect: v0 model_quant_type, kv_cache_type, kv_quant_type; ascendv1 these after `version`,
before `group_size` if weights have groups; v1 all of them and `metadata`, `optional`. The order does not matter to
readers; it follows the tool, which uses that of the model.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.types import TensorSpec

__all__ = ["FLOAT", "description", "model_order", "model_type"]

FLOAT = "FLOAT"
VERSION = "1.0.0"

_RANK = ("W8A16", "W8A8_DYNAMIC", "W8A8_MIX", "W8A8", "W8A8S", "W4A16", "W4A8_DYNAMIC")
"""The last of these types in a folder is that of the model. v1 does not use W4A8_DYNAMIC."""

_WORDS = {
    word: rank
    for rank, words in {
        -2: "kv_cache_scale",
        -1: "kv_cache_offset",
        0: "weight",
        1: "bias q_proj query_key_value gate_proj dense_h_to_4h",
        2: "module k_proj up_proj weight_scale",
        3: "v_proj down_proj dense_4h_to_h weight_offset",
        4: "o_proj dense weight_scale_second",
        5: "q_norm weight_offset_second",
        6: "k_norm input_scale",
        7: "input_offset",
        8: "quant_bias",
        9: "deq_scale",
        10: "embed_tokens embedding wte word_embeddings scale_bias",
        20: "self_attn self_attention attention",
        30: "mlp",
        40: "input_layernorm",
        41: "post_attention_layernorm",
        60: "norm final_layernorm ln_f",
        90: "lm_head output_layer",
    }.items()
    for word in words.split()
}
_V1_WORDS = _WORDS | {
    "quant_bias": 1,
    "input_scale": 2,
    "input_offset": 3,
    "deq_scale": 4,
    "weight_scale": 5,
    "weight_offset": 6,
    "bias": 20,
}
_V1_WORDS |= dict.fromkeys(("embed_tokens", "embedding", "wte"), 55)
_OTHER = 50
_CACHE = re.compile(r"\.kv_cache_(scale|offset)$")
_SMOOTHED = re.compile(r"\.module\.(weight|bias)$")


def model_order(names: Iterable[str], dialect: str) -> list[str]:
    """Sort tensor names as the tool does: layer by layer, and within a layer in order of computation."""
    words = _V1_WORDS if dialect == "v1" else _WORDS

    @cache
    def place(word: str) -> tuple[int, int, str]:
        number = word.isascii() and word.isdecimal() and len(word) < 10
        return (_OTHER, int(word), "") if number else (words.get(word, _OTHER), 0, word)

    def key(name: str) -> list[tuple[int, int, str]]:
        places = list(map(place, name.split(".")))
        if dialect == "v1" and _CACHE.search(name) and len(places) > 1:  # after the layers and norms of its attention
            rank, number, word = places[-2]
            places[-2] = (rank + 10, number, word)
        return places

    return sorted(names, key=key)


def model_type(tensors: Iterable[TensorSpec], dialect: str) -> str:
    """`model_quant_type`: the type with the highest rank if there are several; FLOAT if nothing is quantized."""
    words = {t.codec.word for t in tensors if isinstance(t.codec, MsModelSlim)}
    ranked = [w for w in _RANK if w in words and not (dialect == "v1" and w == "W4A8_DYNAMIC")]
    return ranked[-1] if ranked else FLOAT


def description(
    tensors: Sequence[TensorSpec],
    names: Mapping[str, TensorSpec],
    dialect: str,
    *,
    kv: bool,
    words: Mapping[str, str],
    carried: Mapping[str, Any],
) -> bytes:
    """The file's content.

    names: tensor names in file order, with the weight that each belongs to. words: types to keep of tensors of unknown
    type; carried: other keys about the model from the source.
    """
    kind = model_type(tensors, dialect)
    entries = {name: words.get(name) or _word(name, weight, kind) for name, weight in names.items()}
    cache = {"kv_cache_type": "C8", "kv_quant_type": "C8"} if kv or any(map(_CACHE.search, names)) else {}
    groups = Counter(t.codec.group for t in tensors if isinstance(t.codec, MsModelSlim) and t.codec.group)
    group = groups.most_common(1)[0][0] if groups else 0
    general: dict[str, Any] = {"model_quant_type": kind}
    known = {
        "model_quant_type",
        "kv_cache_type",
        "kv_quant_type",
        "version",
        "group_size",
        "metadata",
        "optional",
        *names,
    }
    rest = {key: value for key, value in carried.items() if key not in known}
    if dialect == "v1":
        objects = {key: carried.get(key, {}) for key in ("metadata", "optional")}
        general = {
            **cache,
            **rest,
            "version": VERSION,
            **general,
            "metadata": objects["metadata"],
            "group_size": group,
            "optional": objects["optional"],
        }
        return json.dumps({**entries, **general}, indent=4, ensure_ascii=False).encode()
    if dialect == "ascendv1":
        general = {"version": VERSION, **general, **cache, **({"group_size": group} if group else {})}
    else:
        general |= cache
    return json.dumps({**general, **rest, **entries}, indent=2, ensure_ascii=False).encode()


def _word(name: str, weight: TensorSpec, kind: str) -> str:
    if isinstance(weight.codec, MsModelSlim):
        return weight.codec.word
    if _CACHE.search(name):
        return "C8"
    return kind if _SMOOTHED.search(name) else FLOAT
