"""Rows of hyper-parameter tables that several architectures share; config.json's spellings differ, so each is a function of them."""

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
    "four_times",
    "gating_key",
    "granite_keys",
    "group_keys",
    "layer_norm_eps",
    "never_normed",
    "no_head_dim",
    "said_count",
    "shared_expert_key",
    "silent",
    "sliding_layers_key",
    "sliding_window",
    "softcap_key",
    "theta_of",
    "two_ropes",
]

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


def expert_norm_key(*, readers: bool = True) -> Key:
    """Whether the weights of the chosen experts sum to 1, where GGUF has no key for it: `readers` know it of the architecture."""
    return Key(
        "expert_norm", ("norm_topk_prob",), default=int(readers), kind="flag", read=lambda said: said.get("norm_topk_prob", False)
    )  # fmt: skip


def always_normed(hyper: Hyper) -> str | None:
    """HyperTable.unsaid of an architecture with that row."""
    said = "GGUF cannot say norm_topk_prob false: runtimes will norm the weights of the experts"
    return None if hyper.more["expert_norm"] else said


def never_normed(hyper: Hyper) -> str | None:
    """The same where readers do not norm them."""
    said = "GGUF cannot say norm_topk_prob true: runtimes will not norm the weights of the experts"
    return said if hyper.more["expert_norm"] else None


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
        "window", (config,), "attention.sliding_window", default=default, low=0, high=(1 << 32) - 1, write="where set",
        say=lambda value: {config: value or None},
    )  # fmt: skip


def sliding_layers_key(period: int) -> Key:
    """Which layers have the window, where GGUF lists them and config.json has `layer_types`; all but the last of each `period` where neither does. () in a model without."""

    def usual(layers: Any) -> list[bool]:
        count = layers if isinstance(layers, int) and 0 <= layers <= MAX_LAYERS else 0
        return [(i + 1) % period != 0 for i in range(count)]

    def read(said: Mapping[str, Any]) -> Any:
        types = said.get("layer_types")
        if said.get("sliding_window", 1) is None:
            return ()
        return (
            [t == "sliding_attention" for t in types]
            if isinstance(types, list)
            else usual(said.get("num_hidden_layers"))
        )

    def read_gguf(get: Callable[..., Any]) -> Any:
        if not get("attention.sliding_window"):
            return ()
        listed = get("attention.sliding_window_pattern", whole=True)
        return usual(get("block_count")) if listed is None else listed

    key = "attention.sliding_window_pattern"
    return Key("sliding", (), key, kind="flags", write="where set", read=read, read_gguf=read_gguf)


def theta_of(kind: str, *before: str) -> Callable[[Mapping[str, Any]], Any]:
    """Reads the base of RoPE of the layers of this kind. before: where it stood until transformers 5."""

    def read(config: Mapping[str, Any]) -> Any:
        rope = config.get("rope_parameters")
        of_kind = rope.get(kind) if isinstance(rope, Mapping) else None
        said = of_kind.get("rope_theta") if isinstance(of_kind, Mapping) else None
        return next((config[key] for key in before if config.get(key) is not None), None) if said is None else said

    return read


def two_ropes(hyper: Hyper) -> dict[str, Any]:
    """rope_parameters of config.json where layers with a window have a base of their own, the row `rope_theta_swa`."""
    local = {"rope_type": "default", "rope_theta": hyper.more["rope_theta_swa"]}
    full = {"rope_type": "default", "rope_theta": hyper.rope_theta, **hyper.rope}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def softcap_key(name: str, default: float) -> Key:
    """attention_softcap or logit_softcap: c tanh(x / c) of the scores or the logits, 0 for none. default: where config.json does not name it."""
    config = "attn_logit_softcapping" if name == "attention_softcap" else "final_logit_softcapping"

    def read(said: Mapping[str, Any]) -> Any:
        return said.get(config, default) or 0.0  # null: none

    return Key(
        name, (config,), config, default=default, kind="real", write="where set", read=read, say=lambda v: {config: v or None}
    )  # fmt: skip


def granite_keys() -> tuple[Key, ...]:
    """The factors of Granite."""
    rows = (
        ("attention_scale", "attention_multiplier", "attention.scale"),
        ("embedding_scale", "embedding_multiplier", "embedding_scale"),
        ("residual_scale", "residual_multiplier", "residual_scale"),
        ("logit_scale", "logits_scaling", "logit_scale"),
    )
    return tuple(Key(name, (config,), gguf, default=1.0, kind="real", write="where set") for name, config, gguf in rows)


def no_head_dim() -> dict[str, Any]:
    """What `head_dim` is in an architecture where it is always hidden / heads: `USUAL.changed(head_dim=no_head_dim())`."""
    return {"config": (), "write": "never"}


def said_count(config: Mapping[str, Any], *keys: str) -> int | None:
    """The first of these entries of config.json that is a count; what is none of them is found where the row is read."""
    values = (config.get(key) for key in keys)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v <= MAX_SIZE), None)


def four_times(own: str, *hidden: str) -> dict[str, Any]:
    """What `feed_forward` is where it is four times as wide as the model unless config.json says another width."""

    def read(config: Mapping[str, Any]) -> Any:
        width = said_count(config, *hidden)
        return config.get(own) or (4 * width if width else None)

    return {"config": (own,), "read": read}


def constant(name: str, value: Value) -> Key:
    """What no file says of this architecture, and the runtime needs."""
    return Key(name, (), default=value, low=0, kind="real" if isinstance(value, float) else "count")


def experts_as_wide() -> Key:
    """expert_feed_forward, where config.json says it as intermediate_size and GGUF says both."""
    return Key("expert_feed_forward", (), "expert_feed_forward_length", default="feed_forward", low=0)


def group_keys() -> tuple[Key, ...]:
    """DeepSeek's routing: experts are chosen within the best groups; their weights may be scaled to sum to 1, and get a factor."""
    return (
        Key("expert_groups", ("n_group",), "expert_group_count", default=1),
        Key("expert_groups_used", ("topk_group",), "expert_group_used_count", default=1),
        Key("expert_scale", ("routed_scaling_factor",), "expert_weights_scale", default=1.0, kind="real"),
        Key("expert_norm", ("norm_topk_prob",), "expert_weights_norm", default=0, kind="flag", write="where set"),
        Key("shared_experts", ("n_shared_experts",), "expert_shared_count", default=0, low=0, write="where set"),
        Key("first_dense", ("first_k_dense_replace",), "leading_dense_block_count", default=0, low=0),
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
