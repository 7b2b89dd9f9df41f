"""Hyper-parameter rows shared by several architectures, as functions of their config.json key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyquant.architectures.hyper import MAX_LAYERS, MAX_SIZE, Hyper, Value
from polyquant.architectures.hyper_table import Key

__all__ = [
    "GATING",
    "always_normed",
    "constant",
    "expert_keys",
    "expert_norm_key",
    "experts_as_wide",
    "first_count",
    "four_times",
    "gating_key",
    "granite_keys",
    "group_keys",
    "layer_norm_eps",
    "never_normed",
    "no_head_dim",
    "shared_expert_key",
    "silent",
    "sliding_layers_key",
    "sliding_window",
    "softcap_key",
    "theta_of",
    "two_ropes",
]

GATING = {"softmax": 1, "sigmoid": 2, "softmax_after_topk": 3}
"""The values of expert_gating_func in GGUF."""


def expert_keys(
    *count: str, used: str = "num_experts_per_tok", feed_forward: str | None = "moe_intermediate_size"
) -> tuple[Key, ...]:
    """Return the rows experts, experts_used and expert_feed_forward.

    count: keys of config.json, all of which are written. feed_forward: None where experts are intermediate_size wide.
    """
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


def expert_norm_key(*, readers: bool = True) -> Key:
    """Return the row for whether the selected weights sum to 1, where GGUF has no key for it. readers: what readers of
    GGUF assume."""
    return Key(
        "expert_norm",
        ("norm_topk_prob",),
        default=int(readers),
        kind="flag",
        read=lambda config: config.get("norm_topk_prob", False),
    )


def always_normed(hyper: Hyper) -> str | None:
    """HyperTable.gguf_warning of an architecture with that row whose GGUF readers normalize the weights."""
    warning = "GGUF cannot express norm_topk_prob = false: runtimes will normalize the expert weights"
    return None if hyper.more["expert_norm"] else warning


def never_normed(hyper: Hyper) -> str | None:
    """HyperTable.gguf_warning of an architecture with that row whose GGUF readers do not normalize the weights."""
    warning = "GGUF cannot express norm_topk_prob = true: runtimes will not normalize the expert weights"
    return warning if hyper.more["expert_norm"] else None


def shared_expert_key(config: str) -> Key:
    """Return the row for the width of the shared expert."""
    return Key(
        "shared_feed_forward", (config,), "expert_shared_feed_forward_length", default=0, low=0, write="where set"
    )


def gating_key(config: str = "scoring_func", *, default: str = "softmax") -> Key:
    """Return the row for the router's gating function."""

    def read(settings: Mapping[str, Any]) -> int | None:
        value = settings.get(config)
        return GATING.get(value) if isinstance(value, str) else None

    def entries(value: Any) -> dict[str, Any]:
        return {config: next(name for name, number in GATING.items() if number == value)}

    return Key("gating", (config,), "expert_gating_func", default=GATING[default], read=read, entries=entries)


def layer_norm_eps(config: str, default: float | None = 1e-5) -> dict[str, Any]:
    """Return the changes of the row `norm_eps` for layer norms:
    `USUAL.changed(norm_eps=layer_norm_eps("layer_norm_eps"))`."""
    return {"config": (config,), "gguf": "attention.layer_norm_epsilon", "default": default}


def sliding_window(config: str = "sliding_window", default: int = 0) -> Key:
    """Return the row for the window of sliding-window layers."""
    return Key(
        "window", (config,), "attention.sliding_window", default=default, low=0, high=(1 << 32) - 1, write="where set",
        entries=lambda value: {config: value or None},
    )  # fmt: skip


def sliding_layers_key(period: int) -> Key:
    """Return the row of layers with a sliding window, listed in GGUF and as `layer_types` in config.json.

    Without either, the first `period` - 1 of each `period`. () in a model without windows.
    """

    def usual(layers: Any) -> list[bool]:
        count = layers if isinstance(layers, int) and 0 <= layers <= MAX_LAYERS else 0
        return [(i + 1) % period != 0 for i in range(count)]

    def read(config: Mapping[str, Any]) -> Any:
        types = config.get("layer_types")
        if config.get("sliding_window", 1) is None:
            return ()
        return (
            [t == "sliding_attention" for t in types]
            if isinstance(types, list)
            else usual(config.get("num_hidden_layers"))
        )

    def read_gguf(get: Callable[..., Any]) -> Any:
        if not get("attention.sliding_window"):
            return ()
        listed = get("attention.sliding_window_pattern", raw=True)
        return usual(get("block_count")) if listed is None else listed

    key = "attention.sliding_window_pattern"
    return Key("sliding", (), key, kind="flags", write="where set", read=read, read_gguf=read_gguf)


def theta_of(kind: str, *before: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return a reader of the RoPE base of layers of this kind. before: its keys before transformers 5."""

    def read(config: Mapping[str, Any]) -> Any:
        rope = config.get("rope_parameters")
        of_kind = rope.get(kind) if isinstance(rope, Mapping) else None
        theta = of_kind.get("rope_theta") if isinstance(of_kind, Mapping) else None
        return next((config[key] for key in before if config.get(key) is not None), None) if theta is None else theta

    return read


def two_ropes(hyper: Hyper) -> dict[str, Any]:
    """Return rope_parameters of config.json for models whose sliding-window layers have their own base, the row
    `rope_theta_swa`."""
    local = {"rope_type": "default", "rope_theta": hyper.more["rope_theta_swa"]}
    full = {"rope_type": "default", "rope_theta": hyper.rope_theta, **hyper.rope}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def softcap_key(name: str, default: float) -> Key:
    """Return the row attention_softcap or logit_softcap: c tanh(x / c), 0 for none. default: used if config.json lacks
    the key."""
    entry = "attn_logit_softcapping" if name == "attention_softcap" else "final_logit_softcapping"

    def read(config: Mapping[str, Any]) -> Any:
        return config.get(entry, default) or 0.0  # null: none

    return Key(
        name,
        (entry,),
        entry,
        default=default,
        kind="real",
        write="where set",
        read=read,
        entries=lambda v: {entry: v or None},
    )


def granite_keys() -> tuple[Key, ...]:
    """Return the rows of Granite's factors."""
    rows = (
        ("attention_scale", "attention_multiplier", "attention.scale"),
        ("embedding_scale", "embedding_multiplier", "embedding_scale"),
        ("residual_scale", "residual_multiplier", "residual_scale"),
        ("logit_scale", "logits_scaling", "logit_scale"),
    )
    return tuple(Key(name, (config,), gguf, default=1.0, kind="real", write="where set") for name, config, gguf in rows)


def no_head_dim() -> dict[str, Any]:
    """Return the changes of the row `head_dim` where it is always hidden / heads:
    `USUAL.changed(head_dim=no_head_dim())`."""
    return {"config": (), "write": "never"}


def first_count(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first of these config.json entries that is a valid count; invalid values are reported when their row
    is read."""
    values = (config.get(key) for key in keys)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v <= MAX_SIZE), None)


def four_times(own: str, *hidden: str) -> dict[str, Any]:
    """Return the changes of the row `feed_forward` where it defaults to 4 * hidden."""

    def read(config: Mapping[str, Any]) -> Any:
        width = first_count(config, *hidden)
        return config.get(own) or (4 * width if width else None)

    return {"config": (own,), "read": read}


def constant(name: str, value: Value) -> Key:
    """Return a row that no file contains and the runtime needs."""
    return Key(name, (), default=value, low=0, kind="real" if isinstance(value, float) else "count")


def experts_as_wide() -> Key:
    """Return the row expert_feed_forward, where config.json has only intermediate_size and GGUF has both."""
    return Key("expert_feed_forward", (), "expert_feed_forward_length", default="feed_forward", low=0)


def group_keys() -> tuple[Key, ...]:
    """Return the rows of DeepSeek's routing: experts are selected within the best groups; their weights may be
    normalized, and are scaled."""
    return (
        Key("expert_groups", ("n_group",), "expert_group_count", default=1),
        Key("expert_groups_used", ("topk_group",), "expert_group_used_count", default=1),
        Key("expert_scale", ("routed_scaling_factor",), "expert_weights_scale", default=1.0, kind="real"),
        Key("expert_norm", ("norm_topk_prob",), "expert_weights_norm", default=0, kind="flag", write="where set"),
        Key("shared_experts", ("n_shared_experts",), "expert_shared_count", default=0, low=0, write="where set"),
        Key("first_dense", ("first_k_dense_replace",), "leading_dense_block_count", default=0, low=0),
    )


def silent(*rows: Key) -> Callable[[Hyper], str | None]:
    """Return a `HyperTable.gguf_warning` that lists rows without a GGUF key whose values are not the defaults."""

    def gguf_warning(hyper: Hyper) -> str | None:
        lost = [
            f"{row.config[0]} = {row.shown(hyper.value(row.name))}"
            for row in rows
            if hyper.value(row.name) != row.default
        ]
        return f"GGUF cannot express {', '.join(lost)}: runtimes will use other values" if lost else None

    return gguf_warning
