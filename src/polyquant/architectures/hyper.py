"""Hyper-parameters: one set of names inside, three spellings outside.

| here | config.json | GGUF `{arch}.` | seed's aliases in GGUF |
|---|---|---|---|
| layers | num_hidden_layers | block_count | n_layers, num_hidden_layers |
| context | max_position_embeddings | context_length | max_position_embeddings |
| hidden | hidden_size | embedding_length | n_embd, hidden_size |
| feed_forward | intermediate_size | feed_forward_length | intermediate_size |
| heads | num_attention_heads | attention.head_count | n_heads, num_attention_heads |
| kv_heads | num_key_value_heads | attention.head_count_kv | n_kv_heads, num_key_value_heads |
| head_dim | head_dim | attention.key_length | head_dim |
| rms_eps | rms_norm_eps | attention.layer_norm_rms_epsilon | rms_norm_eps |
| rope_theta | rope_theta, or inside rope_parameters | rope.freq_base | rope_theta |
| vocab | vocab_size | vocab_size, or the number of tokens, or rows of the embedding | vocab_size |

transformers before 5 writes `rope_theta`, `rope_scaling` and `torch_dtype`; from 5 on `rope_parameters` and `dtype`. Both are read, both are written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyquant.errors import InputError

__all__ = ["Hyper", "from_config", "from_metadata", "to_config"]

MAX_LAYERS = 10_000
MAX_SIZE = 1 << 24  # of any width or count; the largest known model stays a hundred times below
MAX_CONTEXT = (1 << 32) - 1

_ALIASES = {
    "block_count": ("n_layers", "num_hidden_layers"),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("n_embd", "hidden_size"),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("n_heads", "num_attention_heads"),
    "attention.head_count_kv": ("n_kv_heads", "num_key_value_heads"),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "rope.freq_base": ("rope_theta",),
    "vocab_size": ("vocab_size",),
}


@dataclass(frozen=True, slots=True)
class Hyper:
    """What every decoder of these families is made of.

    head_dim: 0 if the source does not say it (then hidden / heads). rotated: numbers of a head that turn, 0 for all. rope: the parameters
    of a scaled RoPE as config.json names them (`rope_type`, `factor`, ...), empty for plain RoPE. tied: None if the source does not say.
    windows: for each layer how many of the last positions it attends to, 0 for all; empty if no layer has a window.
    """

    layers: int
    context: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    vocab: int
    rope: Mapping[str, Any]
    tied: bool | None = None
    rotated: int = 0
    windows: tuple[int, ...] = ()

    @property
    def rotary_size(self) -> int:
        """Numbers of a head that turn."""
        return self.rotated or self.head_size

    @property
    def head_size(self) -> int:
        """Rows of one head in q, k and v."""
        return self.head_dim or self.hidden // self.heads


def _shown(value: Any) -> Any:
    """Text in quotes, so that it is not taken for a number."""
    return repr(value) if isinstance(value, str) else value


def _whole(value: Any, what: str, high: int, *, file: object, low: int = 1) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(
            f"{what} cannot be right", file=file, expected=f"a whole number from {low} to {high}", found=_shown(value)
        )
    return value


def _real(value: Any, what: str, *, file: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not 0 <= value < 1e30
    ):
        raise InputError(f"{what} cannot be right", file=file, expected="a finite positive number", found=_shown(value))
    return float(value)


def _checked(found: Mapping[str, Any], rope: Mapping[str, Any], tied: bool | None, file: object) -> Hyper:
    """Hyper from raw values by the names of config.json; None where the source is silent."""

    def size(key: str, default: int | None = None, high: int = MAX_SIZE) -> int:
        value = found.get(key)
        if value is None and default is None:
            raise InputError("the configuration is incomplete", file=file, expected=key)
        return _whole(default if value is None else value, key, high, file=file)

    heads = size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    hidden = size("hidden_size")
    head_dim = _whole(found.get("head_dim") or 0, "head_dim", MAX_SIZE, file=file, low=0)
    if heads % kv_heads:
        raise InputError(
            "key/value heads do not divide the heads", file=file, expected=f"a divisor of {heads}", found=kv_heads
        )
    if not head_dim and hidden % heads:
        raise InputError("heads do not divide hidden_size", file=file, expected=f"a divisor of {hidden}", found=heads)
    head = head_dim or hidden // heads
    rotated = _rotated(found, head, file)
    if rotated % 2:
        raise InputError("an odd number of a head's numbers cannot be rotated", file=file, found=rotated)
    theta = _real(10000.0 if found.get("rope_theta") is None else found["rope_theta"], "rope_theta", file=file)
    if not theta:
        raise InputError("rope_theta cannot be right", file=file, expected="a positive number", found=theta)
    layers = size("num_hidden_layers", high=MAX_LAYERS)
    return Hyper(
        layers=layers,
        context=size("max_position_embeddings", 2048, MAX_CONTEXT),
        hidden=hidden,
        feed_forward=size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=_real(1e-6 if found.get("rms_norm_eps") is None else found["rms_norm_eps"], "rms_norm_eps", file=file),
        rope_theta=theta,
        vocab=size("vocab_size"),
        rope=rope,
        tied=tied,
        rotated=rotated if rotated != head else 0,
        windows=_windows(found, layers, file),
    )


def _rotated(found: Mapping[str, Any], head: int, file: object) -> int:
    """How many of the `head` numbers of a head turn: said as a count (GGUF), or as a share."""
    if found.get("rope_dimensions") is not None:
        return _whole(found["rope_dimensions"], "rope.dimension_count", head, file=file)
    share = found.get("partial_rotary_factor")
    rotated = int(head * _real(1.0 if share is None else share, "partial_rotary_factor", file=file))
    return _whole(rotated, "partial_rotary_factor times head_dim", head, file=file)


def _windows(config: Mapping[str, Any], layers: int, file: object) -> tuple[int, ...]:
    """Sliding windows as transformers has them: Mistral in every layer, Qwen from max_window_layers on or where layer_types says so."""
    kind = config.get("model_type")
    if kind not in ("mistral", "qwen2", "qwen3") or (
        kind != "mistral" and config.get("use_sliding_window") is not True
    ):
        return ()
    size = config.get("sliding_window", 4096)  # the default of transformers where config.json does not name it
    if size is None:
        return ()
    window = _whole(size, "sliding_window", MAX_CONTEXT, file=file)
    types = config.get("layer_types")
    if kind == "mistral":
        return (window,) * layers
    if isinstance(types, Sequence) and not isinstance(types, str):
        if len(types) != layers or any(t not in ("full_attention", "sliding_attention") for t in types):
            raise InputError(
                "layer_types cannot be right", file=file, expected=f"one kind of attention for each of {layers} layers"
            )
        return tuple(window if t == "sliding_attention" else 0 for t in types)
    first = _whole(config.get("max_window_layers", 28), "max_window_layers", MAX_LAYERS, file=file, low=0)
    return tuple(window if i >= first else 0 for i in range(layers))


def from_config(config: Mapping[str, Any], *, vocab: int, default_theta: float = 10000.0, file: object = None) -> Hyper:
    """Hyper-parameters of a config.json. vocab: rows of the embedding, used if the file says nothing. Raises InputError."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise InputError("rope_parameters is no object", file=file, found=rope)
    if isinstance(rope.get("full_attention"), Mapping):
        rope = rope["full_attention"]
    theta = config.get("rope_theta")
    if theta is None:
        theta = rope.get("rope_theta", default_theta)
    kind = rope.get("rope_type", rope.get("type")) or "default"
    if not isinstance(kind, str):
        raise InputError("rope_type is no string", file=file, found=kind)
    scaled = {k: v for k, v in rope.items() if k not in ("rope_theta", "type", "rope_type")}
    if kind != "default":
        # The context before scaling stands inside the object, at the top, or nowhere: then the trained context is meant.
        original = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
        if kind in ("yarn", "llama3") and "original_max_position_embeddings" not in scaled and original is not None:
            scaled["original_max_position_embeddings"] = original
        scaled = {"rope_type": kind, **scaled}
        for key, value in scaled.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                _real(value, key, file=file)
    else:
        scaled = {}
    tied = config.get("tie_word_embeddings")
    given = {k: v for k, v in config.items() if v is not None or k == "sliding_window"}
    partial = config.get("partial_rotary_factor", rope.get("partial_rotary_factor"))
    found = {"vocab_size": vocab, **given, "rope_theta": theta, "partial_rotary_factor": partial}
    return _checked(found, scaled, tied if isinstance(tied, bool) else None, file)


def _lookup(metadata: Mapping[str, Any], architecture: str, key: str) -> Any:
    for name in (key, *_ALIASES.get(key, ())):
        for full in (f"{architecture}.{name}", name):
            if full in metadata:
                return metadata[full]
    return None


def from_metadata(
    metadata: Mapping[str, Any], architecture: str, *, vocab: int, tied: bool, file: object = None
) -> Hyper:
    """Hyper-parameters of a GGUF file. vocab: rows of the embedding. Raises InputError."""

    def get(key: str) -> Any:
        value = _lookup(metadata, architecture, key)
        # Some architectures store one value a layer; ours have equal layers.
        if isinstance(value, Sequence) and not isinstance(value, str) and value and all(v == value[0] for v in value):
            return value[0]
        return value

    found = {
        "num_hidden_layers": get("block_count"),
        "max_position_embeddings": get("context_length"),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "rope_dimensions": get("rope.dimension_count"),
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(get("rope.freq_base")),
        "vocab_size": get("vocab_size") or vocab,
    }
    scaling = get("rope.scaling.type") or "linear"  # files older than the key mean this
    factor = _shortest(get("rope.scaling.factor") or get("rope.scale_linear"))
    rope: dict[str, Any] = {}
    if scaling in ("linear", "yarn") and factor is not None and factor != 1.0:
        rope = {"rope_type": scaling, "factor": factor}
        if scaling == "yarn":
            more = {
                "original_max_position_embeddings": get("rope.scaling.original_context_length"),
                "extrapolation_factor": _shortest(get("rope.scaling.yarn_ext_factor")),
                "attention_factor": _shortest(get("rope.scaling.yarn_attn_factor")),
                "beta_fast": _shortest(get("rope.scaling.yarn_beta_fast")),
                "beta_slow": _shortest(get("rope.scaling.yarn_beta_slow")),
            }
            rope |= {k: v for k, v in more.items() if v is not None}
    return _checked(found, rope, tied, file)


def _shortest(value: Any) -> Any:
    """A float32 as the shortest decimal that gives it back: 1e-05, not 9.999999747378752e-06."""
    if isinstance(value, float) and math.isfinite(value):
        import numpy as np

        with np.errstate(over="ignore"):
            single = np.float32(value)
        return float(str(single)) if float(single) == value else value
    return value


def to_config(hyper: Hyper) -> dict[str, Any]:
    """The part of config.json that the hyper-parameters fill, in both spellings of transformers."""
    out: dict[str, Any] = {
        "hidden_size": hyper.hidden,
        "intermediate_size": hyper.feed_forward,
        "max_position_embeddings": hyper.context,
        "num_attention_heads": hyper.heads,
        "num_hidden_layers": hyper.layers,
        "num_key_value_heads": hyper.kv_heads,
        "head_dim": hyper.head_size,
        "rms_norm_eps": hyper.rms_eps,
        "rope_theta": hyper.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": hyper.rope_theta, **hyper.rope},
        "vocab_size": hyper.vocab,
    }
    if hyper.rope:
        out["rope_scaling"] = dict(hyper.rope)
    if hyper.tied is not None:
        out["tie_word_embeddings"] = hyper.tied
    return out
