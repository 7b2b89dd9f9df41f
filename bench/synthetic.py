"""Models of real shapes with random weights, and GGUF headers of real size, for benchmarks; streamed to disk.

python bench/synthetic.py llama-1b FOLDER      2.2 GB, bf16, one safetensors file (TinyLlama's shape)
python bench/synthetic.py bitnet-2b FOLDER     1.2 GB, packed ternary linears, bf16 embedding (shape of BitNet 2B4T)
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


BITNET_2B = {
    "architectures": ["BitNetForCausalLM"],
    "model_type": "bitnet",
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 30,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "hidden_act": "relu2",
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
}


# name: weights and bytes of a block, places of its fp16 numbers
BLOCKS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "q4_0": (32, 18, (0,)), "q5_0": (32, 22, (0,)), "q8_0": (32, 34, (0,)),
    "q2_k": (256, 84, (80, 82)), "q3_k": (256, 110, (108,)), "q4_k": (256, 144, (0, 2)), "q6_k": (256, 210, (208,)),
    "iq1_s": (256, 50, (0,)), "iq1_m": (256, 56, ()),
    "iq2_xxs": (256, 66, (0,)), "iq2_xs": (256, 74, (0,)), "iq2_s": (256, 82, (0,)),
    "iq3_xxs": (256, 98, (0,)), "iq3_s": (256, 110, (0,)), "iq4_xs": (256, 136, (0,)),
    "mxfp4": (32, 17, ()), "nvfp4": (64, 36, ()), "tq2_0": (256, 66, (64,)), "i2_s.x86": (128, 32, ()),
}  # fmt: skip


def llama_tensors(config: dict) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a Llama with this configuration."""
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


def bitnet_tensors(config: dict) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a packed BitNet with this configuration; linears are [rows / 4, K] bytes, with scales."""
    h, f = config["hidden_size"], config["intermediate_size"]
    shapes = {}
    for name, shape in llama_tensors(config).items():
        if name.endswith("proj.weight"):
            shapes[name] = (shape[0] // 4, shape[1])
            shapes[name + "_scale"] = (1,)
        elif name != "lm_head.weight":
            shapes[name] = shape
    for i in range(config["num_hidden_layers"]):
        shapes[f"model.layers.{i}.self_attn.attn_sub_norm.weight"] = (h,)
        shapes[f"model.layers.{i}.mlp.ffn_sub_norm.weight"] = (f,)
    return shapes


def write_llama(folder: Path, config: dict = LLAMA_1B, seed: int = 0) -> int:
    """Write a Hugging Face folder with bf16 weights cut from one pool of Gaussian values; returns bytes of weights."""
    rng = np.random.default_rng(seed)
    pool = (rng.standard_normal(1 << 22).astype(np.float32) * 0.02).view(np.uint32) >> 16
    shapes = {name: ("BF16", shape, pool.astype("<u2")) for name, shape in llama_tensors(config).items()}
    return write_folder(folder, config, shapes, rng)


def write_bitnet(folder: Path, config: dict = BITNET_2B, seed: int = 0) -> int:
    """Write a Hugging Face folder with packed ternary linears and scales of about 1; returns bytes of weights."""
    rng = np.random.default_rng(seed)
    floats = ((rng.standard_normal(1 << 22).astype(np.float32) * 0.02).view(np.uint32) >> 16).astype("<u2")
    one = np.full(1, 0x3F80, "<u2")
    quads = rng.choice(3, (4, 1 << 22), p=[0.25, 0.5, 0.25]).astype(np.uint8)
    packed = quads[0] | quads[1] << 2 | quads[2] << 4 | quads[3] << 6

    def values(name: str) -> tuple[str, np.ndarray]:
        if name.endswith("proj.weight"):
            return "U8", packed
        return "BF16", one if name.endswith(("_scale", "norm.weight")) else floats

    shapes = {name: (values(name)[0], shape, values(name)[1]) for name, shape in bitnet_tensors(config).items()}
    return write_folder(folder, config, shapes, rng)


def write_folder(folder: Path, config: dict, tensors: dict, rng: np.random.Generator) -> int:
    """Write a folder. tensors: name -> (dtype, shape, pool); each tensor is filled with random slices of its pool."""
    folder.mkdir(parents=True, exist_ok=True)
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, pool) in tensors.items():
        nbytes = pool.itemsize * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, shape, pool in tensors.values():
            left = int(np.prod(shape))
            while left:
                start = int(rng.integers(len(pool)))
                n = min(left, len(pool) - start)
                f.write(pool[start : start + n].tobytes())
                left -= n
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return offset


def random_blocks(name: str, weights: int) -> np.ndarray:
    """Return the blocks [count, bytes] of `weights` weights of a GGUF type: random codes, and scales near 0.01."""
    block, size, halves = BLOCKS[name]
    data = np.random.default_rng(1).integers(0, 256, (weights // block, size), np.uint8)
    if name == "mxfp4":
        data[:, 0] = 120
    for at in halves:
        data[:, at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return data


def write_large_header_gguf(path: Path, tokens: int = 150_000, merges: int = 280_000, tensors: int = 330) -> None:
    """Write a GGUF with the metadata of a large vocabulary; each tensor is one block of Q8_0."""

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


MODELS = {"llama-1b": write_llama, "bitnet-2b": write_bitnet}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in MODELS:
        sys.exit(__doc__)
    print(f"{MODELS[sys.argv[1]](Path(sys.argv[2])):,} bytes of weights")
