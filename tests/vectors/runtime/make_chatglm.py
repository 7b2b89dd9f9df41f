"""Write chatglm2/: a tiny ChatGLM2 with random weights and logits of the float64 program below.

The program follows modeling_chatglm.py of THUDM/chatglm2-6b (transformers 5 has no class for it), one head and one
position at a time so that no reshape can hide a mistake.

python make_chatglm.py        numpy 2.4, safetensors
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

FOLDER = Path(__file__).parent / "chatglm2"
V, H, F, LAYERS, HEADS, GROUPS, D, EPS, RATIO = 64, 64, 48, 2, 4, 2, 16, 1e-5, 2
CONFIG = {
    "architectures": ["ChatGLMModel"], "model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True, "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "ffn_hidden_size": F,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0, "hidden_size": H, "kv_channels": D, "layernorm_epsilon": EPS, "multi_query_attention": True,
    "multi_query_group_num": GROUPS, "num_attention_heads": HEADS, "num_layers": LAYERS, "original_rope": True,
    "padded_vocab_size": V, "post_layer_norm": True, "rmsnorm": True, "rope_ratio": RATIO, "seq_length": 64,
    "use_cache": True,
    "torch_dtype": "float16", "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip


def weights(rng):
    def normal(*shape, scale, mean=0.0):
        return (rng.standard_normal(shape) * scale + mean).astype(np.float16)

    wide = HEADS * D
    out = {
        "transformer.embedding.word_embeddings.weight": normal(V, H, scale=1.0),
        "transformer.encoder.final_layernorm.weight": normal(H, scale=0.3, mean=1.0),
        "transformer.output_layer.weight": normal(V, H, scale=0.3),
        "transformer.rotary_pos_emb.inv_freq": np.array(10000.0 ** (-np.arange(0, D // 2, 2) / (D // 2)), np.float16),
    }
    for i in range(LAYERS):
        p = f"transformer.encoder.layers.{i}."
        out |= {
            f"{p}input_layernorm.weight": normal(H, scale=0.3, mean=1.0),
            f"{p}self_attention.query_key_value.weight": normal(wide + 2 * GROUPS * D, H, scale=0.3),
            f"{p}self_attention.query_key_value.bias": normal(wide + 2 * GROUPS * D, scale=0.3),
            f"{p}self_attention.dense.weight": normal(H, wide, scale=0.2),
            f"{p}post_attention_layernorm.weight": normal(H, scale=0.3, mean=1.0),
            f"{p}mlp.dense_h_to_4h.weight": normal(2 * F, H, scale=0.3),
            f"{p}mlp.dense_4h_to_h.weight": normal(H, F, scale=0.2),
        }
    return out


def norm(x, w):
    return x / np.sqrt((x * x).mean() + EPS) * w


def turn(x, position):
    """x [D]: pairs (0, 1), (2, 3), ... of the first half, by position * base^(-2j / (D / 2))."""
    x = x.copy()
    for j in range(D // 4):
        angle = position * (10000.0 * RATIO) ** (-2 * j / (D // 2))
        a, b = x[2 * j], x[2 * j + 1]
        x[2 * j] = a * np.cos(angle) - b * np.sin(angle)
        x[2 * j + 1] = b * np.cos(angle) + a * np.sin(angle)
    return x


def logits(w, tokens):
    xs = [w["transformer.embedding.word_embeddings.weight"][t] for t in tokens]
    for i in range(LAYERS):
        p = f"transformer.encoder.layers.{i}."
        keys, values, out = [], [], []
        for position, x in enumerate(xs):
            h = norm(x, w[f"{p}input_layernorm.weight"])
            y = w[f"{p}self_attention.query_key_value.weight"] @ h + w[f"{p}self_attention.query_key_value.bias"]
            q = [turn(y[n * D : (n + 1) * D], position) for n in range(HEADS)]
            y = y[HEADS * D :]
            keys.append([turn(y[g * D : (g + 1) * D], position) for g in range(GROUPS)])
            y = y[GROUPS * D :]
            values.append([y[g * D : (g + 1) * D] for g in range(GROUPS)])
            heads = []
            for n in range(HEADS):
                g = n // (HEADS // GROUPS)
                scores = np.array([q[n] @ k[g] for k in keys]) / np.sqrt(D)
                chances = np.exp(scores - scores.max())
                chances /= chances.sum()
                heads.append(sum(c * v[g] for c, v in zip(chances, values, strict=True)))
            x = x + w[f"{p}self_attention.dense.weight"] @ np.concatenate(heads)
            h = norm(x, w[f"{p}post_attention_layernorm.weight"])
            gate, up = np.split(w[f"{p}mlp.dense_h_to_4h.weight"] @ h, 2)
            out.append(x + w[f"{p}mlp.dense_4h_to_h.weight"] @ (gate / (1 + np.exp(-gate)) * up))
        xs = out
    final = w["transformer.encoder.final_layernorm.weight"]
    return np.array([w["transformer.output_layer.weight"] @ norm(x, final) for x in xs])


if __name__ == "__main__":
    rng = np.random.default_rng(2)
    stored = weights(rng)
    tokens = rng.integers(0, V, 24)
    FOLDER.mkdir(exist_ok=True)
    save_file(stored, FOLDER / "model.safetensors", metadata={"format": "pt"})
    (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=1, sort_keys=True) + "\n")
    found = logits({k: v.astype(np.float64) for k, v in stored.items()}, tokens)
    np.savez_compressed(FOLDER / "logits.npz", tokens=tokens, logits=found.astype(np.float32))
