"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024) as a part of a layer (parts.py): its head sizes and which
layers use it.

The diagram is in runtime/delta_rule.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from polyquant.architectures.hyper import MAX_LAYERS, Hyper
from polyquant.architectures.hyper_table import USUAL, HyperTable, Key
from polyquant.architectures.layer_kinds import ATTENTION, words, words_of
from polyquant.architectures.mixer import product, ssm_keys
from polyquant.architectures.parts import Feed
from polyquant.errors import InputError
from polyquant.types import Shape

__all__ = ["DeltaRule", "delta_sizes", "delta_table"]


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The gated delta rule after a norm.

    tiled: value head i reads key head i % keys, and its rate and decay come from separate matrices; otherwise it reads
    key head i // (values / keys), and one matrix holds, per key head, first the rates, then the decays.
    """

    tiled: bool = False
    norm: str = "attn_norm"
    runtime: ClassVar[str] = "polyquant.runtime.delta_rule:DeltaRule"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the matrices that read the layer's input."""
        return ("attn_qkv", "attn_gate", *(("ssm_beta", "ssm_alpha") if self.tiled else ("ssm_ba",)))

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """See parts.Part.

        The output matrix reads normed and gated values; the norm is per head and shared by all heads.
        """
        return Feed(self.norm, self.inputs, "norm"), Feed("attn_qkv", ("ssm_out",), "activation")

    def shapes(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See parts.Part. Raises InputError for heads that do not divide."""
        keys, key, each, value = delta_sizes(hyper)
        hidden, heads = hyper.hidden, keys * each
        rows = (2 * keys * key + heads * value, heads * value, *((heads, heads) if self.tiled else (2 * heads,)))
        out: dict[str, Shape] = {self.norm: (hidden,)}
        out |= {stem: (n, hidden) for stem, n in zip(self.inputs, rows, strict=True)}
        return {**out, "ssm_norm": (value,), "ssm_out": (hidden, heads * value)}

    def parameters(self, hyper: Hyper, index: int) -> dict[str, Shape]:
        """See parts.Part."""
        keys, key, each, value = delta_sizes(hyper)
        heads = keys * each
        channels = 2 * keys * key + heads * value
        return {"ssm_conv1d.weight": (channels, hyper.count("ssm_conv")), "ssm_dt.bias": (heads,), "ssm_a": (heads,)}


def delta_sizes(hyper: Hyper) -> tuple[int, int, int, int]:
    """Return (key heads, key head size, value heads per key head, value head size).

    Raises InputError if the heads do not divide.
    """
    keys, values, inner = hyper.count("ssm_groups"), hyper.count("ssm_heads"), hyper.count("ssm_inner")
    if not keys or not values or values % keys or inner % values:
        raise InputError(
            "heads of the delta rule do not divide", expected=f"multiples of {keys}", found=[values, inner]
        )
    return keys, hyper.count("ssm_state"), values // keys, inner // values


def _recurrent(config: Mapping[str, Any]) -> list[bool] | None:
    """Return True for each layer with the delta rule: without a list in config.json, three of four."""
    kinds = words(config, "layer_types")
    if kinds is not None:
        return [kind not in ATTENTION for kind in kinds]
    layers, every = config.get("num_hidden_layers"), config.get("full_attention_interval", 4)
    if not isinstance(layers, int) or not isinstance(every, int) or every < 1:
        return None
    return [bool((i + 1) % every) for i in range(min(layers, MAX_LAYERS))]


def _recurrent_gguf(get: Callable[..., Any]) -> Any:
    if (listed := get("attention.recurrent_layers", raw=True)) is not None:
        return listed
    every = get("full_attention_interval") or 4
    return _recurrent({"num_hidden_layers": get("block_count"), "full_attention_interval": every})


def delta_table(*rows: Key, **changed: Mapping[str, Any]) -> HyperTable:
    """Return the usual rows with these changes, then `rows`, then the rows of the delta rule and of the layers that use
    it."""
    table = USUAL.changed(rotated={"default": 0.25, "write": "always"}, **changed).plus(
        *rows,
        *ssm_keys(
            conv="linear_conv_kernel_dim", state="linear_key_head_dim", groups="linear_num_key_heads",
            heads="linear_num_value_heads",
            inner=product("linear_num_value_heads", "linear_value_head_dim"),
        ),
        Key(
            "recurrent", ("layer_types",), "attention.recurrent_layers", kind="flags", read=_recurrent,
            read_gguf=_recurrent_gguf, each_layer=True,
            entries=lambda where: {"layer_types": words_of(where, "linear_attention", "full_attention")},
        ),
        Key("attention_interval", ("full_attention_interval",), "full_attention_interval", default=4),
    )  # fmt: skip
    return replace(table, more_config=_value_head)


def _value_head(hyper: Hyper) -> dict[str, Any]:
    return {"linear_value_head_dim": hyper.count("ssm_inner") // max(hyper.count("ssm_heads"), 1)}
