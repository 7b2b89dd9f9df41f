import json
import os
import shutil
from itertools import pairwise

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from folders import fill, raw_safetensors, safetensors_bytes, specs
from format_modules import hf
from golden import VECTORS
from polyquant.errors import InputError, PlanError, UnsupportedError
from polyquant.registry import codec
from polyquant.types import TensorSpec

LLAMA = VECTORS / "models" / "tiny-llama-untied" / "hf"
FLOATS = ["models/tiny-llama-untied/hf", "models/tiny-llama-tied/hf", "models/tiny-bitnet/hf"]
PACKED = {"autobitlinear": "bitnet_gguf/hf_packed_autobitlinear", "bitlinear": "bitnet_gguf/hf_packed_bitlinear"}


def by_name(path):
    """Name -> bytes of each tensor, as the safetensors package sees them."""
    return {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in safetensors.deserialize(path.read_bytes())}


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("folder", FLOATS)
def test_folder_opens_like_the_safetensors_package(folder):
    path = VECTORS / folder
    checkpoint = hf.open(path)
    expected = by_name(path / "model.safetensors")
    assert set(checkpoint) == set(expected)
    for name, (dtype, shape, data) in expected.items():
        w = checkpoint[name]
        assert (w.codec.name, list(w.shape)) == (dtype.lower(), shape)
        assert w.parts["blocks"].tobytes() == data == w.read()["blocks"].tobytes()
    assert checkpoint.format == "hf"
    assert checkpoint.metadata == {"format": "pt"}
    assert checkpoint.config == json.loads((path / "config.json").read_text())
    assert set(checkpoint.files) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert checkpoint.notes == ()


def test_rows_are_read_alone():
    w = hf.open(LLAMA)["model.embed_tokens.weight"]
    whole = w.parts["blocks"]
    np.testing.assert_array_equal(w.read(slice(3, 7))["blocks"], whole[3:7])


@pytest.mark.parametrize("kind", PACKED)
def test_packed_bitnet_pairs_become_one_weight(kind):
    path = VECTORS / PACKED[kind]
    checkpoint, expected = hf.open(path), by_name(path / "model.safetensors")
    packed = {n for n, (dtype, _, _) in expected.items() if dtype == "U8"}
    assert len(packed) == 14
    assert set(checkpoint) == {n for n in expected if not n.endswith("_scale")}
    for name, w in checkpoint.items():
        if name in packed:
            _, (quarter, columns), data = expected[name]
            assert w.codec.name == f"hf_bitnet.{kind}"
            assert w.shape == (4 * quarter, columns)
            assert w.parts["weight"].tobytes() == data
            assert w.parts["weight_scale"].tobytes() == expected[f"{name}_scale"][2]
            assert {p: s.spec.shape for p, s in w.arrays.items()} == {
                p: s.shape for p, s in w.codec.specs(w.shape).items()
            }
        else:
            assert w.codec.name == "bf16"


def test_linear_class_absent_means_bitlinear_and_no_bitnet_means_undecoded(tmp_path):
    folder = shutil.copytree(VECTORS / PACKED["autobitlinear"], tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["linear_class"]
    (folder / "config.json").write_text(json.dumps(config))
    assert hf.open(folder)["model.layers.0.mlp.up_proj.weight"].codec.name == "hf_bitnet.bitlinear"
    config["quantization_config"] = {"quant_method": "gptq"}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = hf.open(folder)
    assert checkpoint["model.layers.0.mlp.up_proj.weight"].codec.name == "undecoded.u8"
    assert checkpoint.undecoded.scheme == "integers, U8 with weight_scale, not described by config.json"
    assert any("gptq" in n for n in checkpoint.notes)


def test_pytorch_model_bin_equals_safetensors(tmp_path):
    source = VECTORS / "hf_bin"
    shutil.copy(source / "pytorch_model.bin", tmp_path)
    a, b = hf.open(tmp_path), hf.open(source / "model.safetensors")
    assert set(a) == set(b)
    for name in a:
        assert (a[name].codec.name, a[name].shape) == (b[name].codec.name, b[name].shape)
        assert a[name].read()["blocks"].tobytes() == b[name].read()["blocks"].tobytes()


def test_sharded_bin(tmp_path):
    for i, name in enumerate(("pytorch_model.bin", "views.bin"), 1):
        shutil.copy(VECTORS / "hf_bin" / name, tmp_path / f"pytorch_model-0000{i}-of-00002.bin")
    weight_map = {n: f"pytorch_model-0000{i}-of-00002.bin" for i, f in ((1, "pytorch_model.bin"), (2, "views.bin"))
                  for n in hf.open(VECTORS / "hf_bin" / f)}  # fmt: skip
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    checkpoint = hf.open(tmp_path)
    assert set(checkpoint) == set(weight_map)
    assert checkpoint["transposed"].shape == (8, 6)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("models/tiny-llama-tied/hf", "folder with model.safetensors"),
        ("models/tiny-llama-tied/hf/model.safetensors", "safetensors file"),
        ("hf_bin/views.bin", "torch file"),
        ("hf_bin/old.bin", "torch file"),
    ],
)
def test_sniff_gives_a_reason(name, why):
    assert why in hf.sniff(VECTORS / name).why


@pytest.mark.parametrize("name", ["ggml", "ggml/q8_0.npz", "models/tiny-llama-tied/hf/config.json", "nothing"])
def test_sniff_rejects(name):
    assert hf.sniff(VECTORS / name) is None


def test_unknown_dtypes_are_kept(tmp_path):
    data = {"a": ("F8_E8M0", [2, 4], bytes(range(8))), "b": ("F4", [4, 4], bytes(8)), "new": ("Q7_X", [3], b"abc")}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(data))
    checkpoint = hf.open(tmp_path)
    for name, (dtype, shape, raw) in data.items():
        w = checkpoint[name]
        assert (w.codec.name, list(w.shape)) == (f"safetensors.{dtype.lower()}", shape)
        assert w.read()["bytes"].tobytes() == raw
        with pytest.raises(UnsupportedError, match=dtype):
            w.dequantize()


def test_scalars_and_empty_tensors(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(
        safetensors_bytes({"e": ("F32", [0, 3], b""), "s": ("F32", [], np.float32(2.5).tobytes())})
    )
    checkpoint = hf.open(tmp_path)
    assert checkpoint["s"].shape == ()
    assert checkpoint["s"].dequantize() == np.float32(2.5)
    assert checkpoint["e"].dequantize().shape == (0, 3)


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("folder", [*FLOATS, *PACKED.values()])
def test_writing_an_opened_folder_gives_equal_bytes(folder, tmp_path):
    path = VECTORS / folder
    checkpoint = hf.open(path)
    side = {n: p.read_bytes() for n, p in checkpoint.files.items()} | {
        "config.json": (path / "config.json").read_bytes()
    }
    out = fill(hf.lay_out(specs(checkpoint), side), tmp_path / "out", checkpoint)
    assert {p.name for p in out.iterdir()} == {p.name for p in path.iterdir()}
    for file in path.iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("folder", ["models/tiny-llama-untied/hf", PACKED["bitlinear"]])
def test_shards_open_in_the_safetensors_package(folder, tmp_path):
    checkpoint = hf.open(VECTORS / folder)
    layout = hf.lay_out(
        specs(checkpoint), {"config.json": (VECTORS / folder / "config.json").read_bytes()}, shard_bytes=120_000
    )
    assert layout == hf.lay_out(
        specs(checkpoint), {"config.json": (VECTORS / folder / "config.json").read_bytes()}, shard_bytes=120_000
    )
    out = fill(layout, tmp_path / "out", checkpoint)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) > 3
    peers = {file: by_name(out / file) for file in files}
    expected = by_name(VECTORS / folder / "model.safetensors")
    assert {n: peers[f][n] for n, f in index["weight_map"].items()} == expected
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in expected.values())
    assert all((out / f.name).stat().st_size == f.size for f in layout.files)
    again = hf.open(out)
    assert set(again) == set(checkpoint)
    assert again.notes == ()
    for name, w in again.items():
        assert w.codec.name == checkpoint[name].codec.name
        assert {p: a.tobytes() for p, a in w.read().items()} == {
            p: a.tobytes() for p, a in checkpoint[name].read().items()
        }
    assert not [f for f in hf.check(out) if f.code != "HF030"]


def test_unknown_dtypes_are_written_unchanged(tmp_path):
    data = {"a": ("F8_E8M0", [2, 4], bytes(range(8))), "b": ("F4", [4, 4], b"12345678")}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(data, {"format": "pt"}))
    checkpoint = hf.open(tmp_path)
    out = fill(hf.lay_out(specs(checkpoint), {}), tmp_path / "out", checkpoint)
    assert by_name(out / "model.safetensors") == data


def test_config_determines_packed_weights():
    plain = TensorSpec("model.embed_tokens.weight", (8, 4), codec("bf16"))
    float_linear = TensorSpec("model.layers.0.mlp.gate.weight", (4, 4), codec("bf16"))

    def packed(kind):
        return TensorSpec("model.layers.0.mlp.up_proj.weight", (8, 4), codec(f"hf_bitnet.{kind}"))

    def config_of(tensors, config):
        layout = hf.lay_out(tensors, {"config.json": config})
        return next(f.pieces[0][1] for f in layout.files if f.name == "config.json")

    auto = b'{"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}'
    assert config_of([plain, packed("autobitlinear")], auto) == auto
    assert config_of([plain], b'{"x":1}') == b'{"x":1}'
    assert json.loads(config_of([plain], auto)) == {}
    said = json.loads(config_of([plain, float_linear, packed("bitlinear")], b'{"x": "\xc3\xa9"}'))
    assert said["x"] == "é"
    assert said["quantization_config"] == {
        "quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline",
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
    }  # fmt: skip
    assert json.loads(config_of([packed("bitlinear")], auto))["quantization_config"]["linear_class"] == "bitlinear"
    with pytest.raises(PlanError, match="both kinds"):
        hf.lay_out(
            [packed("bitlinear"), TensorSpec("b.weight", (8, 4), codec("hf_bitnet.autobitlinear"))],
            {"config.json": auto},
        )
    with pytest.raises(PlanError, match=r"need a config\.json"):
        hf.lay_out([packed("bitlinear")], {})


def test_unsupported_codecs_of_folders_are_refused():
    f32, q8 = codec("f32"), codec("q8_0")
    with pytest.raises(PlanError, match="cannot store q8_0"):
        hf.lay_out([TensorSpec("a", (1, 32), q8)], {})
    with pytest.raises(PlanError, match="have the same name"):
        hf.lay_out([TensorSpec("a", (2,), f32), TensorSpec("a", (2,), f32)], {})
    with pytest.raises(PlanError, match="have the same name"):
        hf.lay_out([TensorSpec("__metadata__", (2,), f32)], {})
    with pytest.raises(PlanError, match=r"\*\.weight"):
        hf.lay_out([TensorSpec("a", (4, 4), codec("hf_bitnet.bitlinear"))], {"config.json": b"{}"})
    for name in ("model.safetensors", "model.safetensors/x", "../x", "a/b/c", ""):
        with pytest.raises(PlanError, match="plain, unique name"):
            hf.lay_out([TensorSpec("a", (2,), f32)], {name: b""})


PLAIN = st.sampled_from(["f32", "bf16", "f16", "i8", "u8", "i64", "bool", "f8_e4m3"])


@given(
    tensors=st.lists(st.tuples(PLAIN, st.lists(st.integers(0, 4), max_size=3)), max_size=8), limit=st.integers(1, 200)
)
@settings(max_examples=60, deadline=None)
def test_layouts_have_no_findings(tensors, limit):
    wanted = [TensorSpec(f"t{i}", tuple(shape), codec(name)) for i, (name, shape) in enumerate(tensors)]
    layout = hf.lay_out(wanted, {}, shard_bytes=limit)
    sizes = {f.name: f.size for f in layout.files}
    spans = {}
    for plan in layout.files:
        assert all(offset + len(data) <= plan.size for offset, data in plan.pieces)
    for slot in layout.slots.values():
        spans.setdefault(slot.file, []).append((slot.offset, slot.offset + slot.spec.nbytes))
    for file, found in spans.items():
        found.sort()
        assert found[0][0] % 8 == 0
        assert all(a[1] == b[0] for a, b in pairwise(found))
        assert found[-1][1] == sizes[file]
        assert len(found) == 1 or found[-1][1] - found[0][0] <= max(limit, 0)


# ---------------------------------------------------------------- files outside the folder, missing files


@pytest.fixture
def sharded(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for i, name in enumerate("ab", 1):
        (folder / f"model-0000{i}-of-00002.safetensors").write_bytes(safetensors_bytes({name: ("F32", [2], bytes(8))}))
    index(folder, a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors")
    return folder


def index(folder, **weight_map):
    content = {"metadata": {"total_size": 16}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_shards_without_an_index_open_if_complete(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    checkpoint = hf.open(sharded)
    assert set(checkpoint) == {"a", "b"}
    assert any("no index" in n for n in checkpoint.notes)
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match="shards are missing"):
        hf.open(sharded)


def test_missing_and_unlisted_tensors_and_shards(sharded):
    (sharded / "model-00002-of-00002.safetensors").rename(sharded / "x")
    with pytest.raises(InputError, match="shard is missing"):
        hf.open(sharded)
    (sharded / "x").rename(sharded / "model-00002-of-00002.safetensors")
    index(
        sharded,
        a="model-00001-of-00002.safetensors",
        b="model-00002-of-00002.safetensors",
        c="model-00001-of-00002.safetensors",
    )
    with pytest.raises(InputError, match="not in the shard"):
        hf.open(sharded)
    two = safetensors_bytes({"b": ("F32", [2], bytes(8)), "extra": ("F32", [1], bytes(4))})
    (sharded / "model-00002-of-00002.safetensors").write_bytes(two)
    index(sharded, a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors")
    checkpoint = hf.open(sharded)
    assert set(checkpoint) == {"a", "b", "extra"}
    assert any("extra" in n for n in checkpoint.notes)


ESCAPES = [
    "../secret.safetensors",
    "/etc/passwd",
    "sub/x.safetensors",
    "..",
    "",
    "a\\b",
    "a\0b",
    7,
    None,
    ["x"],
    "C:x",
    "x" * 300,
]


@pytest.mark.parametrize("name", ESCAPES, ids=repr)
def test_weight_map_that_leaves_the_folder(name, sharded):
    (sharded.parent / "secret.safetensors").write_bytes(safetensors_bytes({"b": ("F32", [2], bytes(8))}))
    index(sharded, a="model-00001-of-00002.safetensors", b=name)
    with pytest.raises(InputError, match="outside the folder") as e:
        hf.open(sharded)
    assert "\n" not in str(e.value)
    assert [f.code for f in hf.check(sharded) if f.code.startswith("HF01")] == ["HF011"]


def test_links_inside_and_outside(sharded, tmp_path):
    shard = sharded / "model-00002-of-00002.safetensors"
    inside = sharded / "real.bin"
    shard.rename(inside)
    shard.symlink_to("real.bin")
    assert set(hf.open(sharded)) == {"a", "b"}
    outside = tmp_path / "outside"
    inside.rename(outside)
    shard.unlink()
    shard.symlink_to(outside)
    with pytest.raises(InputError, match="link that leaves the folder"):
        hf.open(sharded)
    assert "HF040" in {f.code for f in hf.check(sharded)}
    outside.unlink()
    with pytest.raises(InputError, match="broken link"):
        hf.open(sharded)
    assert "HF041" in {f.code for f in hf.check(sharded)}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_links_of_small_files_may_not_leave_the_folder(name, sharded, tmp_path):
    (tmp_path / "secret.json").write_text('{"weight_map": {}}')
    (sharded / name).unlink(missing_ok=True)
    (sharded / name).symlink_to("../secret.json")
    with pytest.raises(InputError, match="link that leaves the folder"):
        hf.open(sharded)
    assert "HF040" in {f.code for f in hf.check(sharded)}


def test_hub_cache_layout_works(tmp_path):
    root = tmp_path / "models--org--name"
    blobs, snapshot = root / "blobs", root / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(LLAMA.iterdir())):
        shutil.copy(file, blobs / f"hash{i}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash{i}")
    assert len(hf.open(snapshot)) == 21
    (tmp_path / "linked").symlink_to(snapshot)
    assert len(hf.open(tmp_path / "linked")) == 21
    assert not list(hf.check(snapshot))
    # another repository's blobs, and a blobs folder that is itself a link, are outside
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    shutil.copy(LLAMA / "config.json", other / "x")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../models--org--other/blobs/x")
    with pytest.raises(InputError, match="leaves the folder"):
        hf.open(snapshot)
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="leaves the folder"):
        hf.open(snapshot)


def test_fifos_and_folders_in_place_of_files(sharded):
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(InputError, match="regular file"):
        hf.open(sharded)
    with pytest.raises(InputError, match="regular file"):
        hf.open(shard)
    assert hf.sniff(shard) is None
    assert "HF041" in {f.code for f in hf.check(sharded)}
    shard.unlink()
    shard.mkdir()
    with pytest.raises(InputError, match="regular file"):
        hf.open(sharded)


def test_missing_files(tmp_path):
    with pytest.raises(UnsupportedError, match="no weights"):
        hf.open(tmp_path)
    with pytest.raises(InputError, match="cannot be opened"):
        hf.open(tmp_path / "nothing")
    with pytest.raises(InputError, match="cannot be opened"):
        list(hf.check(tmp_path / "nothing"))


def test_names_from_files_are_escaped(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(
        raw_safetensors(json.dumps({"a\x1b[2J\n": {"dtype": 1, "shape": [], "data_offsets": []}}))
    )
    with pytest.raises(InputError) as e:
        hf.open(tmp_path)
    assert str(e.value).isprintable()


def test_twenty_thousand_tensors_open(tmp_path):
    header = {f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(20_000)}
    (tmp_path / "model.safetensors").write_bytes(raw_safetensors(json.dumps(header), bytes(20_000)))
    assert len(hf.open(tmp_path)) == 20_000
