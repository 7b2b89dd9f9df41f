"""The kind of each layer of a Nemotron-H: mixer, attention, MLP or experts.

config.json has words or letters, GGUF a list of key/value heads and a list of widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyquant.architectures.hybrid import ByLayer
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.layer_kinds import ATTENTION, words
from polyquant.architectures.mixer import Mixer
from polyquant.architectures.parts import Attention, Layer, Part

__all__ = ["attending", "kinds_of_layers", "layer_entries", "one_part_layer", "widths_of_layers"]

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_WIDTHS = {"mlp": "intermediate_size", "moe": "moe_intermediate_size"}


def kinds_of_layers(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return a word per layer; None if config.json has no known list."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and set(pattern) <= set(_LETTERS):
        return tuple(_LETTERS[letter] for letter in pattern)
    return words(config, "layers_block_type", "layer_types")


def attending(config: Mapping[str, Any]) -> Sequence[bool] | None:
    """Return True for each layer with attention."""
    kinds = kinds_of_layers(config)
    return None if kinds is None else [kind in ATTENTION for kind in kinds]


def widths_of_layers(config: Mapping[str, Any]) -> list[Any] | None:
    """Return the width of the MLP or of an expert per layer, 0 for other layers."""
    kinds = kinds_of_layers(config)
    return None if kinds is None else [config.get(_WIDTHS[kind], 0) if kind in _WIDTHS else 0 for kind in kinds]


def layer_entries(hyper: Hyper) -> dict[str, Any]:
    """Return the config.json entries for the kind of each layer and the MLP width."""
    kinds, experts = [], hyper.count("expert_feed_forward")
    for heads, wide in zip(hyper.value("layer_kv_heads"), hyper.value("layer_feed_forward"), strict=True):
        part = "moe" if wide == experts else "mlp"
        kinds.append("full_attention" if heads else part if wide else "linear_attention")
    letters = {kind: letter for letter, kind in _LETTERS.items()}
    mlp = next((w for w, k in zip(hyper.value("layer_feed_forward"), kinds, strict=True) if k == "mlp"), 0)
    return {
        "layers_block_type": kinds,
        "hybrid_override_pattern": "".join(letters[kind] for kind in kinds),
        "mamba_head_dim": hyper.count("ssm_inner") // max(hyper.count("ssm_heads"), 1),
        **({"intermediate_size": mlp} if mlp else {}),
    }


def _wide(hyper: Hyper, index: int) -> int:
    width: int = hyper.value("layer_feed_forward")[index]
    return width


def _mixes(hyper: Hyper, index: int) -> int | None:
    if _wide(hyper, index):
        return None
    return 0 if hyper.attends(index) else 1


def _feeds(hyper: Hyper, index: int) -> int | None:
    return 0 if _wide(hyper, index) else None


def one_part_layer(feed_forward: Part) -> Layer:
    """Return a layer with a single part: a mixer, attention, or this one."""
    return Layer(ByLayer((Attention(rope="none"), Mixer()), _mixes), ByLayer((feed_forward,), _feeds))
