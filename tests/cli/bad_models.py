"""Models that open but cannot run, or misstate their size: a table of name -> function that writes one."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import polyquant as pq
from cli.bad_inputs import GGUF, SOUND, Maker, cut, setting
from folders import safetensors_bytes
from golden import VECTORS
from polyquant.gguf_values import f32, string, u32
from polyquant.types import Kind, Meta

Tensors = dict[str, tuple[str, list[int], bytes]]
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
BITNET = VECTORS / "bitnet_gguf/hf_packed_autobitlinear"
LAYERED = VECTORS / "runtime/qwen2-windows"


def tensors(change: Callable[[Tensors], Any], source: Path = SOUND) -> Maker:
    """A sound folder with its tensors changed in place: name -> (dtype, shape, data)."""

    def make(folder: Path) -> Path:
        target = folder / "model"
        shutil.copytree(source, target)
        raw = (target / "model.safetensors").read_bytes()
        size = int.from_bytes(raw[:8], "little")
        found = {
            k: (v["dtype"], v["shape"], raw[8 + size :][slice(*v["data_offsets"])])
            for k, v in json.loads(raw[8 : 8 + size]).items()
            if k != "__metadata__"
        }
        change(found)
        (target / "model.safetensors").write_bytes(safetensors_bytes(found))
        return target

    return make


def retyped(name: str, dtype: str, size: int) -> Maker:
    """The same shape in a different dtype of `size` bytes."""

    def change(found: Tensors) -> None:
        shape = found[name][1]
        found[name] = (dtype, shape, bytes(size * int(np.prod(shape))))

    return tensors(change)


def reshaped(name: str, shape: list[int]) -> Maker:
    return tensors(lambda t: t.update({name: (t[name][0], shape, t[name][2][: 2 * int(np.prod(shape))])}))


def without(name: str) -> Maker:
    return tensors(lambda t: t.pop(name))


def folder_of(source: Path, **values: Any) -> Maker:
    """Another sound folder with settings of its config.json changed."""

    def make(folder: Path) -> Path:
        shutil.copytree(source, folder / "model")
        config = json.loads((folder / "model/config.json").read_text())
        (folder / "model/config.json").write_text(json.dumps({**config, **values}))
        return folder / "model"

    return make


def bare(folder: Path) -> Path:
    """The weights of a folder without their config.json."""
    shutil.copy(SOUND / "model.safetensors", folder)
    return folder / "model.safetensors"


def edited(change: dict[str, Any] | None = None, **options: Any) -> Maker:
    """Return a valid GGUF file with changed metadata, keys without `llama.`; values keep the type of their key."""

    def make(folder: Path) -> Path:
        said = {k if k.startswith(("general.", "tokenizer.")) else f"llama.{k}": v for k, v in (change or {}).items()}
        pq.edit(GGUF, folder / "x.gguf", set=said, **options)
        return folder / "x.gguf"

    return make


def entry(name: str, *, dims: tuple[int, ...] | None = None, type_id: int | None = None) -> Maker:
    """A sound GGUF file with the description of one tensor overwritten."""

    def make(folder: Path) -> Path:
        raw = bytearray(GGUF.read_bytes())
        at = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
        (n,) = struct.unpack_from("<I", raw, at)
        if dims is not None:
            assert len(dims) == n
            struct.pack_into(f"<{n}Q", raw, at + 4, *dims)
        if type_id is not None:
            struct.pack_into("<I", raw, at + 4 + 8 * n, type_id)
        (folder / "x.gguf").write_bytes(raw)
        return folder / "x.gguf"

    return make


def array(item: Kind, values: list[Any]) -> Meta:
    return Meta(Kind.ARRAY, values, item)


def huge(name: str, dims: tuple[int, int]) -> Maker:
    """Return a sparse GGUF file of the size that one tensor declares, contradicted by other tensors and metadata."""

    def make(folder: Path) -> Path:
        path = entry(name, dims=dims)(folder)
        with path.open("r+b") as f:
            f.truncate(path.stat().st_size + dims[0] * dims[1])
        return path

    return make


UNRUNNABLE: dict[str, Maker] = {
    "one weight file without config.json": bare,
    "architecture unknown": setting(model_type="mpt", architectures=["MptForCausalLM"]),
    "architecture a list": setting(model_type=["llama"], architectures=None),
    "architecture of the first ChatGLM": setting(model_type="chatglm", architectures=None),
    "a mixture of experts": setting(num_local_experts=8),
    "another activation": setting(hidden_act="gelu"),
    "an activation that is not a string": setting(hidden_act=["silu"]),
    "GPTQ": setting(quantization_config={"quant_method": "gptq", "bits": 4}),
    "a quantization without a method": setting(quantization_config={"bits": 4}),
    "a quantization that is not an object": setting(quantization_config="fp8"),
    "BitNet linears with norms": folder_of(BITNET,
        quantization_config={"quant_method": "bitnet", "use_rms_norm": True}),
    "layers 1e9": setting(num_hidden_layers=10**9),
    "layers 10,000": setting(num_hidden_layers=10_000),
    "one layer too many": setting(num_hidden_layers=2),
    "no layers": setting(num_hidden_layers=0),
    "layers negative": setting(num_hidden_layers=-1),
    "layers missing": setting(num_hidden_layers=None),
    "heads do not divide": setting(num_attention_heads=7, head_dim=None),
    "no heads": setting(num_attention_heads=0),
    "more groups than heads": setting(num_key_value_heads=16),
    "groups do not divide": setting(num_key_value_heads=3),
    "no groups": setting(num_key_value_heads=0),
    "head_dim 1e9": setting(head_dim=10**9),
    "head_dim 16 million": setting(head_dim=1 << 24),
    "head_dim odd": setting(head_dim=31),
    "head_dim unlike the tensors": setting(head_dim=64),
    "hidden unlike the tensors": setting(hidden_size=512),
    "hidden 16 million": setting(hidden_size=1 << 24),
    "feed forward unlike the tensors": setting(intermediate_size=255),
    "vocabulary above the embedding": setting(vocab_size=513),
    "vocabulary below the embedding": setting(vocab_size=511),
    "vocabulary 1e9": setting(vocab_size=10**9),
    "context zero": setting(max_position_embeddings=0),
    "context text": setting(max_position_embeddings="256"),
    "eps negative": setting(rms_norm_eps=-1e-5),
    "eps 1e300": setting(rms_norm_eps=1e300),
    "theta zero": setting(rope_parameters={"rope_type": "default", "rope_theta": 0}),
    "theta text": setting(rope_parameters={"rope_type": "default", "rope_theta": "1e4"}),
    "factor zero": setting(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0}),
    "factor missing": setting(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
    "factor an object": setting(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": {"a": 1}}),
    "longrope": setting(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1] * 16}),
    "rope a list": setting(rope_parameters=[1]),
    "window negative": folder_of(LAYERED, sliding_window=-5),
    "too few layer types": folder_of(LAYERED, layer_types=["full_attention"]),
    "layer types unknown": folder_of(LAYERED, layer_types=["full_attention", "linear_attention"]),
    "ChatGLM with a norm after": folder_of(VECTORS / "runtime/chatglm2", apply_residual_connection_post_layernorm=True),
    "ChatGLM with a ratio of text": folder_of(VECTORS / "runtime/chatglm2", rope_ratio="2"),
    "ChatGLM quantized its own way": folder_of(VECTORS / "runtime/chatglm2", quantization_bit=4),
    "ChatGLM with four groups": folder_of(VECTORS / "runtime/chatglm2", multi_query_group_num=4),
    "no embedding": without(EMBEDDING),
    "no matrix": without(UP),
    "no norm": without(NORM),
    "no head": setting(tie_word_embeddings=False),
    "matrix 1-D": reshaped(UP, [256]),
    "matrix 3-D": reshaped(UP, [1, 256, 256]),
    "matrix a scalar": reshaped(UP, []),
    "matrix transposed shape": reshaped(UP, [128, 512]),
    "matrix empty": reshaped(UP, [0, 256]),
    "embedding 1-D": reshaped(EMBEDDING, [256]),
    "norm 2-D": reshaped(NORM, [1, 256]),
    "norm short": reshaped(NORM, [255]),
    "matrix of int8": retyped(UP, "I8", 1),
    "matrix of int32": retyped(UP, "I32", 4),
    "matrix of bool": retyped(UP, "BOOL", 1),
    "matrix of bytes": retyped(UP, "U8", 1),
    "norm of int64": retyped(NORM, "I64", 8),
    "embedding of int16": retyped(EMBEDDING, "I16", 2),
    "matrix of an unknown dtype": retyped(UP, "F8_E8M0", 1),
    "GGUF cut in its tensors": cut(GGUF, 0.9),
    "GGUF without an architecture": edited(remove=("general.architecture",)),
    "GGUF of another architecture": edited({"general.architecture": "mamba"}),
    "GGUF whose architecture is a number": edited({"general.architecture": u32(7)}, remove=("general.architecture",)),
    "GGUF layers 1e9": edited({"block_count": 10**9}),
    "GGUF one layer too many": edited({"block_count": 2}),
    "GGUF no layers": edited({"block_count": 0}),
    "GGUF layers missing": edited(remove=("llama.block_count",)),
    "GGUF heads do not divide": edited({"attention.head_count": 7}),
    "GGUF more groups than heads": edited({"attention.head_count_kv": 16}),
    "GGUF no groups": edited({"attention.head_count_kv": 0}),
    "GGUF groups by layer": edited({"attention.head_count_kv": array(Kind.INT32, [2, 4])},
        remove=("llama.attention.head_count_kv",)),
    "GGUF head size 1e9": edited({"attention.key_length": 10**9}),
    "GGUF rotates more than a head": edited({"rope.dimension_count": 64}),
    "GGUF hidden unlike the tensors": edited({"embedding_length": 512}),
    "GGUF feed forward 4e9": edited({"feed_forward_length": 4 * 10**9}),
    "GGUF context zero": edited({"context_length": 0}),
    "GGUF theta zero": edited({"rope.freq_base": 0.0}),
    "GGUF theta NaN": edited({"rope.freq_base": math.nan}),
    "GGUF eps negative": edited({"attention.layer_norm_rms_epsilon": -1e-6}),
    "GGUF eps infinite": edited({"attention.layer_norm_rms_epsilon": math.inf}),
    "GGUF scaling unknown": edited({"rope.scaling.type": string("longrope")}),
    "GGUF scaling a number": edited({"rope.scaling.type": u32(3)}),
    "GGUF factor negative": edited({"rope.scaling.type": string("linear"), "rope.scaling.factor": f32(-4)}),
    "GGUF factor NaN": edited({"rope.scaling.type": string("yarn"), "rope.scaling.factor": f32(math.nan)}),
    "GGUF factor text": edited({"rope.scaling.type": string("yarn"), "rope.scaling.factor": string("4")}),
    "GGUF mixture of experts": edited({"expert_count": u32(8)}),
    "GGUF vocabulary unlike the embedding": edited({"vocab_size": 511}),
    "GGUF more tokens than rows": edited({"tokenizer.ggml.tokens": array(Kind.STRING, ["x"] * 600)},
        remove=("tokenizer.ggml.tokens",)),
    "GGUF matrix missing": edited(rename_tensor={"blk.0.ffn_up.weight": "blk.0.up.weight"}),
    "GGUF norm missing": edited(rename_tensor={"output_norm.weight": "norm.weight"}),
    "GGUF embedding missing": edited(rename_tensor={"token_embd.weight": "embedding.weight"}),
    "GGUF frequencies of a wrong size": edited(rename_tensor={"blk.0.attn_norm.weight": "rope_freqs.weight"}),
    "GGUF matrix of an unknown type": entry("blk.0.ffn_up.weight", type_id=9999),
    "GGUF matrix of a removed type": entry("blk.0.ffn_up.weight", type_id=4),
    "GGUF embedding of an unknown type": entry("token_embd.weight", type_id=9999),
    "GGUF norm of int32": entry("output_norm.weight", type_id=26),
    "GGUF K no multiple of the block": entry("blk.0.ffn_up.weight", dims=(250, 256)),
    "GGUF matrix of a wrong shape": entry("blk.0.ffn_up.weight", dims=(512, 128)),
    "GGUF matrix of a terabyte": huge("blk.0.ffn_up.weight", (1 << 20, 1 << 20)),
}  # fmt: skip
"""`run` gives one line and exit code 2, costs little, and does not allocate the sizes that the file declares."""
