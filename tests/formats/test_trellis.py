"""Every dialect of Trellis opens, and decodes bit for bit as the program that wrote it does."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

import polyquant
from folders import fill, specs
from format_modules import hf, trellis
from formats.trellis_folders import INDEX, TRELLIS, copy, edit_json, edit_tensor, edit_tensors
from polyquant.errors import InputError, UnknownNameError, UnsupportedError
from polyquant.testing.codecs import same_floats

EXPECTED = {"v2_exl3": "v2_exl3", "v2_odd": "v2_odd"}
FOLDERS = {  # quantized weights, float weights
    "v2_cuda": (14, 7), "v2_exl3": (4, 0), "v2_odd": (6, 0), "v3_cuda_consolidated": (14, 7), "v3_migrated": (14, 7),
    "v3_shard_writer": (7, 0), "v3_seed_kn": (14, 7), "v3_seed_mm_headers": (7, 7),
}  # fmt: skip
Q_PROJ, K_PROJ = (f"model.layers.0.self_attn.{p}_proj.weight" for p in "qk")


def golden(kind, folder):
    return np.load(TRELLIS / f"{kind}_{EXPECTED.get(folder, 'v2_cuda')}_f16.npz")


@pytest.mark.parametrize("folder", FOLDERS)
def test_decodes_like_its_writer(folder, engine):
    opened = polyquant.open(TRELLIS / folder)
    assert opened.format == ("trellis-v2" if folder.startswith("v2") else "trellis-v3")
    expected = golden("expected", folder)
    quantized = [n for n in opened if n in expected.files]
    assert (len(quantized), len(opened) - len(quantized)) == FOLDERS[folder]
    for name in quantized:
        weight, floats = opened[name], expected[name].astype(np.float32)
        assert weight.shape == floats.shape
        same_floats(weight.dequantize(), floats)
        same_floats(weight.codec.dequantize(weight.read(), weight.shape), floats)


@pytest.mark.parametrize("folder", FOLDERS)
def test_views_and_reads_are_equal(folder):
    for weight in polyquant.open(TRELLIS / folder).values():
        for part, array in weight.arrays.items():
            view = array.view()
            assert (view.shape, view.dtype) == (array.spec.shape, array.spec.dtype), part
            assert not view.flags.writeable
            assert np.array_equal(array.read(0, len(view)), view)
            assert np.array_equal(array.read(1, 3), view[1:3])


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f != "v2_odd"])
def test_repair_decodes_as_the_quantizer_intended(folder):
    repaired, expected = polyquant.open(TRELLIS / folder, repair=True), golden("intended", folder)
    names = [n for n in expected.files if n in repaired]
    assert len(names) > 1
    for name in names:
        found, meant = repaired[name].dequantize(), expected[name].astype(np.float32)
        if folder == "v2_exl3":  # sums of 128 values, added in a different order
            np.testing.assert_allclose(found, meant, rtol=2**-10, atol=2e-5)
        else:
            same_floats(found, meant)
        weight = repaired[name]
        assert np.array_equal(weight.codec.dequantize(weight.read(), weight.shape), found)
        same_floats(weight.arrays["scales"].read(1, 2), weight.parts["scales"][1:2])


def test_unnecessary_repair():
    plain, repaired = polyquant.open(TRELLIS / "v2_odd"), polyquant.open(TRELLIS / "v2_odd", repair=True)
    name = "model.layers.0.mlp.up.weight"  # one full tile of outputs, three of inputs
    assert not np.array_equal(plain[name].dequantize(), repaired[name].dequantize())
    with pytest.raises(UnsupportedError, match="Trellis folders only"):
        polyquant.open(TRELLIS / "exl3_tensors.safetensors", repair=True)


def test_repaired_weights_become_trellis_with_equal_values():
    for weight in polyquant.open(TRELLIS / "v2_exl3", repair=True).values():
        target = weight.codec.trellis(weight.shape)
        parts = target.pack(weight.codec.unpack(weight.parts, weight.shape))
        same_floats(target.dequantize(parts, weight.shape), weight.dequantize())


@pytest.mark.parametrize("folder", [f for f, (_, floats) in FOLDERS.items() if floats])
def test_float_weights_are_found_in_any_file(folder):
    opened = polyquant.open(TRELLIS / folder)
    peer = polyquant.open(TRELLIS / "v2_cuda")
    for name in ("lm_head.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"):
        assert opened[name].codec.name == "f16"
        same_floats(opened[name].dequantize(), peer[name].dequantize())


# ---------------------------------------------------------------- axes


def test_axes_of_square_weights_follow_the_rest_of_the_folder():
    """A folder in the document's schema whose tiles are [N, K]: its square weights are too."""
    opened = polyquant.open(TRELLIS / "v3_seed_mm_headers")
    assert opened[Q_PROJ].codec.name == "metal_marlin.4"
    assert any("have ambiguous axes" in note and "[N, K]" in note for note in opened.notes)


def test_axes_can_be_given():
    asked = polyquant.open(TRELLIS / "v3_migrated", axes="kn")
    assert {w.codec.name.split(".")[0] for w in asked.values()} == {"trellis", "f16"}
    other = polyquant.open(TRELLIS / "v3_migrated")
    assert not np.array_equal(asked[K_PROJ].dequantize(), other[K_PROJ].dequantize())
    with pytest.raises(UnknownNameError, match="no axes"):
        polyquant.open(TRELLIS / "v3_migrated", axes="nn")
    with pytest.raises(InputError, match="do not have these axes"):
        polyquant.open(TRELLIS / "v3_seed_kn", axes="nk")


@pytest.mark.parametrize("axes", ["kn", "nk"])
def test_axes_of_a_folder_of_squares_come_from_the_schema(axes, tmp_path):
    folder = copy("v3_seed_kn", tmp_path)

    def only_square(tensors):
        for name in [n for n in tensors if not n.startswith(Q_PROJ)]:
            del tensors[name]

    edit_tensors(folder, only_square)
    if axes == "nk":
        (folder / "quantization_config.json").unlink()
    opened = polyquant.open(folder)
    assert opened[Q_PROJ].codec.name == {"kn": "trellis.4.grid", "nk": "metal_marlin.4"}[axes]
    assert any("by the schema" in note for note in opened.notes)


# ---------------------------------------------------------------- incomplete folders, single files, metadata


def test_missing_layers_and_wrong_indexes(tmp_path):
    folder = copy("v2_cuda", tmp_path)
    (folder / "layer_0000/batch_0001.safetensors").unlink()
    (folder / "layer_0001/index.json").unlink()
    opened = polyquant.open(folder)
    assert 0 < len([n for n in opened if "layers.0" in n and "proj" in n]) < 7
    assert len([n for n in opened if "layers.1" in n and "proj" in n]) == 7


def test_shards_may_be_links_into_the_hub_cache(tmp_path):
    cache = tmp_path / "models--a--b"
    copy("v3_seed_kn", tmp_path)
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    folder = shutil.move(tmp_path / "v3_seed_kn", cache / "snapshots/1")
    for path in folder.glob("*.safetensors"):
        blob = shutil.move(path, cache / "blobs" / path.stem)
        path.symlink_to(f"../../blobs/{blob.name}")
    assert len(polyquant.open(folder)) == 21


def test_one_shard_opens_with_its_metadata():
    opened = polyquant.open(TRELLIS / "v3_shard_writer/trellis_shard_00000.safetensors")
    assert opened.format == "trellis-v3"
    assert not any("no metadata" in note for note in opened.notes)
    same_floats(opened[K_PROJ].dequantize(), golden("expected", "v2_cuda")[K_PROJ].astype(np.float32))
    with pytest.raises(InputError, match="another shard"):
        polyquant.open(TRELLIS / "v3_seed_kn/model-00001-of-00002.safetensors")


def test_a_codebook_in_the_metadata_is_used(tmp_path):
    folder = copy("v3_seed_kn", tmp_path)
    entry = {"type": "mul1", "window_bits": 12, "tile_order": "row_major"}

    def change(config):
        config["global_config"] |= {"codebook": entry, "hadamard_transform": True}
        config["tensor_metadata"][K_PROJ]["hadamard"] = [64, 1]
        config["tensor_metadata"][Q_PROJ]["codebook"] = {"type": "grid", "window_bits": 4, "tile_order": "row_major"}
        config["tensor_metadata"][Q_PROJ]["hadamard"] = [1, 1]

    edit_json(folder / "quantization_config.json", change)
    opened = polyquant.open(folder)
    names = {n: w.codec.name for n, w in opened.items()}
    assert names[Q_PROJ] == "trellis.4.grid"
    assert names[K_PROJ] == "trellis.5.mul1.12.h64x1.g2"
    assert names["model.layers.0.mlp.gate_proj.weight"] == "trellis.2.mul1.12.g2"
    # Folders written by polyquant are never repaired.
    same_floats(polyquant.open(folder, repair=True)[Q_PROJ].dequantize(), opened[Q_PROJ].dequantize())


def test_a_table_in_the_file_is_used_as_codebook(tmp_path):
    folder = copy("v3_seed_kn", tmp_path)
    grid = (np.arange(32, dtype=np.float32) - np.float32(15.5)) * np.float32(1.24371088)

    def add(tensors):
        if f"{K_PROJ}.sv" in tensors:
            tensors[f"{K_PROJ}.lut"] = grid

    edit_tensors(folder, add)
    entry = {"type": "lut", "window_bits": 5, "tile_order": "row_major"}
    edit_json(folder / "quantization_config.json", lambda c: c["tensor_metadata"][K_PROJ].update(codebook=entry))
    found = polyquant.open(folder)[K_PROJ]
    assert found.codec.name == "trellis.5.lut.5.flat"
    expected = golden("expected", "v2_cuda")[K_PROJ]  # rounded to half precision, which only the grid is
    assert np.array_equal(found.dequantize().astype(np.float16), expected)


def test_tensors_listed_in_quantization_config(tmp_path):
    """The schema of Metal Marlin under the document's file name."""
    folder = copy("v3_cuda_consolidated", tmp_path)
    edit_json(folder / "quantization_index.json", lambda c: c.update(tensors=c.pop("layers")))
    (folder / "quantization_index.json").rename(folder / "quantization_config.json")
    opened = polyquant.open(folder)
    assert opened[Q_PROJ].codec.name == "metal_marlin.4"
    same_floats(opened[Q_PROJ].dequantize(), golden("expected", "v2_cuda")[Q_PROJ].astype(np.float32))
    assert "TRL032" in {f.code for f in trellis.check(folder)}


def test_signs_in_the_documents_form_are_repaired_too(tmp_path):
    """[K, N], no codebook, signs: only Metal Marlin's Hadamard flavour makes such files."""
    marlin = polyquant.open(TRELLIS / "v2_exl3")
    polyquant.convert(TRELLIS / "v2_exl3", tmp_path / "v3", to="trellis-v3", allow_unknown=True)
    edit_json(tmp_path / "v3/quantization_config.json", lambda c: c["global_config"].pop("codebook"))

    def forget(config):
        for entry in config["tensor_metadata"].values():
            entry.pop("codebook", None)

    edit_json(tmp_path / "v3/quantization_config.json", forget)
    name = "model.layers.0.self_attn.k_proj.weight"  # not square: nothing was swapped
    same_floats(polyquant.open(tmp_path / "v3")[name].dequantize(), marlin[name].dequantize())
    mended = polyquant.open(tmp_path / "v3", repair=True)[name]
    same_floats(mended.dequantize(), polyquant.open(TRELLIS / "v2_exl3", repair=True)[name].dequantize())


def test_names_with_underscores_come_from_the_metadata(tmp_path):
    """A name may contain __."""
    folder = copy("v2_cuda", tmp_path)
    flat, odd = K_PROJ.replace(".", "__"), "model.layers.0.self__attn.k_proj.weight"
    for part in ("indices", "scales", "su", "sv"):

        def rename(tensors, part=part):
            if f"{flat}__{part}" in tensors:
                tensors[odd.replace(".", "__") + f"__{part}"] = tensors.pop(f"{flat}__{part}")

        edit_tensors(folder, rename)
    edit_json(folder / "quantization_index.json", lambda c: c["layers"][1].update(name=odd))
    edit_json(folder / "layer_0000/index.json", lambda c: c["tensors"][1].update(name=odd))
    assert odd in polyquant.open(folder)


@pytest.mark.parametrize("folder", ["v2_cuda", "v3_seed_mm_headers"])
def test_opening_reads_no_payload(folder, tmp_path, monkeypatch):
    """Opening reads headers and one byte per weight."""
    from polyquant.storage.source import Source

    def refuse(self):
        raise AssertionError("mapped while opening")

    monkeypatch.setattr(Source, "map", refuse)
    read = []
    original = Source.read_into
    monkeypatch.setattr(
        Source, "read_into", lambda self, at, out: (read.append(out.nbytes), original(self, at, out))[1]
    )
    polyquant.open(TRELLIS / folder)
    assert sum(read) < 120_000


# ---------------------------------------------------------------- EXL3 in a Hugging Face folder


def exl3_folder(path):
    """The golden EXL3 weights as a folder whose config.json declares them."""
    opened = polyquant.open(TRELLIS / "exl3_tensors.safetensors")
    layout = hf.lay_out(specs(opened), {"config.json": b"{}"})
    return fill(layout, path, opened), opened


def test_exl3_folder_is_written_and_read(tmp_path):
    folder, source = exl3_folder(tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "exl3"
    opened = polyquant.open(folder)
    assert list(opened) == list(source)
    for name, weight in opened.items():
        assert weight.codec.name == source[name].codec.name
        same_floats(weight.dequantize(), source[name].dequantize())
    assert [f.code for f in polyquant.validate(folder)] == ["HF022", "HF030"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mul1_k3.suh", lambda t: None, "lacks suh"),
        ("mul1_k3.svh", lambda t: t[:64], "svh does not fit"),
        ("mul1_k3.suh", lambda t: t.astype(np.float32), "suh does not fit"),
        ("mul1_k3.trellis", lambda t: t[..., :8], "unexpected shape"),
        ("mul1_k3.trellis", lambda t: t.view(np.uint16), "unexpected shape"),
        ("mul1_k3.trellis", lambda t: t[:2], "multiples of 128"),
    ],
)
def test_bad_exl3(name, change, message, tmp_path):
    folder, _ = exl3_folder(tmp_path / "x")
    edit_tensor(folder, name, change)
    with pytest.raises(InputError, match=message) as e:
        polyquant.open(folder)
    assert "mul1_k3" in str(e.value)
    assert [f.code for f in hf.check(folder) if f.code == "HF062"] == ["HF062"]


def test_sniffing_rejects_other_folders(tmp_path):
    folder, _ = exl3_folder(tmp_path / "x")
    assert trellis.sniff(folder) is None
    (tmp_path / "y").mkdir()
    assert trellis.sniff(tmp_path / "y") is None
    (tmp_path / "y" / INDEX).mkdir()
    assert trellis.sniff(tmp_path / "y") is None


def test_importing_the_reader_imports_no_codec():
    code = "import polyquant.opening, sys; print('polyquant.codecs.ggml_iq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
