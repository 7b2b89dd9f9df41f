"""Make the folders next to this file: tiny models with random weights, logits by transformers in float32.

    python make.py        torch 2.13.0 (CPU), transformers 5.23.0, safetensors

Weights are bfloat16 numbers, so that half the bytes hold them exactly. Each folder: config.json, model.safetensors,
logits.npz (tokens int64 [T], logits float32 [T, vocab]).
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

HERE = Path(__file__).parent
BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
MSCALE = {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}
CASES = {
    "llama-biases-wide-head": LlamaConfig(**BASE, head_dim=16, attention_bias=True, mlp_bias=True),
    "llama-linear": LlamaConfig(**BASE, rope_parameters=LINEAR),
    "llama-llama3-tied": LlamaConfig(**{**BASE, "tie_word_embeddings": True}, rope_parameters=LLAMA3),
    "llama-yarn": LlamaConfig(**BASE, head_dim=16, rope_parameters=YARN),
    "llama-yarn-mscale": LlamaConfig(**BASE, head_dim=16, rope_parameters=MSCALE),
    "mistral-window": MistralConfig(**{**BASE, "num_key_value_heads": 1}, head_dim=16, sliding_window=7),
    "qwen2": Qwen2Config(**{**BASE, "tie_word_embeddings": True}),
    "qwen2-windows": Qwen2Config(**BASE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3-yarn": Qwen3Config(**BASE, head_dim=16, rope_parameters={**YARN, "attention_factor": 1.25}),
}


def make(name: str, config: object, seed: int) -> None:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn_like(p) * (0.3 if p.ndim == 1 else 1.5 / p.shape[-1] ** 0.5)
            p.copy_((noise + (1.0 if "norm" in key else 0.0)).bfloat16().float())
        tokens = torch.randint(0, config.vocab_size, (1, 24))
        logits = model(tokens).logits[0]
    folder = HERE / name
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "logits.npz", tokens=tokens[0].numpy(), logits=logits.numpy())
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    for i, (name, config) in enumerate(CASES.items()):
        make(name, config, i)
