"""SmolLM3: Llama without RoPE in every fourth layer. Rows of q and k are stored interleaved, as in Llama.

GGUF has no key for no_rope_layers: readers assume the pattern. Source: modeling_smollm3.py of transformers; llama.cpp's
converter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyquant.architectures.hyper import MAX_LAYERS, Hyper
from polyquant.architectures.hyper_table import Key
from polyquant.architectures.keys import first_count
from polyquant.architectures.llama import LLAMA
from polyquant.architectures.parts import Attention, Layer

__all__ = ["SMOLLM3"]

_PERIOD = 4


def _usual(layers: int) -> list[int]:
    return [int((i + 1) % _PERIOD != 0) for i in range(min(layers, MAX_LAYERS))]


def _read(config: Mapping[str, Any]) -> Any:
    """Return 1 for each layer that rotates; () for the usual pattern."""
    layers, listed = first_count(config, "num_hidden_layers") or 0, config.get("no_rope_layers")
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        period = first_count(config, "no_rope_layer_interval") or _PERIOD
        listed = [int((i + 1) % period != 0) for i in range(min(layers, MAX_LAYERS))]
    return () if list(listed) == _usual(layers) else listed


def _gguf_warning(hyper: Hyper) -> str | None:
    usual = "that every fourth layer has no RoPE"
    return f"GGUF cannot express no_rope_layers: runtimes will assume {usual}" if hyper.more["rotating"] else None


SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    reads=("smollm3",),
    hyper=replace(
        LLAMA.hyper.changed(rope_theta={"default": 2000000.0}).plus(
            Key("rotating", (), default=(), kind="flags", read=_read)
        ),
        tied=True,
        written={"no_rope_layer_interval": _PERIOD, "use_sliding_window": False},
        more_config=lambda hyper: {"no_rope_layers": hyper.more["rotating"] or _usual(hyper.layers)},
        gguf_warning=_gguf_warning,
    ),
    layer=Layer(Attention(no_rope_every=_PERIOD)),
)
