"""ChatGLM2, ChatGLM3 and the first GLM-4 (model_type `chatglm`): q, k and v in one matrix, gate and up in another, pairs (2i, 2i + 1) of the
first half of each head rotate. GGUF architecture `chatglm`; no row changes its place.

| config.json | usual key |
|---|---|
| num_layers | num_hidden_layers |
| ffn_hidden_size | intermediate_size |
| kv_channels | head_dim |
| multi_query_group_num | num_key_value_heads |
| layernorm_epsilon | rms_norm_eps |
| seq_length | max_position_embeddings |
| padded_vocab_size | vocab_size |
| rope_ratio | rope_theta = 10000 rope_ratio |

rope_ratio multiplies the base, as in ChatGLM3 and GLM-4 (ChatGLM2-6B-32k divides positions by it: its config.json cannot be told apart, and
llama.cpp multiplies the base for it too).
Source: configuration_chatglm.py and modeling_chatglm.py of THUDM/chatglm2-6b; llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyquant.architectures.names import Family
from polyquant.errors import InputError, UnsupportedError

__all__ = ["CHATGLM"]

_KEYS = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "multi_query_group_num": "num_key_value_heads",
    "layernorm_epsilon": "rms_norm_eps",
    "seq_length": "max_position_embeddings",
    "padded_vocab_size": "vocab_size",
}
_THETA = 10000.0
_FIXED = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "multi_query_attention": True,
    "apply_residual_connection_post_layernorm": False,
}
"""What makes a config of this type this architecture; all are said by every published config.json."""


def _reads(config: Mapping[str, Any], file: object) -> Mapping[str, Any]:
    for key, value in _FIXED.items():
        if config.get(key, value) is not value:
            raise UnsupportedError(
                f"a ChatGLM with {key} = {config[key]!r} is not known here", file=file, expected=value
            )
    ratio = config.get("rope_ratio", 1)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise InputError("rope_ratio is no number", file=file, found=repr(ratio))
    usual = {k: v for k, v in config.items() if k not in _KEYS}
    return {
        **usual,
        **{_KEYS[k]: config[k] for k in _KEYS if k in config},
        "rope_theta": _THETA * ratio,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def _writes(config: Mapping[str, Any]) -> Mapping[str, Any]:
    ratio = config["rope_theta"] / _THETA
    usual = {
        k: v
        for k, v in config.items()
        if k in ("hidden_size", "num_attention_heads", "vocab_size", "tie_word_embeddings")
    }
    return {
        **usual,
        **{key: config[name] for key, name in _KEYS.items()},
        **_FIXED,
        "rope_ratio": int(ratio) if ratio == int(ratio) else ratio,
        "original_rope": True,
    }


def _settings(tensors: frozenset[str]) -> dict[str, Any]:
    return {"add_qkv_bias": "blk.0.attn_qkv.bias" in tensors, "add_bias_linear": "blk.0.ffn_up.bias" in tensors}


CHATGLM = Family(
    architecture="chatglm",
    model_type="chatglm",
    class_name="ChatGLMForConditionalGeneration",
    blocks={
        "input_layernorm": "attn_norm",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    pairs=True,
    settings=_settings,
    top={
        "transformer.embedding.word_embeddings": "token_embd",
        "transformer.encoder.final_layernorm": "output_norm",
        "transformer.output_layer": "output",
    },
    layers="transformer.encoder.layers.",
    reads=_reads,
    writes=_writes,
)
