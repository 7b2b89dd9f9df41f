"""Rows of hyper-parameter tables that several architectures share; config.json's spellings differ, so each is a function of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import Key

__all__ = ["GATING", "expert_keys", "gating_key", "layer_norm_eps", "shared_expert_key", "silent", "sliding_window"]

GATING = {"softmax": 1, "sigmoid": 2, "softmax_after_topk": 3}
"""expert_gating_func of GGUF."""


def expert_keys(
    *count: str, used: str = "num_experts_per_tok", feed_forward: str | None = "moe_intermediate_size"
) -> tuple[Key, ...]:
    """experts, experts_used and expert_feed_forward. count: keys of config.json, all of which are written. feed_forward: None where the experts are as wide as intermediate_size says."""
    rows = (
        Key(
            "experts",
            count or ("num_experts", "num_local_experts"),
            "expert_count",
            default=0,
            low=0,
            write="where set",
        ),
        Key("experts_used", (used,), "expert_used_count", default=0, low=0, write="where set"),
    )
    if feed_forward is None:
        return rows
    return (
        *rows,
        Key("expert_feed_forward", (feed_forward,), "expert_feed_forward_length", default=0, low=0, write="where set"),
    )


def shared_expert_key(config: str) -> Key:
    """The width of the shared expert."""
    return Key(
        "shared_feed_forward", (config,), "expert_shared_feed_forward_length", default=0, low=0, write="where set"
    )


def gating_key(config: str = "scoring_func", *, default: str = "softmax") -> Key:
    """How the router's logits become weights."""

    def read(said: Mapping[str, Any]) -> int | None:
        value = said.get(config)
        return GATING.get(value) if isinstance(value, str) else None

    def say(value: Any) -> dict[str, Any]:
        return {config: next(name for name, number in GATING.items() if number == value)}

    return Key("gating", (config,), "expert_gating_func", default=GATING[default], read=read, say=say)


def layer_norm_eps(config: str, default: float | None = 1e-5) -> dict[str, Any]:
    """What `norm_eps` is in an architecture with layer norms: `USUAL.changed(norm_eps=layer_norm_eps("layer_norm_eps"))`."""
    return {"config": (config,), "gguf": "attention.layer_norm_epsilon", "default": default}


def sliding_window(config: str = "sliding_window", default: int = 0) -> Key:
    """The window of the layers that have one."""
    return Key(
        "window", (config,), "attention.sliding_window", default=default, low=0, high=(1 << 32) - 1, write="where set"
    )


def silent(*rows: Key) -> Callable[[Hyper], str | None]:
    """The sentence of `HyperTable.unsaid` about rows without a key in GGUF: which of them differ from what its readers take."""

    def unsaid(hyper: Hyper) -> str | None:
        lost = [
            f"{row.config[0]} = {row.shown(hyper.value(row.name))}"
            for row in rows
            if hyper.value(row.name) != row.default
        ]
        return f"GGUF cannot say {', '.join(lost)}: runtimes will take other values" if lost else None

    return unsaid
