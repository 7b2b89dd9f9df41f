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
from polyquant.architectures.mlx_writing import mlx_layout
from polyquant.architectures.translate import to_hf, usual_tensors
from polyquant.errors import InputError
from polyquant.opening import open_checkpoint
from polyquant.runtime.load import load
from polyquant.types import TensorMap

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


SEPARATE = [n for n in MIXTURES if n == "gpt_oss" or any(".experts.0." in w for w in open_checkpoint(Golden(n).folder))]
LATENT = ("kv_b_proj", "embed_q", "unembed_out")


@pytest.mark.parametrize("name", SEPARATE)
def test_the_layout_for_writing_is_that_of_mlx(name, tmp_path):
    """Of transformers' folder, and of the GGUF made from it."""
    golden = Golden(name)
    floats = open_checkpoint(golden.folder)
    wanted = _floats(mlx_folder(golden, tmp_path / "mlx"))
    if name != "gpt_oss" and not any("gate_proj" in n for n in wanted):  # mlx-lm's nemotron_h.py
        wanted = {n.replace("mlp.up_proj", "mlp.fc1").replace("mlp.down_proj", "mlp.fc2"): v for n, v in wanted.items()}
    polyquant.convert(golden.folder, tmp_path / "x.gguf", to="gguf", codec="f32")
    gguf = open_checkpoint(tmp_path / "x.gguf")
    for source, maps in ((floats, usual_tensors(floats)), (gguf, to_hf(gguf).tensors)):
        found = {
            t.target: np.asarray(t.op.reference([np.asarray(source[n].dequantize(), np.float32) for n in t.sources]))
            for t in mlx_layout(maps, golden.config)
        }
        both = found.keys() | wanted.keys()
        assert found.keys() ^ wanted.keys() <= {n for n in both if any(word in n for word in LATENT)}
        for tensor in found.keys() & wanted.keys():
            assert found[tensor].shape == wanted[tensor].shape, tensor
            np.testing.assert_allclose(found[tensor], wanted[tensor], rtol=0, atol=1e-6, err_msg=tensor)
        stacks = [n for n in found if found[n].ndim == 3 and ("switch_mlp" in n or name == "gpt_oss")]
        assert stacks


def test_a_folder_with_missing_experts_keeps_its_names():
    maps = [TensorMap(f"model.layers.0.mlp.experts.{e}.up_proj.weight", (f"{e}",), (4, 8)) for e in (0, 2)]
    assert mlx_layout(maps, Golden("qwen3_moe").config) == tuple(maps)
