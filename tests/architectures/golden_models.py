"""The golden models of tests/vectors/architectures, and comparisons with the output of the real converter.

A folder holds a Hugging Face model with random weights, golden.json (digests of the real GGUF's tensors, its metadata)
and logits.npz (of transformers).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

import polyquant
from golden import VECTORS
from polyquant.architectures.find import of_config
from polyquant.opening import open_checkpoint

ROOT = VECTORS / "architectures"
MIXED = 'base = "{codec}"\nfile_type = 38\nrules = [{{ match = "*.ffn_*_exps.weight", codec = "mxfp4" }}]\n'
NAMES = sorted(p.name for p in ROOT.iterdir() if p.is_dir())


@dataclass(frozen=True)
class Golden:
    name: str

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    @cached_property
    def said(self) -> dict:
        return json.loads((self.folder / "golden.json").read_text(encoding="utf-8"))

    @property
    def config(self) -> dict:
        return json.loads((self.folder / "config.json").read_text(encoding="utf-8"))

    @property
    def codec(self) -> str:
        """The codec of the matrices in the real converter's file, experts excluded."""
        kinds = {codec for _, codec, _ in self.said["tensors"].values()} - {"f32", "mxfp4"}
        assert len(kinds) <= 1
        return kinds.pop() if kinds else "f32"

    @property
    def layers(self) -> int:
        record = of_config(self.config)
        assert record is not None
        return record.hyper.read_config(self.config, vocab=1).layers

    def logits(self) -> dict[str, np.ndarray]:
        with np.load(self.folder / "logits.npz") as z:
            return {k: z[k] for k in z.files}

    def to_gguf(self, target: Path, *, exact: bool = False) -> Path:
        """Convert as llama.cpp's converter does (MXFP4 is kept).

        exact: without rounding (OLMo 2's F16 from F32, Falcon-H1's BF16 products).
        """
        codec = "f32" if exact and self.name in ("olmo2", "falcon_h1") else self.codec
        if any(stored == "mxfp4" for _, stored, _ in self.said["tensors"].values()):
            recipe = target.with_suffix(".toml")
            recipe.write_text(MIXED.format(codec=codec), encoding="utf-8")
            polyquant.convert(self.folder, target, to="gguf", recipe=str(recipe))
        else:
            polyquant.convert(self.folder, target, to="gguf", codec=codec)
        return target


def differences(golden: Golden, path: Path) -> list[str]:
    """Return the differences of our GGUF from llama.cpp's: names, shapes, types, bytes, metadata."""
    ours, wanted = open_checkpoint(path), golden.said
    out = [f"lacks {n}" for n in wanted["tensors"] if n not in ours] + [
        f"has {n}" for n in ours if n not in wanted["tensors"]
    ]
    for name, (shape, codec, digest) in wanted["tensors"].items():
        if name not in ours:
            continue
        weight = ours[name]
        data = b"".join(np.ascontiguousarray(part).tobytes() for part in weight.read().values())
        if list(weight.shape) != shape or weight.codec.name != codec:
            out.append(f"{name}: {list(weight.shape)} {weight.codec.name}, wanted {shape} {codec}")
        elif hashlib.sha256(data).hexdigest() != digest:
            out.append(f"{name}: other values")
    return out + _metadata_differences(ours.metadata, wanted["metadata"])


def _metadata_differences(ours, wanted: dict) -> list[str]:
    found = {}
    for key, meta in ours.items_typed():
        if key == "general.name" or key.startswith("tokenizer."):
            continue
        if meta.item is None:
            found[key] = [meta.kind.name, meta.value]
        else:
            found[key] = [f"{meta.item.name}[]", list(meta.value.tolist())]
    if "general.file_type" not in wanted:  # the real converter forgets it for GPT-NeoX
        found.pop("general.file_type", None)
    keys = sorted({*found, *wanted})
    return [f"{k}: {found.get(k)}, wanted {wanted.get(k)}" for k in keys if found.get(k) != wanted.get(k)]


def changed_tensors(golden: Golden, back: Path) -> list[str]:
    """Return tensors that differ after a GGUF round trip, except float32 matrices rounded by llama.cpp's converter."""
    ours, wanted = open_checkpoint(back), open_checkpoint(golden.folder)
    tied, record = golden.config.get("tie_word_embeddings"), of_config(golden.config)
    gone = {n for n in wanted if (tied and n == "lm_head.weight") or record.left_out(n, golden.layers)}
    out = [f"lacks {n}" for n in wanted if n not in ours and n not in gone]
    out += [f"has {n}" for n in ours if n not in wanted]
    for name in ours:
        if name not in wanted:
            continue
        a, b = ours[name].dequantize(), multiplied(golden.config, name, wanted[name].dequantize())
        rounded = wanted[name].codec.name == "f32" and a.ndim > 1
        rtol = {"f16": 2.0**-11, "bf16": 2.0**-8}.get(golden.codec, 2e-6) if rounded else 2e-6
        if a.shape != b.shape:
            out.append(f"{name}: {a.shape}, wanted {b.shape}")
        elif not np.allclose(a, b, rtol=rtol, atol=1e-7):
            out.append(f"{name}: other values, off by {np.abs(a - b).max():.3g}")
    return out


def multiplied(config: dict, name: str, values: np.ndarray) -> np.ndarray:
    """Multiply Falcon-H1's tensors with the factors of config.json, rounded to bfloat16, as GGUF stores them."""
    if config["model_type"] != "falcon_h1":
        return values
    inner, state, heads = (
        config["mamba_d_ssm"],
        config["mamba_n_groups"] * config["mamba_d_state"],
        config["mamba_n_heads"],
    )
    rows = np.repeat(np.float32(config["ssm_multipliers"]), [inner, inner, state, state, heads])[:, None]
    into, gate, down = config["attention_in_multiplier"], *config["mlp_multipliers"]
    factors = {
        "embed_tokens": [config["embedding_multiplier"]], "lm_head": [config["lm_head_multiplier"]],
        "q_proj": [into], "k_proj": [config["key_multiplier"], into], "v_proj": [into],
        "o_proj": [config["attention_out_multiplier"]],
        "in_proj": [config["ssm_in_multiplier"], rows], "out_proj": [config["ssm_out_multiplier"]], "gate_proj": [gate],
        "down_proj": [down],
    }  # fmt: skip
    for factor in (found := factors.get(name.split(".")[-2], [])):
        values = values * np.float32(factor)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32) if found else values
