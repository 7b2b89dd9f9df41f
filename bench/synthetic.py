"""Models of real shape with random weights, and GGUF headers of real size, for measurements. Nothing is kept in memory whole.

python bench/synthetic.py llama-1b FOLDER      2.2 GB, bf16, one safetensors file (TinyLlama's shape)
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np

LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def llama_tensors(config: dict) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a Llama of this configuration."""
    h, f = config["hidden_size"], config["intermediate_size"]
    kv = h // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], h)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (h,),
            p + "self_attn.q_proj.weight": (h, h),
            p + "self_attn.k_proj.weight": (kv, h),
            p + "self_attn.v_proj.weight": (kv, h),
            p + "self_attn.o_proj.weight": (h, h),
            p + "post_attention_layernorm.weight": (h,),
            p + "mlp.gate_proj.weight": (f, h),
            p + "mlp.up_proj.weight": (f, h),
            p + "mlp.down_proj.weight": (h, f),
        }
    return shapes | {"model.norm.weight": (h,), "lm_head.weight": (config["vocab_size"], h)}


def write_llama(folder: Path, config: dict = LLAMA_1B, seed: int = 0) -> int:
    """A Hugging Face folder with bf16 weights cut from one pool of normal numbers; returns bytes of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    pool = (rng.standard_normal(1 << 22).astype(np.float32) * 0.02).view(np.uint32) >> 16
    pool = np.concatenate([pool, pool]).astype(np.uint16)
    shapes = llama_tensors(config)
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            left = int(np.prod(shape))
            while left:
                n = min(left, 1 << 22)
                start = int(rng.integers(1 << 22))
                f.write(pool[start : start + n].tobytes())
                left -= n
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return offset


def write_large_header_gguf(path: Path, tokens: int = 150_000, merges: int = 280_000, tensors: int = 330) -> None:
    """A GGUF whose metadata is that of a large vocabulary; each tensor is one block of Q8_0."""

    def text(s: str) -> bytes:
        raw = s.encode()
        return struct.pack("<Q", len(raw)) + raw

    keys = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    keys.append(
        text("tokenizer.ggml.tokens")
        + struct.pack("<IIQ", 9, 8, tokens)
        + b"".join(text(f"token{i:x}") for i in range(tokens))
    )
    keys.append(
        text("tokenizer.ggml.merges")
        + struct.pack("<IIQ", 9, 8, merges)
        + b"".join(text(f"a{i:x} b{i:x}") for i in range(merges))
    )
    keys.append(
        text("tokenizer.ggml.token_type") + struct.pack("<IIQ", 9, 5, tokens) + np.ones(tokens, "<i4").tobytes()
    )
    infos = [text(f"blk.{i}.w.weight") + struct.pack("<IQIQ", 1, 32, 8, 64 * i) for i in range(tensors)]
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(keys)) + b"".join(keys) + b"".join(infos)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(64 * tensors))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "llama-1b":
        sys.exit(__doc__)
    print(f"{write_llama(Path(sys.argv[2])):,} bytes of weights")
