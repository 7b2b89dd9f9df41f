"""Hyper-parameters: what every decoder is made of, under one set of names. hyper_table.py has their spellings outside."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from polyquant.errors import InputError

__all__ = ["MAX_CONTEXT", "MAX_LAYERS", "MAX_SIZE", "Hyper", "Value", "real_number", "signed_number", "whole_number"]

MAX_LAYERS = 10_000
MAX_SIZE = 1 << 24  # of any width or count; the largest known model stays a hundred times below
MAX_CONTEXT = (1 << 32) - 1

Value: TypeAlias = int | float | str | tuple[int, ...] | tuple[float, ...]
"""Of a hyper-parameter; lists have one entry for each layer."""


@dataclass(frozen=True, slots=True)
class Hyper:
    """What every decoder of these architectures is made of.

    head_dim: 0 if the source does not say it (then hidden / heads). rotated: numbers of a head that turn, 0 for all. rope: the parameters
    of a scaled RoPE as config.json names them (`rope_type`, `factor`, ...), empty for plain RoPE. activation: of the feed-forward part, as
    config.json names it. tied: None if the source does not say. windows: for each layer how many of the last positions it attends to, 0
    for all; empty if no layer has a window. norm_eps: of RMS and layer norms. more: what only some architectures have, by the name of its row
    in their table; the rows that several share have these names:

        experts, experts_used       routed experts of a layer, and how many each token goes to
        expert_feed_forward, shared_feed_forward, shared_experts, first_dense     widths; shared experts; leading layers without experts
        gating                      1 softmax, 2 sigmoid, 3 softmax over the chosen (llama.cpp's numbers)
        expert_norm, expert_scale, expert_groups, expert_groups_used              the chosen weights sum to 1; factor; group-limited routing
        window, rope_theta_swa      of layers with a sliding window
        attention_softcap, logit_softcap, attention_scale, embedding_scale, residual_scale, logit_scale
        temperature, temperature_floor    of layers that do not rotate: queries grow by 1 + temperature ln(1 + floor((position + 1) / temperature_floor))
        unit_heads                  1 if rotated q and k are divided by their root mean square
        rotating                    for each layer 1 if it rotates q and k, 0 if not
        layer_kv_heads, layer_feed_forward    key/value heads and width of each layer, 0 where it has no attention or no feed-forward part
        recurrent                   1 for each layer with a delta rule instead of attention
        ssm_conv, ssm_inner, ssm_state, ssm_heads, ssm_groups                     state-space layers
        sliding                     1 for each layer with a sliding window, () where none has one
        head_dim_swa, full_kv_heads    heads of layers with a sliding window, where they have a width of their own; key/value heads of the others
        shared_kv_layers, double_wide  last layers that read the keys and values of earlier ones; 1 if their feed-forward part is twice as wide
        per_layer_input             numbers of a token that each layer reads beside the stream
        q_lora, kv_lora, rope_head, nope_head, value_head                         latent attention (MLA)
    """

    layers: int
    context: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    vocab: int
    rope: Mapping[str, Any]
    activation: str = "silu"
    tied: bool | None = None
    rotated: int = 0
    windows: tuple[int, ...] = ()
    more: Mapping[str, Value] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """A field, or one of `more`. Raises AttributeError."""
        return self.more[name] if name in self.more else getattr(self, name)

    def count(self, name: str) -> int:
        """A count of `more`, 0 if the architecture has none of that name."""
        found = self.more.get(name, 0)
        return found if isinstance(found, int) else 0

    def real(self, name: str, default: float) -> float:
        """A number of `more`; the default if the architecture has none of that name, or it is 0."""
        found = self.more.get(name, 0.0)
        return float(found) if isinstance(found, int | float) and found else default

    def slides(self, layer: int) -> bool:
        """True if that layer is one of those that the row `sliding` names."""
        sliding = self.more.get("sliding")
        return isinstance(sliding, tuple) and bool(sliding) and bool(sliding[layer])

    def at(self, layer: int) -> Hyper:
        """The same with the sizes of one layer, where layers of two kinds differ in them."""
        own: dict[str, Any] = (
            {"head_dim": self.count("head_dim_swa")}
            if self.slides(layer)
            else {"kv_heads": self.count("full_kv_heads")}
        )
        if self.count("double_wide") and layer >= self.layers - self.count("shared_kv_layers"):
            own["feed_forward"] = 2 * self.feed_forward
        return replace(self, **{name: size for name, size in own.items() if size})

    @property
    def rotary_size(self) -> int:
        """Numbers of a head that turn."""
        return self.rotated or self.head_size

    @property
    def head_size(self) -> int:
        """Rows of one head in q, k and v."""
        return self.head_dim or self.hidden // max(self.heads, 1)

    def attends(self, layer: int) -> bool:
        """True if that layer of a hybrid has attention."""
        counts, recurrent = self.more.get("layer_kv_heads"), self.more.get("recurrent")
        if isinstance(counts, tuple) and counts:
            return counts[layer] > 0
        return not (isinstance(recurrent, tuple) and recurrent and recurrent[layer])

    @property
    def query_width(self) -> int:
        """Rows of q: all heads."""
        return self.heads * self.head_size

    @property
    def value_width(self) -> int:
        """Rows of k, and of v: all key/value heads."""
        return self.kv_heads * self.head_size


def _shown(value: Any) -> Any:
    """Text in quotes, so that it is not taken for a number."""
    return repr(value) if isinstance(value, str) else value


def whole_number(value: Any, what: str, high: int, *, file: object, low: int = 1) -> int:
    """The value as an int from `low` to `high`. Raises InputError."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(
            f"{what} cannot be right", file=file, expected=f"a whole number from {low} to {high}", found=_shown(value)
        )
    return value


def real_number(value: Any, what: str, *, file: object) -> float:
    """The value as a finite float that is not negative. Raises InputError."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not 0 <= value < 1e30
    ):
        raise InputError(f"{what} cannot be right", file=file, expected="a finite positive number", found=_shown(value))
    return float(value)


def signed_number(value: Any, what: str, *, file: object) -> float:
    """The value as a finite float. Raises InputError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{what} cannot be right", file=file, expected="a finite number", found=_shown(value))
    return float(value)
