"""Hyper-parameters of all architectures, under common names. hyper_table.py maps them to the names used in files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from polyquant.errors import InputError

__all__ = ["MAX_CONTEXT", "MAX_LAYERS", "MAX_SIZE", "Hyper", "Value", "bounded_integer", "real_number", "signed_number"]

MAX_LAYERS = 10_000
MAX_SIZE = 1 << 24  # of any width or count; the largest known model stays a factor of 100 below
MAX_CONTEXT = (1 << 32) - 1

Value: TypeAlias = int | float | str | tuple[int, ...] | tuple[float, ...]
"""The value of a hyper-parameter; lists have one entry per layer."""


@dataclass(frozen=True, slots=True)
class Hyper:
    """The hyper-parameters of a model.

    head_dim: 0 if unspecified (then hidden / heads). rotated: rotary dimensions per head, 0 for all. rope: the
    parameters of a scaled RoPE as config.json names them (`rope_type`, `factor`, ...), empty for plain RoPE.
    activation: of the feed-forward part, as config.json names it. tied: None if unspecified. windows: per layer, how
    many of the last positions it attends to, 0 for all; empty if no layer has a window. norm_eps: of RMS and layer
    norms. more: hyper-parameters of some architectures only, by the name of their row in the table; rows shared by
    several architectures have these names:

        experts, experts_used       routed experts of a layer, and how many are selected per token
        expert_feed_forward, shared_feed_forward    widths of an expert and of the shared expert
        shared_experts, first_dense                 number of shared experts; leading layers without experts
        gating                      1 softmax, 2 sigmoid, 3 softmax over the chosen (llama.cpp's numbers)
        expert_norm, expert_scale   whether the selected weights sum to 1; their factor
        expert_groups, expert_groups_used           group-limited routing
        window, rope_theta_swa      of layers with a sliding window
        attention_softcap, logit_softcap, attention_scale, embedding_scale, residual_scale, logit_scale
        temperature, temperature_floor
            of layers without RoPE: queries are scaled by 1 + temperature ln(1 + floor((position + 1) /
            temperature_floor))
        unit_heads                  1 if rotated q and k are divided by their root mean square
        rotating                    for each layer 1 if it rotates q and k, 0 if not
        layer_kv_heads, layer_feed_forward
            key/value heads and width per layer, 0 where it has no attention or no feed-forward part
        recurrent                   1 for each layer with a delta rule instead of attention
        ssm_conv, ssm_inner, ssm_state, ssm_heads, ssm_groups                     state-space layers
        sliding                     1 for each layer with a sliding window, () where none has one
        head_dim_swa, full_kv_heads
            head size of sliding-window layers where it differs; key/value heads of the other layers
        shared_kv_layers, double_wide
            last layers that reuse the keys and values of earlier ones; 1 if their feed-forward part is twice as wide
        per_layer_input             size of the per-layer embedding of a token
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
        """Return a field, or an entry of `more`. Raises AttributeError."""
        return self.more[name] if name in self.more else getattr(self, name)

    def count(self, name: str) -> int:
        """Return an integer of `more`, 0 if absent."""
        value = self.more.get(name, 0)
        return value if isinstance(value, int) else 0

    def real(self, name: str, default: float) -> float:
        """Return a float of `more`; the default if it is absent or 0."""
        value = self.more.get(name, 0.0)
        return float(value) if isinstance(value, int | float) and value else default

    def slides(self, layer: int) -> bool:
        """True if the layer has a sliding window according to the row `sliding`."""
        sliding = self.more.get("sliding")
        return isinstance(sliding, tuple) and bool(sliding) and bool(sliding[layer])

    def at(self, layer: int) -> Hyper:
        """Return the hyper-parameters with the sizes of one layer, for models with two kinds of layers."""
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
        """Rotary dimensions per head."""
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
    """Quote strings, so that "8" is not mistaken for 8 in a message."""
    return repr(value) if isinstance(value, str) else value


def bounded_integer(value: Any, what: str, high: int, *, file: object, low: int = 1) -> int:
    """Return the value as an int from `low` to `high`. Raises InputError."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(
            f"{what} cannot be right", file=file, expected=f"an integer from {low} to {high}", found=_shown(value)
        )
    return value


def real_number(value: Any, what: str, *, file: object) -> float:
    """Return the value as a finite, non-negative float. Raises InputError."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not 0 <= value < 1e30
    ):
        raise InputError(f"{what} cannot be right", file=file, expected="a finite positive number", found=_shown(value))
    return float(value)


def signed_number(value: Any, what: str, *, file: object) -> float:
    """Return the value as a finite float. Raises InputError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{what} cannot be right", file=file, expected="a finite number", found=_shown(value))
    return float(value)
