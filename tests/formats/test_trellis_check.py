"""Bad Trellis folders: a one-line error on opening, the matching finding code, and defects of the dialects."""

import os
import re
import shutil
from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import load_file

import polyquant
from format_modules import trellis
from formats.trellis_folders import INDEX, TRELLIS, copy, edit_json, edit_tensor, edit_tensors
from polyquant.errors import InputError
from polyquant.formats.trellis.codes import CODES
from polyquant.types import Severity

CONFIG = "quantization_config.json"
SHARD = "model-00001-of-00002.safetensors"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"  # [128, 256], 5 bits
FLAT = K_PROJ.replace(".", "__")


def tensor(component, change):
    return lambda folder: edit_tensor(folder, f"{K_PROJ}.{component}", change)


def config(change):
    return lambda folder: edit_json(folder / CONFIG, change)


def note(**fields):
    return config(lambda c: c["tensor_metadata"][K_PROJ].update(fields))


def codebook(**fields):
    entry = {"type": "mul1", "window_bits": 12, "tile_order": "row_major"} | fields
    return config(lambda c: c["global_config"].update(codebook=entry))


def write(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def replace_shard(make):
    def change(folder):
        (folder / SHARD).unlink()
        make(folder / SHARD)

    return change


def weight_map(name):
    return lambda folder: edit_json(folder / INDEX, lambda i: i["weight_map"].update({f"{K_PROJ}.indices": name}))


def truncate(folder):
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 1)


def leave(path):
    outside = path.parent.parent / "outside.safetensors"
    outside.write_bytes(b"x")
    path.symlink_to(outside)


def short(*names):
    """The first byte of flat indices, their header, is lost."""

    def change(folder):
        for name in names:
            edit_tensor(folder, f"{name.replace('.', '__')}__indices", lambda t: t[1:].copy())

    return change


def alone(folder):
    def only(tensors):
        for name in [n for n in tensors if not n.startswith(FLAT)]:
            del tensors[name]

    (folder / "base_weights.safetensors").unlink(missing_ok=True)
    for layer in sorted(folder.glob("layer_*"))[1:]:
        shutil.rmtree(layer)
    edit_tensors(folder, only)
    for path in folder.rglob("*.safetensors"):
        if not load_file(path):
            path.unlink()
    short(K_PROJ)(folder)


def flat_among_tiles(folder):
    edit_tensor(folder, f"{K_PROJ}.indices", lambda t: np.concatenate([t.reshape(-1)[:1], t[..., 1:].reshape(-1)]))


def header(folder):
    edit_tensor(folder, f"{FLAT}__indices", lambda t: np.concatenate([np.array([4], np.uint8), t[1:]]))


def header_of_first_tile(folder):
    def change(t):
        t[0, 0, 0] = 7
        return t

    edit_tensor(folder, f"{K_PROJ}.indices", change)


def plain_too(folder):
    edit_tensors(folder, lambda t: t.update({K_PROJ: np.ones((128, 256), np.float32)}) if f"{K_PROJ}.sv" in t else None)


def drop_from_shard(folder):
    before = (folder / INDEX).read_bytes()
    edit_tensor(folder, "model.norm.weight", lambda t: None)
    (folder / INDEX).write_bytes(before)


def twice(folder):
    shutil_copy = (folder / "trellis_shard_00000.safetensors").read_bytes()
    (folder / "trellis_shard_00001.safetensors").write_bytes(shutil_copy)


def ours_without_config(folder):
    (folder / CONFIG).unlink()
    edit_json(folder / "config.json", lambda c: c.update(quantization_config={"quant_method": "polyquant_trellis"}))


def cyclic_layer(folder):
    (folder / "layer_0002").symlink_to("layer_0002")


SEED, HEADED, V2, WRITER = "v3_seed_kn", "v3_seed_mm_headers", "v2_cuda", "v3_shard_writer"
BAD = {  # name: (folder, change, code, text of the finding)
    "component missing": (SEED, tensor("sv", lambda t: None), "TRL020", "'sv' is missing"),
    "indices missing": (SEED, tensor("indices", lambda t: None), "TRL020", "'indices' is missing"),
    "indices of i8": (SEED, tensor("indices", lambda t: t.view(np.int8)), "TRL021", "expected U8, found I8"),
    "scales of f16": (SEED, tensor("scales", lambda t: t.astype(np.float16)), "TRL021", "expected F32, found F16"),
    "sv too short": (SEED, tensor("sv", lambda t: t[:100].copy()), "TRL022", "'scales' has the wrong shape"),
    "scales too narrow": (SEED, tensor("scales", lambda t: t[:, :64].copy()), "TRL022", "'scales' has the wrong shape"),
    "more groups than inputs": (SEED, tensor("scales", lambda t: np.ones((257, 128), np.float32)), "TRL022",
        "'scales'"),
    "su of two dimensions": (SEED, tensor("su", lambda t: t[None]), "TRL022", "'su' has the wrong shape"),
    "su empty": (SEED, tensor("su", lambda t: t[:0]), "TRL022", "'su' has the wrong shape"),
    "indices cut": (SEED, tensor("indices", lambda t: t.reshape(-1)[:-3].copy()), "TRL022",
        "20480 bytes for 128 tiles"),
    "indices in other tiles": (SEED, tensor("indices", lambda t: t.reshape(4, 32, -1)), "TRL022",
        "'indices' has the wrong shape"),
    "bits of 9": (SEED, tensor("indices", lambda t: np.zeros((16, 8, 288), np.uint8)), "TRL023",
        "expected 2 to 8, found 9"),
    "bits of 1": (SEED, tensor("indices", lambda t: np.zeros((16, 8, 32), np.uint8)), "TRL023",
        "expected 2 to 8, found 1"),
    "metadata of 9 bits": (SEED, note(bits=9), "TRL023", "expected 5, found 9"),
    "metadata of 4 bits": (SEED, note(bits=4), "TRL024", "the bits in the metadata contradict"),
    "a byte short of its header": (V2, short(K_PROJ), "TRL022", "20481 bytes, with a header byte: as "),
    "two of them a byte short": (V2, short(K_PROJ, K_PROJ.replace(".0.", ".1.")), "TRL022", "found 20480"),
    "the only weight, without a header": (V2, alone, "TRL022", "no other weight shows that there is no header byte"),
    "flat, among headers of tiles": (HEADED, flat_among_tiles, "TRL022", "header bytes: as "),
    "header byte": (V2, header, "TRL024", "the header byte contradicts"),
    "header byte of a tile": (HEADED, header_of_first_tile, "TRL024", "the header byte contradicts"),
    "another shape": (SEED, note(shape=[256, 64]), "TRL034", "shape in the metadata does not match"),
    "shape against tiles": (SEED, note(shape=[128, 256]), "TRL034", "contradicts the tiles"),
    "codebook and wrong axes": (
        HEADED, codebook(), "TRL034", "a codebook requires the axes",
    ),
    "weight_map leaves": (SEED, weight_map("../x.safetensors"), "TRL011", "outside the folder"),
    "weight_map absolute": (SEED, weight_map("/etc/passwd"), "TRL011", "outside the folder"),
    "link leaves": (SEED, replace_shard(leave), "TRL011", "link that leaves the folder"),
    "shard missing": (SEED, replace_shard(lambda p: None), "TRL012", "shard is missing"),
    "writer's shard missing": (WRITER, lambda f: (f / "trellis_shard_00001.safetensors").unlink(), "TRL012",
        "expected 2, found 1"),
    "writer's first missing": (WRITER, lambda f: (f / "trellis_shard_00000.safetensors").unlink(), "TRL019",
        "shards are missing"),
    "dangling link": (SEED, replace_shard(lambda p: p.symlink_to("nowhere")), "TRL017", "broken link"),
    "cyclic link": (SEED, replace_shard(lambda p: p.symlink_to(SHARD)), "TRL017", "broken link"),
    "cyclic layer": (V2, cyclic_layer, "TRL017", "broken link"),
    "pipe": (SEED, replace_shard(os.mkfifo), "TRL017", "not a regular file"),
    "folder for a shard": (SEED, replace_shard(lambda p: p.mkdir()), "TRL017", "not a regular file"),
    "truncated": (SEED, truncate, "TRL018", "data ends after the file does"),
    "no safetensors": (SEED, write(SHARD, b"nothing"), "TRL018", "too short"),
    "index no json": (SEED, lambda f: (f / INDEX).write_text('{"weight_map": {"a.indices": ' ), "TRL010",
        "not valid JSON"),
    "index without map": (SEED, lambda f: (f / INDEX).write_text('{"x.indices": 1}'), "TRL010",
        "weight_map has the wrong type"),
    "index promises more": (SEED, drop_from_shard, "TRL013", "is not in model-0000"),
    "config.json broken": (SEED, write("config.json", b"{"), "TRL002", "not valid JSON"),
    "metadata broken": (SEED, write(CONFIG, b"[]"), "TRL031", "expected object, found array"),
    "metadata with bits of text": (SEED, note(bits="5"), "TRL031", "bits has the wrong type"),
    "metadata with a true": (SEED, note(bits=True), "TRL031", "bits has the wrong type"),
    "metadata with three axes": (SEED, note(shape=[1, 2, 3]), "TRL031", "must be two integers"),
    "metadata of huge numbers": (SEED, note(shape=[10**19, 10**19]), "TRL034", "does not match"),
    "unknown codebook": (SEED, codebook(type="magic"), "TRL037", "unknown codebook"),
    "unknown order": (SEED, codebook(tile_order="spiral"), "TRL037", "unknown tile order"),
    "window too wide": (SEED, codebook(window_bits=40), "TRL037", "window_bits are out of range"),
    "no table": (SEED, codebook(type="lut"), "TRL020", "'lut' is missing"),
    "rotation that does not fit": (
        SEED, lambda f: (codebook()(f), note(hadamard=[96, 1])(f)), "TRL037", "Hadamard blocks",
    ),
    "codebook without window": (SEED, codebook(window_bits=None), "TRL031", "without window_bits"),
    "our folder without metadata": (SEED, ours_without_config, "TRL030", "cannot be decoded without it"),
    "in two shards": (WRITER, twice, "TRL028", "is in two files"),
    "quantized and plain": (SEED, plain_too, "TRL028", "both quantized and plain"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, tmp_path):
    source, change, code, message = BAD[name]
    folder = copy(source, tmp_path)
    change(folder)
    with pytest.raises(InputError) as e:
        polyquant.open(folder)
    line = str(e.value)
    assert message in line
    assert "\n" not in line
    assert line.startswith(str(folder))
    errors = [f for f in trellis.check(folder) if f.severity is Severity.ERROR]
    assert code in {f.code for f in errors}
    assert any(message in str(f) for f in errors)
    assert len(errors) < 60 and all("\n" not in str(f) for f in errors)
    assert [f.code for f in polyquant.validate(folder) if f.code == code]


@pytest.mark.parametrize(("component", "value"), [("scales", np.nan), ("su", np.inf), ("sv", -np.inf)])
def test_scales_that_are_not_finite(component, value, tmp_path):
    folder = copy(SEED, tmp_path)

    def change(t):
        t.reshape(-1)[3] = value
        return t

    edit_tensor(folder, f"{K_PROJ}.{component}", change)
    found = [f for f in polyquant.validate(folder) if f.severity is Severity.ERROR]
    assert [f.code for f in found] == ["TRL026", "TEN001"]
    assert f"'{component}' contains NaN or infinity: 1 of" in found[0].message
    assert found[0].tensor == K_PROJ


@pytest.mark.parametrize(("component", "side"), [("su", "inputs"), ("sv", "outputs")])
def test_zeros_in_sign_vectors(component, side, tmp_path):
    folder = copy(SEED, tmp_path)
    edit_tensor(folder, f"{K_PROJ}.{component}", lambda t: np.where(np.arange(t.size) < 2, 0, t).astype(t.dtype))
    (found,) = [f for f in trellis.check(folder) if f.code == "TRL027"]
    assert f"'{component}' contains 2 zeros" in found.message and side in found.message and found.tensor == K_PROJ


def test_layer_folders_under_another_number(tmp_path):
    folder = copy(V2, tmp_path)
    assert not [f for f in trellis.check(folder) if f.code == "TRL009"]
    edit_json(folder / "layer_0001/index.json", lambda content: content.update(layer_idx=0))
    (found,) = [f for f in trellis.check(folder) if f.code == "TRL009"]
    assert found.message == "layer_idx is 0, the folder is layer_0001"
    (folder / "layer_0001").rename(folder / "layer_0000.x")
    (folder / "layer_0000").rename(folder / "layer_0001")
    (folder / "layer_0000.x").rename(folder / "layer_0000")
    messages = [f.message for f in trellis.check(folder) if f.code == "TRL009"]
    assert messages == [
        "7 weights of another layer are in layer_0000",
        "layer_idx is 0, the folder is layer_0001",
        "7 weights of another layer are in layer_0001",
    ]
    for attempt in (lambda: polyquant.load(folder), lambda: polyquant.plan(folder, "gguf")):
        with pytest.raises(InputError, match=r"finding TRL009 \(3 errors\), see `polyquant validate`"):
            attempt()


def test_header_bytes_of_later_tiles(tmp_path):
    folder = copy(HEADED, tmp_path)

    def change(t):
        t[3:5, 2, 0] = 1
        return t

    edit_tensor(folder, f"{K_PROJ}.indices", change)
    found = [f for f in trellis.check(folder) if f.code == "TRL025"]
    assert [f.message for f in found] == ["header bytes of 2 of 128 tiles are not 5"]


def test_all_problems_are_reported_at_once(tmp_path):
    folder = copy(SEED, tmp_path)
    tensor("sv", lambda t: None)(folder)
    edit_tensor(folder, "model.layers.1.self_attn.k_proj.weight.su", lambda t: t.astype(np.float64))
    write("config.json", b"[")(folder)
    errors = Counter(f.code for f in trellis.check(folder) if f.severity is Severity.ERROR)
    assert errors == {"TRL002": 1, "TRL020": 1, "TRL021": 1}


# ---------------------------------------------------------------- valid folders, and defects of dialects


NOTES = {"TRL004", "TRL007", "TRL050"}
DIALECTS = {
    "v2_cuda": {"TRL045", "TRL046"},
    "v2_exl3": {"TRL006", "TRL045", "TRL046", "TRL047", "TRL048"},
    "v2_odd": {"TRL001", "TRL045", "TRL046"},
    "v3_cuda_consolidated": {"TRL016", "TRL030", "TRL040", "TRL041", "TRL042", "TRL044", "TRL045", "TRL046"},
    "v3_migrated": {"TRL016", "TRL030", "TRL042", "TRL043", "TRL044", "TRL045", "TRL046"},
    "v3_shard_writer": {"TRL001", "TRL030", "TRL040", "TRL044", "TRL045", "TRL046"},
    "v3_seed_kn": {"TRL036", "TRL049"},
    "v3_seed_mm_headers": {"TRL006", "TRL036", "TRL044", "TRL045", "TRL046", "TRL049"},
}


@pytest.mark.parametrize("folder", DIALECTS)
def test_defects_of_each_dialect(folder):
    assert {f.code for f in trellis.check(TRELLIS / folder)} - NOTES == DIALECTS[folder]


def test_the_documents_form_is_sound():
    assert {f.severity for f in polyquant.validate(TRELLIS / SEED)} == {Severity.NOTE}


CHANGES = {  # code: change to a sound folder
    "TRL001": lambda f: (f / "config.json").unlink(),
    "TRL003": lambda f: edit_json(f / "config.json", lambda c: c.pop("architectures")),
    "TRL005": write("tokenizer_config.json", b"{"),
    "TRL014": lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].pop("model.norm.weight")),
    "TRL015": lambda f: (f / "left_over.safetensors").write_bytes((f / SHARD).read_bytes()),
    "TRL016": lambda f: edit_json(f / INDEX, lambda i: i["metadata"].update(total_size=5)),
    "TRL030": lambda f: (f / CONFIG).unlink(),
    "TRL032": config(lambda c: c["global_config"].pop("target_bits")),
    "TRL033": config(lambda c: c["tensor_metadata"].pop(K_PROJ)),
    "TRL035": config(lambda c: c.update(layer_allocation={"0": {"self_attn.k_proj": 3}})),
    "TRL041": lambda f: edit_json(f / INDEX, lambda i: i["metadata"].update(format="trellis_v2")),
}


@pytest.mark.parametrize("code", CHANGES)
def test_warnings_and_infos(code, tmp_path):
    folder = copy(SEED, tmp_path)
    clean = {f.code for f in trellis.check(folder)}
    CHANGES[code](folder)
    assert code in {f.code for f in trellis.check(folder)} - clean
    polyquant.open(folder)  # none of them stops the reader


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("layer_allocation"), "layer_allocation is missing"),
        (lambda c: c.update(quantization_version="trellis_v9"), "not 'trellis_v3'"),
        (lambda c: c["global_config"].update(tile_size=8), "tile_size is 8"),
        (lambda c: c["global_config"].update(target_bits=True), "global_config.target_bits is missing"),
        (lambda c: c["tensor_metadata"][K_PROJ].pop("mse"), "mse is missing"),
        (lambda c: c.update(quantization_method="gptq"), "quantization_method is 'gptq'"),
        (lambda c: c["global_config"].update(scale_groups="per_tiles"), "scale_groups is 'per_tiles'"),
        (lambda c: c["global_config"].update(target_bits=9), "target_bits is '9', expected 2 to 8"),
        (lambda c: c["global_config"].update(codebook_size=100), "codebook_size is '100'"),
        (lambda c: c["layer_allocation"]["0"].update({"mlp.up_proj": 17}), "layer_allocation.0.mlp.up_proj is '17'"),
        (lambda c: c["layer_allocation"].update({"1": 3}), "layer_allocation.1 is '3'"),
        (lambda c: c.pop("global_config"), "global_config is missing"),
        (lambda c: c.pop("tensor_metadata"), "tensor_metadata is missing"),
    ],
)
def test_fields_of_the_metadata(change, message, tmp_path):
    folder = copy(SEED, tmp_path)
    edit_json(folder / CONFIG, change)
    assert any(f.code == "TRL032" and message in f.message for f in trellis.check(folder))


AGAINST_TENSORS = [
    ({"num_hidden_layers": 3}, None, r"is missing, and so for 6 more"),
    ({"num_hidden_layers": 1}, "model.layers.1.", r"after the last, num_hidden_layers is 1, and so for 8 more"),
    (
        {"vocab_size": 200},
        "lm_head.weight",
        r"is \[128, 256\], the configuration requires \[200, 256\], and so for 1 more",
    ),
    ({"intermediate_size": 640}, "model.layers.0.mlp.down_proj.weight", r"is \[256, 512\].* and so for 5 more"),
    ({"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight", r"\[128, 256\]"),
    ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, None, r""),
]


@pytest.mark.parametrize(("change", "named", "message"), AGAINST_TENSORS, ids=lambda x: str(x)[:40])
def test_config_json_is_checked_against_the_tensors(change, named, message, tmp_path):
    folder = copy(SEED, tmp_path)
    assert "TRL006" not in {f.code for f in trellis.check(folder)}
    edit_json(folder / "config.json", lambda c: c.update(change))
    found = [f for f in trellis.check(folder) if f.code == "TRL006"]
    assert found and re.search(message, found[0].message) and found[0].severity is Severity.ERROR
    assert named is None or found[0].tensor.startswith(named)


def test_an_unknown_architecture_is_not_checked(tmp_path):
    folder = copy(SEED, tmp_path)
    edit_json(folder / "config.json", lambda c: c.update(model_type="none", architectures=["None"], vocab_size=1))
    assert "TRL006" not in {f.code for f in trellis.check(folder)}


ENTRIES = {
    "quantization_method": "trellis_ldlq", "quantization_version": "trellis_v2", "config_file": "other.json", "bits": 7,
}  # fmt: skip


@pytest.mark.parametrize("key", ENTRIES)
def test_quantization_config_is_checked_against_the_metadata(key, tmp_path):
    assert "TRL007" in {f.code for f in trellis.check(TRELLIS / SEED)}  # other programs write none
    polyquant.convert(TRELLIS / SEED, tmp_path / "out", to="trellis-v3")
    assert not {f.code for f in trellis.check(tmp_path / "out")} & {"TRL006", "TRL007", "TRL008"}
    edit_json(tmp_path / "out/config.json", lambda c: c["quantization_config"].update({key: ENTRIES[key]}))
    found = [f for f in trellis.check(tmp_path / "out") if f.code == "TRL008"]
    assert len(found) == 1 and f"quantization_config has {key}" in found[0].message


def test_every_code_is_explained_and_used():
    source = "".join(p.read_text() for p in (TRELLIS.parents[2] / "src/polyquant/formats/trellis").glob("*.py"))
    used = set(re.findall(r'"(TRL\d{3})"', source))
    for code in CODES:
        assert len(re.findall(rf'"{code}"', source)) > 1, code  # in codes.py, and where it is found
        assert len(polyquant.explain(code)) > 60
    assert used == set(CODES)


def test_compare_takes_repair():
    plain = polyquant.compare(TRELLIS / "v2_exl3", TRELLIS / "v2_exl3")
    mended = polyquant.compare(TRELLIS / "v2_exl3", TRELLIS / "v2_exl3", repair=True)
    assert plain.error.rrmse == 0
    assert mended.error.rrmse > 0.5
