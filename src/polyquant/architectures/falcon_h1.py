"""Falcon-H1 (TII 2025): attention and a Mamba-2 mixer in parallel in every layer.

Its multipliers (maximal update parametrization) are in config.json; GGUF holds them only folded into the weights, so
converting back yields multipliers of 1.

    h = x + attention(norm(x)) + mixer(norm(x));  y = h + D (silu(G norm(h)) * U norm(h))

The z, x, B, C and dt rows of the mixer's input have a factor each, on top of the input's own. `ffn_norm` is stored
without a suffix.
"""

from __future__ import annotations

from dataclasses import replace

from polyquant.architectures.changes import Change, Times
from polyquant.architectures.hybrid import ParallelParts
from polyquant.architectures.hyper import Hyper
from polyquant.architectures.hyper_table import USUAL, Key
from polyquant.architectures.llama import LLAMA_NAMES
from polyquant.architectures.mixer import MIXER_CHANGES, Mixer, in_pieces, mixer_exact, mixer_stems, product, ssm_keys
from polyquant.architectures.names import NameTable
from polyquant.architectures.parts import Attention, Layer
from polyquant.architectures.record import Architecture, Bias, has
from polyquant.operations import SAME, Multiply, MultiplyRows, Operation, chain
from polyquant.types import Shape

__all__ = ["FALCON_H1"]

_FACTORS = (
    "embedding_multiplier", "lm_head_multiplier", "attention_in_multiplier", "attention_out_multiplier",
    "key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip


def _mixer_input(hyper: Hyper, shape: Shape) -> Operation:
    state = hyper.count("ssm_groups") * hyper.count("ssm_state")
    sizes = (hyper.count("ssm_inner"),) * 2 + (state,) * 2 + (hyper.count("ssm_heads"),)
    factors = tuple(float(f) for f in hyper.value("ssm_multipliers"))
    common = hyper.value("ssm_in_multiplier")
    first = SAME if common == 1 else Multiply(common)
    return first if set(factors) == {1.0} else chain(first, MultiplyRows(tuple(zip(sizes, factors, strict=True))))


def _of_mlp(index: int) -> Change:
    def make(hyper: Hyper, shape: Shape) -> Operation:
        factor = hyper.value("mlp_multipliers")[index]
        return SAME if factor == 1 else Multiply(factor)

    return Change(make)


def _gguf_warning(hyper: Hyper) -> str | None:
    if hyper.value("norm_before_gate"):
        return "GGUF cannot express mamba_norm_before_gate: runtimes apply the gate first"
    if hyper.tied and hyper.value("lm_head_multiplier") != hyper.value("embedding_multiplier"):
        return "the head is tied to the embedding, and GGUF cannot store two factors: its logits are off by one"
    return None


FALCON_H1 = Architecture(
    name="falcon-h1",
    model_type="falcon_h1",
    class_name="FalconH1ForCausalLM",
    reads=("falcon_h1",),
    names=NameTable(
        {
            **{stem: name for stem, name in LLAMA_NAMES.items() if not stem.startswith(("mlp.", "post_"))},
            **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
            **mixer_stems("mamba"),
        },
        exact={**mixer_exact("mamba"), "pre_ff_layernorm.weight": "ffn_norm"},
        top={"model.embed_tokens": "token_embd", "model.final_layernorm": "output_norm", "lm_head": "output"},
    ),
    hyper=replace(
        USUAL.changed(vocab={"write": "always"}).plus(
            *ssm_keys(
                conv="mamba_d_conv",
                state="mamba_d_state",
                groups="mamba_n_groups",
                heads="mamba_n_heads",
                inner=lambda config: config.get("mamba_d_ssm") or product("mamba_expand", "hidden_size")(config),
                inner_entry="mamba_d_ssm",
            ),
            *(Key(name, (name,), kind="real", default=1.0) for name in _FACTORS),
            Key("mlp_multipliers", ("mlp_multipliers",), kind="reals", default=(1.0,) * 2),
            Key("ssm_multipliers", ("ssm_multipliers",), kind="reals", default=(1.0,) * 5),
            Key(
                "norm_before_gate",
                ("mamba_norm_before_gate",),
                kind="flag",
                default=0,
                read=lambda config: (
                    bool(config.get("mamba_norm_before_gate", True)) and bool(config.get("mamba_rms_norm"))
                ),
            ),
        ),
        always=dict.fromkeys(("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"), False),
        more_config=in_pieces("mamba_d_head", "mamba_expand"),
        gguf_warning=_gguf_warning,
    ),
    changes={
        **MIXER_CHANGES,
        "token_embd": Times("embedding_multiplier"),
        "output": Times("lm_head_multiplier"),
        "attn_q": Times("attention_in_multiplier"),
        "attn_k": Times("key_multiplier", "attention_in_multiplier"),
        "attn_v": Times("attention_in_multiplier"),
        "attn_output": Times("attention_out_multiplier"),
        "ssm_in": Change(_mixer_input),
        "ssm_out": Times("ssm_out_multiplier"),
        "ffn_gate": _of_mlp(0),
        "ffn_down": _of_mlp(1),
    },
    layer=Layer(ParallelParts(Attention(), Mixer(optional_norm=True))),
    biases=(Bias(("ssm_conv1d",), "mamba_conv_bias"),),
    switches={"mamba_rms_norm": has("ssm_norm.weight")},
)
