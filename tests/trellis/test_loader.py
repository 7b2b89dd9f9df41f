"""The specification's loader on every dialect: values, and lazy reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from polyquant.analysis.demo import demo_model
from polyquant.errors import InputError, UnknownNameError, UnsupportedError
from polyquant.trellis.converter import convert_to_v3
from polyquant.trellis.loader import TrellisModelLoader

VECTORS = Path(__file__).parents[1] / "vectors" / "trellis"
FOLDERS = {
    "v2_cuda": ("trellis-v2", 2), "v2_exl3": ("trellis-v2", 1), "v2_odd": ("trellis-v2", 1),
    "v3_cuda_consolidated": ("trellis-v3", 2),
    "v3_migrated": ("trellis-v3", 2), "v3_seed_kn": ("trellis-v3", 2), "v3_seed_mm_headers": ("trellis-v3", 2),
    "v3_shard_writer": ("trellis-v3", 1),
}  # fmt: skip


def expected(folder, what="expected"):
    with np.load(VECTORS / f"{what}_{folder if folder in ('v2_exl3', 'v2_odd') else 'v2_cuda'}_f16.npz") as found:
        return {name: found[name].astype(np.float32) for name in found.files}


@pytest.mark.parametrize("folder", FOLDERS)
def test_layers_of_every_dialect(folder):
    form, layers = FOLDERS[folder]
    want, seen = expected(folder), 0
    with TrellisModelLoader(VECTORS / folder) as loader:
        assert (loader.format, loader.get_num_layers(), len(loader)) == (form, layers, layers)
        for layer in loader.layers:
            for name, weight in loader.load_layer(layer).items():
                n, k = weight.shape
                assert weight.indices.shape == (-(-k // 16), -(-n // 16), 32 * weight.bits)
                assert weight.su.shape == (k,) and weight.sv.shape == (n,) and weight.scales.shape[1] == n
                assert np.array_equal(weight.dequantize(), want[name])
                seen += 1
    assert seen == loader_count(folder)


def loader_count(folder):
    return TrellisModelLoader(VECTORS / folder).get_quantization_info()["weights"]


def test_repair_decodes_as_the_quantizer_intended():
    want = expected("v2_exl3", "intended")
    loader = TrellisModelLoader(VECTORS / "v2_exl3", repair=True)
    for name, weight in loader.load_layer(0).items():
        np.testing.assert_allclose(weight.dequantize(), want[name], rtol=2e-3, atol=1e-4)


def test_layers_stream_in_order():
    names = [name for layer in TrellisModelLoader(VECTORS / "v2_cuda") for name in layer]
    assert len(names) == 14
    assert [int(n.split(".")[2]) for n in names] == [0] * 7 + [1] * 7


def test_a_single_layer_is_read(monkeypatch):
    """Random access: no byte of another layer is read, and opening reads no tensor."""
    loader = TrellisModelLoader(VECTORS / "v2_cuda")
    seen = []
    weight = type(loader.checkpoint["model.layers.1.mlp.up_proj.weight"])
    read = weight.read
    monkeypatch.setattr(weight, "read", lambda self, rows=None: seen.append(self.name) or read(self, rows))
    loader.load_layer(1)
    assert len(seen) == 7 and all(".layers.1." in name for name in seen)


def test_weights_by_name_and_floats():
    loader = TrellisModelLoader(VECTORS / "v3_seed_kn")
    weight = loader.load_weight("model.layers.0.mlp.down_proj")
    assert weight.name == "model.layers.0.mlp.down_proj.weight" and weight.shape == (256, 512)
    assert loader.quantization[weight.name] == weight.bits
    assert set(loader.load_floats()) == {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    assert all(a.dtype == np.float32 for a in loader.load_floats(1).values()) and loader.load_floats(1)
    info = loader.get_quantization_info()
    stored = sum(loader.checkpoint[n].nbytes for n in loader.quantization)
    count = sum(np.prod(loader.checkpoint[n].shape) for n in loader.quantization)
    assert info["average_bits_per_weight"] == pytest.approx(8 * stored / count) and info["layers"] == 2


def test_missing_parts_are_a_one_line_error():
    loader = TrellisModelLoader(VECTORS / "v2_cuda")
    with pytest.raises(UnknownNameError, match="no layer is named '7'"):
        loader.load_layer(7)
    with pytest.raises(UnknownNameError, match=r"did you mean model\.layers\.0\.mlp\.up_proj\.weight"):
        loader.load_weight("model.layers.0.mlp.upproj.weight")
    with pytest.raises(UnsupportedError, match="not a trellis weight"):
        loader.load_weight("model.norm.weight")
    with pytest.raises(UnsupportedError, match="use load_weight"):
        loader.load_float("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(UnsupportedError, match="no trellis weights in this folder"):
        TrellisModelLoader(demo_model("llama"))
    with pytest.raises(InputError, match="cannot be opened"):
        TrellisModelLoader(VECTORS / "nothing")


def test_convert_to_v3_by_loader_and_by_path(tmp_path):
    loader = TrellisModelLoader(VECTORS / "v2_cuda")
    report = convert_to_v3(loader, output_path=tmp_path / "a", shard_size="100KB")
    assert report.format == "trellis-v3" and len(list((tmp_path / "a").glob("model-*"))) > 1
    convert_to_v3(VECTORS / "v2_cuda", tmp_path / "b", 100_000)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    want, after = expected("v2_cuda"), TrellisModelLoader(tmp_path / "a")
    assert after.get_num_layers() == 2
    for name, bits in after.quantization.items():
        assert bits == loader.quantization[name]
        assert np.array_equal(after.load_weight(name).dequantize(), want[name])


def test_the_loaders_options_apply_to_the_copy(tmp_path):
    convert_to_v3(TrellisModelLoader(VECTORS / "v2_exl3", repair=True), tmp_path / "fixed")
    want, after = expected("v2_exl3", "intended"), TrellisModelLoader(tmp_path / "fixed")
    for name in after.quantization:
        np.testing.assert_allclose(after.load_weight(name).dequantize(), want[name], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("part", ["scales", "su", "sv"])
def test_non_finite_components_are_refused(tmp_path, part):
    folder = shutil.copytree(VECTORS / "v3_seed_kn", tmp_path / "v3")
    name = "model.layers.0.mlp.up_proj.weight"
    for shard in folder.glob("model-*.safetensors"):
        tensors = load_file(shard)
        if f"{name}.{part}" in tensors:
            tensors[f"{name}.{part}"] = np.full_like(tensors[f"{name}.{part}"], np.inf)
            save_file(tensors, shard)
    loader = TrellisModelLoader(folder)
    with pytest.raises(InputError, match=f"{part} contains NaN or infinity") as caught:
        loader.load_layer(0)
    assert name in str(caught.value)
    assert loader.load_layer(1)
