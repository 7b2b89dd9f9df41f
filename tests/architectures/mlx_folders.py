"""Golden folders in mlx-lm's layout, in float32: the effect of its models' `sanitize` on the tensors of transformers.

From mlx-lm d78bf58 (2026):
models/{qwen3_moe,mixtral,deepseek_v3,gpt_oss,llama4,granitemoe,lfm2_moe,qwen3_next,gemma4_text,...}.py.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from architectures.golden_models import Golden
from polyquant.opening import open_checkpoint

Tensors = dict[str, np.ndarray]
_NUMBERED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_SMALL = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "generation_config.json")
SHIFTED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "model.norm.weight",
    "q_norm.weight",
    "k_norm.weight",
)


def mlx_folder(golden: Golden, target: Path) -> Path:
    """The same model in mlx-lm's layout."""
    target.mkdir(parents=True)
    tensors = {w.name: np.asarray(w.dequantize(), np.float32) for w in open_checkpoint(golden.folder).values()}
    kind = golden.config["model_type"]
    renamed = {"gpt_oss": _gpt_oss, "llama4_text": _llama4, "gemma4_text": _gemma4}.get(kind, _stacked)(tensors)
    if kind == "deepseek_v3":
        renamed = _latent(renamed, golden.config)
    if kind in ("granitemoe", "granitemoeshared", "granitemoehybrid", "qwen3_5_moe_text"):
        renamed = _halved(renamed)
    renamed = {name: _transposed(name, value) for name, value in renamed.items()}
    if kind in ("qwen3_next", "qwen3_5_moe_text"):
        renamed = {n: v + 1 if n.endswith(SHIFTED) and v.ndim == 1 else v for n, v in renamed.items()}
    save_file({n: np.ascontiguousarray(v) for n, v in renamed.items()}, target / "model.safetensors", {"format": "mlx"})
    for name in _SMALL:
        if (golden.folder / name).exists():
            shutil.copy(golden.folder / name, target / name)
    return target


def _stacked(tensors: Tensors) -> Tensors:
    """experts.{e}.X -> switch_mlp.X; w1, w2, w3 have other names."""
    out: Tensors = {}
    stacks: dict[str, list[np.ndarray]] = {}
    ordered = sorted(tensors, key=lambda n: [int(p) if p.isdigit() else -1 for p in n.split(".")])
    for name in ordered:
        plain = re.sub(r"\b(w[123])\b", lambda m: _NUMBERED[m[1]], name)
        if (found := re.fullmatch(r"(.+)\.experts\.\d+\.(.+)", plain)) is not None:
            stacks.setdefault(f"{found[1]}.switch_mlp.{found[2]}", []).append(tensors[name])
        else:
            out[plain] = tensors[name]
    return out | {name: np.stack(each) for name, each in stacks.items()}


def _halved(tensors: Tensors) -> Tensors:
    """input_linear or gate_up_proj [experts, 2 out, in] -> gate and up."""
    out: Tensors = {}
    for name, value in tensors.items():
        path, _, last = name.removesuffix(".weight").rpartition(".")
        if value.ndim == 3 and last in ("input_linear", "gate_up_proj"):
            block = f"{path.removesuffix('.experts')}.switch_mlp"
            out[f"{block}.gate_proj.weight"], out[f"{block}.up_proj.weight"] = np.split(value, 2, axis=1)
        elif value.ndim == 3 and last in ("output_linear", "down_proj") and "switch_mlp" not in path:
            out[f"{path.removesuffix('.experts')}.switch_mlp.down_proj.weight"] = value
        else:
            out[name] = value
    return out


def _llama4(tensors: Tensors) -> Tensors:
    """[experts, in, 2 out] -> gate and up, transposed."""
    out: Tensors = {}
    for name, value in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            gate, up = np.split(value, 2, axis=-1)
            out[f"{stem}gate_proj.weight"], out[f"{stem}up_proj.weight"] = gate.swapaxes(1, 2), up.swapaxes(1, 2)
        elif name.endswith("experts.down_proj"):
            out[f"{name}.weight"] = value.swapaxes(1, 2)
        else:
            out[name] = value
    return out


def _gpt_oss(tensors: Tensors) -> Tensors:
    """Alternating columns of gate and up -> two stacks. (Its `sanitize` takes rows, as MXFP4 blocks are transposed.)"""
    out: Tensors = {}
    for name, value in tensors.items():
        stem = name.rpartition(".")[0]
        if name.endswith("gate_up_proj_bias"):
            out[f"{stem}.gate_proj.bias"], out[f"{stem}.up_proj.bias"] = value[:, ::2], value[:, 1::2]
        elif name.endswith("gate_up_proj"):
            turned = value.swapaxes(1, 2)
            out[f"{stem}.gate_proj.weight"], out[f"{stem}.up_proj.weight"] = turned[:, ::2], turned[:, 1::2]
        elif name.endswith("down_proj_bias"):
            out[f"{stem}.down_proj.bias"] = value
        elif name.endswith("experts.down_proj"):
            out[f"{name}.weight"] = value.swapaxes(1, 2)
        else:
            out[name] = value
    return out


def _gemma4(tensors: Tensors) -> Tensors:
    """experts.gate_up_proj [experts, 2 out, in] -> gate and up in switch_glu."""
    out: Tensors = {}
    for name, value in tensors.items():
        stem = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(value, 2, axis=-2)
            out[f"{stem}.switch_glu.gate_proj.weight"], out[f"{stem}.switch_glu.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            out[f"{stem}.switch_glu.down_proj.weight"] = value
        else:
            out[name] = value
    return out


def _latent(tensors: Tensors, config: dict) -> Tensors:
    """kv_b_proj -> embed_q and unembed_out, of each head."""
    out: Tensors = {}
    nope = config["qk_nope_head_dim"]
    for name, value in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            stem = name.removesuffix("kv_b_proj.weight")
            heads = value.reshape(config["num_attention_heads"], nope + config["v_head_dim"], -1)
            out[f"{stem}embed_q.weight"] = heads[:, :nope].swapaxes(-1, -2)
            out[f"{stem}unembed_out.weight"] = heads[:, nope:]
        else:
            out[name] = value
    return out


def _transposed(name: str, value: np.ndarray) -> np.ndarray:
    """[n, 1, k] -> [n, k, 1]."""
    return value.swapaxes(1, 2) if value.ndim == 3 and value.shape[1] == 1 and "conv" in name else value
