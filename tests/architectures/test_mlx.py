"""Mixtures of experts from mlx-lm: the same GGUF, folder and logits as from the transformers folder."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import polyquant
from architectures.golden_models import NAMES, Golden
from architectures.mlx_folders import mlx_folder
from polyquant.architectures.find import of_config
from polyquant.errors import InputError, PolyquantError
from polyquant.opening import open_checkpoint
from polyquant.runtime.load import load

MIXTURES = [
    n for n in NAMES if (r := of_config(Golden(n).config)) is not None and r.has_experts and not n.endswith("_mxfp4")
]


def _floats(path):
    return {w.name: w.dequantize() for w in open_checkpoint(path).values()}


def _same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-6 if values.ndim == 1 else 0, err_msg=name)


@pytest.mark.parametrize("name", MIXTURES)
def test_mlx_folders_give_the_same_gguf_and_folder(name, tmp_path):
    golden = Golden(name)
    mlx = mlx_folder(golden, tmp_path / "mlx")
    assert set(open_checkpoint(mlx)) != set(open_checkpoint(golden.folder))
    for path, target in ((golden.folder, "wanted"), (mlx, "found")):
        polyquant.convert(path, tmp_path / f"{target}.gguf", to="gguf", codec="f32")
    found, wanted = (open_checkpoint(tmp_path / f"{x}.gguf") for x in ("found", "wanted"))
    _same(_floats(found.path), _floats(wanted.path))
    assert {k: v for k, v in found.metadata.items() if "name" not in k and "size_label" not in k}.keys() <= set(
        wanted.metadata
    )
    polyquant.convert(tmp_path / "wanted.gguf", tmp_path / "back", to="hf", codec="f32")
    polyquant.convert(mlx, tmp_path / "plain", to="hf", codec="f32")
    _same(_floats(tmp_path / "plain"), _floats(tmp_path / "back"))


@pytest.mark.parametrize("name", [n for n in MIXTURES if of_config(Golden(n).config).runs])
def test_mlx_folders_give_the_same_logits(name, tmp_path):
    golden = Golden(name)
    tokens = golden.logits()["tokens"].tolist()
    found = load(mlx_folder(golden, tmp_path / "mlx"), activations="float").logits(tokens)
    np.testing.assert_allclose(found, load(golden.folder, activations="float").logits(tokens), rtol=0, atol=2e-5)


def test_stacks_keep_their_layout(tmp_path):
    plan = polyquant.plan(mlx_folder(Golden("qwen3_moe"), tmp_path / "mlx"), to="gguf")
    stacks = [s for s in plan.steps if s.map.target.endswith("_exps.weight")]
    assert stacks and {s.action.name for s in stacks} == {"COPY"}


def test_experts_are_counted(tmp_path):
    folder = mlx_folder(Golden("mixtral"), tmp_path / "mlx")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_local_experts": 3}), encoding="utf-8")
    for use in (lambda: polyquant.plan(folder, to="gguf"), lambda: polyquant.plan(folder, to="hf"),
        lambda: load(folder)):  # fmt: skip
        with pytest.raises(InputError, match="number of experts differs"):
            use()


def test_two_names_of_one_tensor_are_refused(tmp_path):
    folder = mlx_folder(Golden("qwen3_moe"), tmp_path / "mlx")
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("switch_mlp.up_proj.weight"))
    for e, matrix in enumerate(tensors[name]):
        tensors[name.replace("switch_mlp", f"experts.{e}")] = matrix.copy()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match="two tensors would become"):
        polyquant.plan(folder, to="gguf")


def test_half_of_a_joined_stack_is_refused(tmp_path):
    folder = mlx_folder(Golden("gemma4"), tmp_path / "mlx")
    tensors = load_file(folder / "model.safetensors")
    del tensors[next(n for n in tensors if n.endswith("switch_glu.up_proj.weight"))]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match="the other half is missing"):
        polyquant.plan(folder, to="gguf")


def test_quantized_stacks_are_refused(tmp_path):
    folder = mlx_folder(Golden("qwen3_moe"), tmp_path / "mlx")
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if "switch_mlp" in n]:
        stem = name.removesuffix(".weight")
        experts, rows, k = tensors[name].shape
        tensors[name] = np.zeros((experts, rows, k // 8), np.uint32)
        tensors[f"{stem}.scales"] = tensors[f"{stem}.biases"] = np.ones((experts, rows, max(1, k // 64)), np.float32)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization"] = {"group_size": 64, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(PolyquantError, match="MLX 4-bit"):
        polyquant.plan(folder, to="gguf")
