"""polyquant repair: recomputable data is restored, the rest is refused, and no partial output is left."""

import json

import ml_dtypes
import numpy as np
import pytest

import polyquant
from formats.msmodelslim_folders import (
    FOLDERS,
    MSMODELSLIM,
    copy,
    description,
    edit_json,
    edit_tensor,
    edit_tensors,
    load,
    shards,
)
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import InputError, PlanError, UnknownNameError, UnsupportedError
from polyquant.types import Severity

K = "model.layers.0.self_attn.k_proj"
STATIC, V1, W8A16, SHARDS, CACHE = (
    "v0/fp16/w8a8",
    "v1/bf16/w8a8_static",
    "v0/fp16/w8a16",
    "v0/fp16/w8a8_c8_sharded",
    "v0/bf16/w8a8_c8_asym",
)
MIX = "v1/bf16/w8a8_mix"


def serious(folder):
    return [str(f) for f in polyquant.validate(folder) if f.severity is not Severity.NOTE]


def same(a, b):
    """Equal tensors and an equal description."""
    one, two = load(a), load(b)
    assert one.keys() == two.keys()
    for name, t in one.items():
        assert (t.dtype, t.shape) == (two[name].dtype, two[name].shape), name
        assert np.array_equal(t.reshape(-1).view(np.uint8), two[name].reshape(-1).view(np.uint8)), name
    assert json.loads(description(a).read_text()) == json.loads(description(b).read_text())


@pytest.mark.parametrize("name", FOLDERS)
def test_a_sound_folder_needs_nothing(name, tmp_path):
    done = polyquant.repair(MSMODELSLIM / name, tmp_path / "new")
    assert (done.path, done.changes, done.left) == (None, (), ())
    assert not (tmp_path / "new").exists()


def with_biases(folder, half, slip=0):
    """As msModelSlim's v1 command line in that dtype: the quotient is rounded before the offset is subtracted."""

    def change(tensors):
        rng = np.random.default_rng(1)
        for name in [n.removesuffix(".quant_bias") for n in tensors if n.endswith(".quant_bias")]:
            deq = tensors[f"{name}.deq_scale"].astype(half).astype(np.float32)
            bias = (3 * rng.standard_normal(len(deq))).astype(half).astype(np.float32)
            quotient = (bias / deq).astype(half).astype(np.float32)
            sums = tensors[f"{name}.weight"].sum(1, dtype=np.int64) * tensors[f"{name}.input_offset"]
            tensors |= {f"{name}.bias": bias, f"{name}.deq_scale": deq}
            tensors[f"{name}.quant_bias"] = np.rint(quotient - sums).astype(np.int32)
            tensors[f"{name}.quant_bias"][0] += slip
        names.extend(n for n in tensors if n.endswith(".bias"))

    names = []
    edit_tensors(folder, change)
    edit_json(description(folder), lambda d: d.update(dict.fromkeys(names, "FLOAT")))


def test_biases_of_a_bfloat16_model_are_rounded_twice(tmp_path):
    folder = copy("v1/bf16/w8a8_static", tmp_path)
    with_biases(folder, ml_dtypes.bfloat16)
    assert serious(folder) == []
    assert polyquant.repair(folder, tmp_path / "new").path is None


def test_a_wrong_quant_bias_of_a_bfloat16_model_is_reported(tmp_path):
    folder = copy("v1/bf16/w8a8_static", tmp_path)
    with_biases(folder, ml_dtypes.bfloat16, slip=100)
    found = [f for f in serious(folder) if "ASC028" in f]
    assert found and all(": 1 of " in f and "by up to 100" in f for f in found)
    with_biases(folder, ml_dtypes.bfloat16)
    edit_tensor(folder, "model.layers.0.self_attn.q_proj.bias", lambda t: t + np.float32(1))
    (one,) = [f for f in serious(folder) if "ASC028" in f]
    assert "q_proj" in one


@pytest.mark.parametrize("name", [n for n in FOLDERS if n != "v1/bf16/w8a16" and "w4a8_dynamic" not in n])
def test_a_lost_description_is_restored(name, tmp_path):
    folder = copy(name, tmp_path)
    codec = next(w.codec for w in polyquant.open(folder).values() if isinstance(w.codec, MsModelSlim))
    genuine = json.loads(description(folder).read_text())
    description(folder).unlink()
    dialect = "v1" if name.startswith("v1") else "ascendv1" if "ascendv1" in name else "v0"
    done = polyquant.repair(folder, tmp_path / "new", kind=codec.word, dialect=dialect)
    assert serious(tmp_path / "new") == []
    assert json.loads(description(tmp_path / "new").read_text()) == genuine
    assert any("written from dtypes and shapes" in c for c in done.changes)
    assert {w.codec.name for w in polyquant.open(tmp_path / "new").values()} == {
        w.codec.name for w in polyquant.open(MSMODELSLIM / name).values()
    }


def test_an_ambiguous_type_must_be_given(tmp_path):
    folder = copy("v1/bf16/w8a16", tmp_path)
    description(folder).unlink()
    with pytest.raises(
        PlanError,
        match=r"the type of this layer cannot be determined .expected W8A16 or W8A8_DYNAMIC.*pass it with --type",
    ):
        polyquant.repair(folder, tmp_path / "new")
    polyquant.repair(folder, tmp_path / "new", kind="w8a16")
    same(MSMODELSLIM / "v1/bf16/w8a16", tmp_path / "new")


def wrong(part, value):
    def change(folder):
        def put(t):
            t[:3] = value
            return t

        edit_tensor(folder, f"{K}.{part}", put)

    return change


def storage(folder):
    """deq_scale of every layer in the other storage."""

    def change(tensors):
        for n, t in tensors.items():
            if n.endswith("deq_scale"):
                tensors[n] = (
                    t.view(np.uint32).astype(np.int64)
                    if t.dtype == np.float32
                    else t.astype(np.uint32).view(np.float32)
                )

    edit_tensors(folder, change)


def types(change):
    return lambda folder: edit_json(description(folder), change)


def lose(part):
    def change(folder):
        edit_tensor(folder, f"{K}.{part}", lambda t: None)
        edit_json(description(folder), lambda d: d.pop(f"{K}.{part}"))

    return change


def config(folder):
    (folder / "config.json").write_text('{"torch_dtype": "float16", "quantization_config": {"quant_method": "fp8"}}')


REPAIRED = {  # name: (folder, damage, message of repair)
    "deq_scale wrong": (STATIC, wrong("deq_scale", 5), f"deq_scale recomputed: {K}"),
    "deq_scale outside 32 bits": (STATIC, wrong("deq_scale", 1 << 40), f"deq_scale recomputed: {K}"),
    "deq_scale wrong in v1": (MIX, wrong("deq_scale", 0.5), f"deq_scale recomputed: {K}"),
    "quant_bias wrong": (V1, wrong("quant_bias", 77777), f"quant_bias recomputed: {K}"),
    "quant_bias lost": (STATIC, lose("quant_bias"), f"quant_bias added: {K}"),
    "storage in v1": (V1, storage, "deq_scale stored as float32 in 13 layers"),
    "storage in v0": (STATIC, storage, "deq_scale stored as int64 in 14 layers"),
    "a type missing": (W8A16, types(lambda d: d.pop(f"{K}.weight")), f"description: 1 entries added, e.g. {K}.weight"),
    "a type too many": (W8A16, types(lambda d: d.update({"model.x.weight": "W8A16"})),
        "description: 1 entries removed, e.g. model.x.weight"),
    "a wrong type": (W8A16, types(lambda d: d.update({f"{K}.weight_scale": "FLOAT"})),
        f"description: 1 entries changed, e.g. {K}.weight_scale"),
    "a float matrix called W8A16": (W8A16, types(lambda d: d.update({"lm_head.weight": "W8A16"})),
        "1 entries changed, e.g. lm_head.weight"),
    "no model type": (W8A16, types(lambda d: d.pop("model_quant_type")), "1 entries added, e.g. model_quant_type"),
    "no kv_cache_type": (CACHE, types(lambda d: d.pop("kv_cache_type")), "1 entries added, e.g. kv_cache_type"),
    "no version on packed codes": (
        "v0/fp16/ascendv1_w4a16_packed", types(lambda d: d.pop("version")), "1 entries added, e.g. version"),
    "comments in the description": (
        W8A16, lambda f: description(f).write_text('{"model_quant_type": "W8A16", # no\n}'),
        "written from dtypes and shapes"),
    "an index of another version": (
        SHARDS, lambda f: edit_json(next(f.glob("*.index.json")), lambda i: i["weight_map"].pop(f"{K}.weight")),
        "index: rewritten"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "change", "line"), REPAIRED.values(), ids=REPAIRED)
def test_recomputed_tensors_match_the_tool(source, change, line, tmp_path):
    folder = copy(source, tmp_path)
    change(folder)
    assert serious(folder)
    done = polyquant.repair(folder, tmp_path / "new")
    assert any(line in c for c in done.changes), done.changes
    assert serious(tmp_path / "new") == []
    same(MSMODELSLIM / source, tmp_path / "new")


def test_a_lost_deq_scale_is_the_product_in_float32(tmp_path):
    folder = copy(STATIC, tmp_path)
    lose("deq_scale")(folder)
    done = polyquant.repair(folder, tmp_path / "new")
    assert done.changes[-1] == f"deq_scale added: {K}"
    assert serious(tmp_path / "new") == []
    new = load(tmp_path / "new")
    want = new[f"{K}.input_scale"].astype(np.float32) * new[f"{K}.weight_scale"].astype(np.float32)[:, 0]
    assert np.array_equal(new[f"{K}.deq_scale"].astype(np.uint32).view(np.float32), want)


def test_only_quantization_config_is_removed_from_the_config(tmp_path):
    folder = copy(STATIC, tmp_path)
    config(folder)
    done = polyquant.repair(folder, tmp_path / "new")
    assert "config.json: quantization_config removed" in done.changes
    assert json.loads((tmp_path / "new/config.json").read_text()) == {"torch_dtype": "float16"}
    same(MSMODELSLIM / STATIC, tmp_path / "new")


def test_names_of_a_different_dialect(tmp_path):
    done = polyquant.repair(MSMODELSLIM / STATIC, tmp_path / "new", dialect="v1")
    assert "description: quant_model_description_w8a8.json now quant_model_description.json" in done.changes
    assert "not part of the model, not copied: tool_forward.safetensors" in done.changes
    assert [p.name for p in shards(tmp_path / "new")] == ["quant_model_weights.safetensors"]
    assert {f.code for f in polyquant.validate(tmp_path / "new", target="vllm-ascend")} == {"ASC001", "ASC017"}


def test_tensors_of_unknown_types_are_copied(tmp_path):
    folder = copy(STATIC, tmp_path)
    edit_json(
        description(folder), lambda d: d.update(dict.fromkeys([n for n in d if n.startswith(f"{K}.")], "W3A5_NEXT"))
    )
    wrong("deq_scale", 5)(folder)
    wrong("quant_bias", 5)(folder)
    q = K.replace("k_proj", "q_proj")
    edit_tensor(folder, f"{q}.quant_bias", lambda t: t + 5)
    polyquant.repair(folder, tmp_path / "new")
    before, after = load(folder), load(tmp_path / "new")
    assert np.array_equal(after[f"{K}.quant_bias"], before[f"{K}.quant_bias"])  # not ours to recompute
    assert np.array_equal(after[f"{q}.quant_bias"], before[f"{q}.quant_bias"] - 5)
    assert json.loads(description(tmp_path / "new").read_text())[f"{K}.weight"] == "W3A5_NEXT"


def nan(part):
    def change(folder):
        wrong(part, np.nan)(folder)

    return change


REFUSED = {  # name: (folder, damage, error)
    "NaN scale": (W8A16, nan("weight_scale"), "cannot be repaired: 3 scales are not positive and finite"),
    "offset of 0.5": (W8A16, wrong("weight_offset", 0.5), "cannot be repaired: 3 offsets are not integers"),
    "NaN scale without a description": (
        STATIC, lambda f: (nan("weight_scale")(f), description(f).unlink()),
        "input_scale * weight_scale is not positive and finite"),
    "deq_scale lost without weight_scale": (V1, lose("deq_scale"), "cannot be repaired: deq_scale is missing"),
    "deq_scale broken without weight_scale": (
        "v1/fp32/w8a8_smoothasym_c8", wrong("deq_scale", 1 << 40),
        "deq_scale cannot be recomputed without weight_scale"),
    "scales lost": (W8A16, lose("weight_scale"), "cannot be repaired: weight_scale is missing"),
    "codes lost": (W8A16, lose("weight"), "cannot be repaired: the layer's weight is missing"),
    "cache of one side": (
        CACHE, lambda f: [edit_tensor(f, f"{K}.kv_cache_{p}", lambda t: None) for p in ("scale", "offset")],
        "is missing, unlike others"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "change", "line"), REFUSED.values(), ids=REFUSED)
def test_lost_tensors_are_refused(source, change, line, tmp_path):
    folder = copy(source, tmp_path)
    change(folder)
    with pytest.raises(PlanError) as refused:
        polyquant.repair(folder, tmp_path / "new")
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_truncated_file_is_refused(tmp_path):
    folder = copy(W8A16, tmp_path)
    (path,) = shards(folder)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(PlanError, match=r"cannot be repaired: data ends after the file does"):
        polyquant.repair(folder, tmp_path / "new")


def test_invalid_sources_targets_and_types(tmp_path):
    with pytest.raises(UnsupportedError, match="only msModelSlim folders can be repaired"):
        polyquant.repair(MSMODELSLIM / "models/qwen2_fp16", tmp_path / "new")
    with pytest.raises(PlanError, match="target exists"):
        polyquant.repair(MSMODELSLIM / W8A16, tmp_path)
    with pytest.raises(InputError, match="cannot be opened"):
        polyquant.repair(tmp_path / "absent", tmp_path / "new")
    folder = copy(W8A16, tmp_path)
    description(folder).unlink()
    with pytest.raises(UnknownNameError, match="did you mean w8a16"):
        polyquant.repair(folder, tmp_path / "new", kind="W8A17")
