"""Bad msModelSlim folders: a one-line error on opening, the matching finding code, and the rules of each consumer."""

import json
import os

import numpy as np
import pytest

import polyquant
from formats.msmodelslim_folders import (
    MSMODELSLIM,
    copy,
    description,
    edit_json,
    edit_tensor,
    edit_tensors,
    load,
    save,
    shards,
)
from polyquant.errors import CodecError, InputError, UnknownNameError, UnsupportedError
from polyquant.formats.msmodelslim.codes import CODES
from polyquant.types import Severity

K = "model.layers.0.self_attn.k_proj"
NORM = "model.layers.0.input_layernorm"
W8A16, GROUPS, STATIC, V1 = "v0/fp16/w8a16", "v0/fp16/w8a16_g32", "v0/fp16/w8a8", "v1/bf16/w8a8_static"
CACHE, SHARDS, SMOOTH, FOUR = "v0/bf16/w8a8_c8_asym", "v0/fp16/w8a8_c8_sharded", "v0/fp16/w8a8_m1", "v0/fp16/w4a16_g32"
PACKED, SUMS = "v0/fp16/ascendv1_w4a16_packed", "v1/bf16/w4a8_dynamic"


def tensor(part, change, layer=K):
    return lambda folder: edit_tensor(folder, f"{layer}.{part}", change)


def said(change):
    return lambda folder: edit_json(description(folder), change)


def config(change):
    return lambda folder: edit_json(folder / "config.json", change)


def put(**places):
    """A change of some entries: put(x=3) makes entry 0 of the tensor 3."""
    value = places["first"]

    def change(t):
        t.reshape(-1)[0] = value
        return t

    return change


def drop(t):
    return None


def gone(name):
    """Removed from the file and from the description."""

    def change(folder):
        edit_tensor(folder, name, drop)
        edit_json(description(folder), lambda d: d.pop(name))

    return change


def write(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def remove(pattern):
    def change(folder):
        for path in folder.glob(pattern):
            path.unlink()

    return change


def cut(folder):
    path = shards(folder)[-1]
    os.truncate(path, path.stat().st_size - 1)


def leave(folder):
    (folder.parent / "outside").write_bytes(b"x")
    path = shards(folder)[0]
    path.unlink()
    path.symlink_to(folder.parent / "outside")


def rename(pattern, name):
    return lambda folder: next(folder.glob(pattern)).rename(folder / name)


def second_model(folder):
    save(folder / "quant_model_weights.safetensors", {"x": np.ones(1, np.float32)})


def extra(folder):
    edit_tensors(folder, lambda t: t.update({"model.extra.weight": np.ones((2, 2), np.float32)}))


def index(change):
    return lambda folder: edit_json(next(folder.glob("*.index.json")), change)


def narrow(folder):
    def change(tensors):
        for part in ("weight_scale", "weight_offset"):
            tensors[f"{K}.{part}"] = np.concatenate([tensors[f"{K}.{part}"]] * 2, 1)[:, :5]

    edit_tensors(folder, change)


STOPS = {  # name: (folder, change, code, text of the finding): open refuses it too
    "description names a missing tensor": (W8A16, said(lambda d: d.update({"model.x.weight": "W8A16"})),
        "ASC013", "but in no file"),
    "no type for codes": (W8A16, said(lambda d: d.pop(f"{K}.weight")), "ASC012", "no type in the description"),
    "no type for a scale": (W8A16, said(lambda d: d.pop(f"{K}.weight_scale")), "ASC012", "no type in the description"),
    "two types in a layer": (W8A16, said(lambda d: d.update({f"{K}.weight_scale": "W8A8"})), "ASC014",
        "weight_scale and weight have different types"),
    "a float matrix called W8A16": (W8A16, said(lambda d: d.update({"lm_head.weight": "W8A16"})), "ASC014",
        "but is a float matrix"),
    "a type that is not a string": (W8A16, said(lambda d: d.update({f"{K}.weight": 8})), "ASC011",
        "no valid type for a tensor"),
    "description a list": (W8A16, write("quant_model_description_w8a16.json", b"[]"), "ASC011",
        "expected object, found array"),
    "comments in the description": (W8A16, write("quant_model_description_w8a16.json", b'{"a": 1, # no\n}'), "ASC011",
        "not valid JSON"),
    "a key twice": (W8A16, write("quant_model_description_w8a16.json", b'{"a.b": "W8A16", "a.b": "FLOAT"}'), "ASC011",
        "the key 'a.b' twice"),
    "no description": (W8A16, remove("quant_model_desc*"), "ASC010", "polyquant repair writes one"),
    "no weights": (W8A16, remove("*.safetensors"), "ASC004", "a description without weights"),
    "two models": (W8A16, second_model, "ASC004", "several models in one folder"),
    "codes of the wrong dtype": (W8A16, tensor("weight", lambda t: t.astype(np.int32)), "ASC021",
        "expected I8 [N, K], found I32 [48, 96]"),
    "scales of the wrong dtype": (W8A16, tensor("weight_scale", lambda t: t.astype(np.int32)), "ASC021", "found I32"),
    "offsets of the wrong dtype": (W8A16, tensor("weight_offset", lambda t: t.astype(np.float32)), "ASC021",
        "expected F16 [48, 1], found F32 [48, 1]"),
    "scales of the wrong shape": (W8A16, tensor("weight_scale", lambda t: t[:-1]), "ASC021",
        "expected F16 [48, 1], found F16 [47, 1]"),
    "codes of three dimensions": (W8A16, tensor("weight", lambda t: t[None]), "ASC021", "expected I8 [N, K]"),
    "no rows": (W8A16, tensor("weight", lambda t: t[:0]), "ASC021", "found I8 [0, 96]"),
    "groups that do not divide": (GROUPS, narrow, "ASC022", "expected a number that divides 96, found 5"),
    "scales missing": (W8A16, tensor("weight_scale", drop), "ASC020", "weight_scale is missing"),
    "codes missing": (W8A16, gone(f"{K}.weight"), "ASC020", "belongs to a layer whose weight is missing"),
    "deq_scale missing": (STATIC, tensor("deq_scale", drop), "ASC020", "deq_scale is missing"),
    "deq_scale of the wrong dtype": (STATIC, tensor("deq_scale", lambda t: t.astype(np.int32)), "ASC021",
        "expected F32 [48], found I32 [48]"),
    "quant_bias of the wrong dtype": (STATIC, tensor("quant_bias", lambda t: t.astype(np.float32)), "ASC021",
        "expected I32 [48], found F32 [48]"),
    "input_scale for each channel": (STATIC, tensor("input_scale", lambda t: np.repeat(t, 48)), "ASC021",
        "expected F16 [1], found F16 [48]"),
    "scale_bias of 3 columns": (SUMS, tensor("scale_bias", lambda t: np.repeat(t, 3, 1)), "ASC021",
        "expected [N, 1] or [N, 16]"),
    "a truncated file": (W8A16, cut, "ASC008", "the file is truncated or broken"),
    "a truncated shard": (SHARDS, cut, "ASC008", "the file is truncated or broken"),
    "a missing shard": (SHARDS, remove("*-00002-of-*"), "ASC007", "finish the download"),
    "a shard missing without an index": (SHARDS, lambda f: (remove("*.index.json")(f), remove("*-00002-of-*")(f)),
        "ASC004", "expected 3 shards"),
    "an index that is none": (SHARDS, index(lambda i: i.pop("weight_map")), "ASC005", "weight_map has the wrong type"),
    "an index that leaves the folder": (SHARDS, index(lambda i: i["weight_map"].update({"x": "../x"})), "ASC006",
        "names a file outside the folder"),
    "an index that names an absent tensor": (
        SHARDS, index(lambda i: i["weight_map"].update({"x": next(iter(i["weight_map"].values()))})), "ASC009",
        "not in the shard named by the index"),
    "a link that leaves the folder": (W8A16, leave, "ASC006", "a link that leaves the folder"),
    "a config that is not JSON": (V1, write("config.json", b"{"), "ASC002", "not valid JSON"),
}  # fmt: skip

FOUND = {  # name: (folder, change, code, severity, text of the finding): open accepts it
    "float without type": (W8A16, extra, "ASC012", "error", "no type in the description"),
    "float that is absent": (W8A16, said(lambda d: d.update({"model.x.weight": "FLOAT"})), "ASC013", "error",
        "but in no file"),
    "norm called W8A16": (W8A16, said(lambda d: d.update({f"{NORM}.weight": "W8A16"})), "ASC014", "note",
        "floats described as W8A16"),
    "model type that no layer has": (W8A16, said(lambda d: d.update(model_quant_type="W8A8")), "ASC016", "warning",
        "but no layer has this type"),
    "no model type": (W8A16, said(lambda d: d.pop("model_quant_type")), "ASC016", "warning",
        "model_quant_type is missing"),
    "wrong group size": (GROUPS, said(lambda d: d.update(group_size=64)), "ASC016", "error",
        "group_size is 64, but the scales are for groups of 32"),
    "quantization_config": (V1, config(lambda c: c.update(quantization_config={"quant_method": "fp8"})), "ASC003",
        "warning", "left from another format"),
    "NaN scale": (W8A16, tensor("weight_scale", put(first=np.nan)), "ASC023", "error",
        "1 scales are not positive and finite"),
    "zero scale": (W8A16, tensor("weight_scale", put(first=0)), "ASC023", "error", "1 scales are not positive"),
    "offset 0.5": (W8A16, tensor("weight_offset", put(first=0.5)), "ASC024", "error",
        "1 offsets are not integers, e.g. 0.5"),
    "offset NaN": (W8A16, tensor("weight_offset", put(first=np.nan)), "ASC024", "error",
        "1 offsets are not integers, e.g. nan"),
    "offset 200": (W8A16, tensor("weight_offset", put(first=200)), "ASC024", "warning",
        "outside -128 to 127, e.g. 200"),
    "input_offset 3.5": (STATIC, tensor("input_offset", put(first=3.5)), "ASC025", "error", "is 3.5, not an integer"),
    "input_offset 128": (V1, tensor("input_offset", put(first=128)), "ASC025", "error", "is 128"),
    "input_scale 0": (STATIC, tensor("input_scale", put(first=0)), "ASC025", "error", "is 0, not positive and finite"),
    "deq_scale of 33 bits": (STATIC, tensor("deq_scale", put(first=1 << 32)), "ASC026", "error",
        "1 values do not fit 32 bits, e.g. 4294967296"),
    "deq_scale negative": (STATIC, tensor("deq_scale", put(first=-1)), "ASC026", "error",
        "do not fit 32 bits, e.g. -1"),
    "deq_scale NaN": (STATIC, tensor("deq_scale", put(first=0x7FC00000)), "ASC023", "error",
        "1 scales are not positive and finite"),
    "deq_scale wrong": (STATIC, tensor("deq_scale", put(first=0x3F800000)), "ASC027", "error",
        "1 of 48 are not input_scale * weight_scale"),
    "quant_bias wrong": (V1, tensor("quant_bias", put(first=10**6)), "ASC028", "error", "1 of 64 differ"),
    "quant_bias without the bias": (STATIC, None, "ASC028", "error", "the layer's bias is not included"),
    "deq_scale int64 in a bfloat16 model": (V1, tensor("deq_scale", lambda t: t.view(np.uint32).astype(np.int64)),
        "ASC029", "error", "must be float32"),
    "deq_scale float32 in a float16 model": (
        STATIC, tensor("deq_scale", lambda t: t.astype(np.uint32).view(np.float32)), "ASC029", "warning",
        "must be int64"),
    "codes of 8 bits in W4A16": (FOUR, tensor("weight", put(first=100)), "ASC030", "error",
        "1 codes are outside -8 to 7"),
    "packed codes without a version": (PACKED, said(lambda d: d.pop("version")), "ASC030", "error",
        "packed two per byte?"),
    "scale_bias wrong": (SUMS, tensor("scale_bias", put(first=9)), "ASC031", "error",
        "1 of 64 are not 8 times the sum"),
    "bias of the wrong size": (STATIC, tensor("bias", lambda t: t[:-1]), "ASC021", "error", "must be floats [48]"),
    "cache without v": (CACHE, gone(f"{K.replace('k_proj', 'v_proj')}.kv_cache_scale"), "ASC040", "error",
        "is missing, unlike others"),
    "cache of the wrong size": (CACHE, tensor("kv_cache_scale", lambda t: t[:-1]), "ASC041", "error",
        "has 47 entries, k_proj has 48 channels"),
    "cache of codes": (CACHE, tensor("kv_cache_scale", lambda t: t.view(np.int16).astype(np.int32)), "ASC041", "error",
        "must be floats"),
    "cache with a NaN": (CACHE, tensor("kv_cache_scale", put(first=np.nan)), "ASC042", "error",
        "1 scales are not positive"),
    "cache with an offset of 0.5": (CACHE, tensor("kv_cache_offset", put(first=0.5)), "ASC042", "error",
        "1 offsets are not integers"),
    "cache undeclared": (CACHE, said(lambda d: d.pop("kv_cache_type")), "ASC043", "warning",
        "kv_cache_type is missing"),
    "cache declared and absent": (STATIC, said(lambda d: d.update(kv_cache_type="C8")), "ASC043", "error",
        "there are no cache scales"),
    "copy of a norm without its bias": (SMOOTH, gone(f"{NORM}.module.bias"), "ASC050", "warning", "is missing, unlike"),
    "copy of a norm of the wrong size": (SMOOTH, tensor("module.weight", lambda t: t[:-1], NORM), "ASC050", "error",
        "of the norm's shape [96]"),
    "norm before smoothing": (SMOOTH, tensor("weight", lambda t: t * 2, NORM), "ASC051", "note", "before smoothing"),
    "tensor in no weight_map": (SHARDS, index(lambda i: i["weight_map"].pop(f"{NORM}.weight")), "ASC009", "warning",
        "is not in weight_map"),
    "total_size": (SHARDS, index(lambda i: i["metadata"].update(total_size=1)), "ASC009", "warning", "total_size is 1"),
    "broken tokenizer": (V1, write("tokenizer.json", b"{"), "ASC018", "error", "not valid JSON"),
}  # fmt: skip


def without_bias(folder):
    """quant_bias as written by a converter that omits the layer's bias."""

    def change(tensors):
        sums = tensors[f"{K}.weight"].sum(1, dtype=np.int64)
        tensors[f"{K}.quant_bias"] = np.rint(-tensors[f"{K}.input_offset"].astype(np.float64) * sums).astype(np.int32)

    edit_tensors(folder, change)


@pytest.mark.parametrize(("source", "change", "code", "line"), STOPS.values(), ids=STOPS)
def test_refused_in_one_line(source, change, code, line, tmp_path):
    folder = copy(source, tmp_path)
    change(folder)
    with pytest.raises(InputError) as refused:
        polyquant.open(folder)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
    found = [f for f in polyquant.validate(folder) if f.severity is Severity.ERROR]
    assert any(f.code == code and line in f.message for f in found), [str(f) for f in found]


@pytest.mark.parametrize(("source", "change", "code", "severity", "line"), FOUND.values(), ids=FOUND)
def test_found_with_its_code(source, change, code, severity, line, tmp_path):
    folder = copy(source, tmp_path)
    (change or without_bias)(folder)
    polyquant.open(folder)
    found = polyquant.validate(folder)
    assert any(f.code == code and f.severity.value == severity and line in f.message for f in found), [
        str(f) for f in found
    ]


def test_contradicting_tensors_are_refused(tmp_path):
    folder = copy(STATIC, tmp_path)
    FOUND["deq_scale of 33 bits"][1](folder)
    with pytest.raises(
        CodecError, match=r"not a float32 stored as int64 .expected 0 to 2\*\*32 - 1, found \d+ to 4294967296"
    ):
        polyquant.open(folder)[f"{K}.weight"].dequantize()


def test_every_code_is_explained_and_tested():
    cases = {c[2] for c in (*STOPS.values(), *FOUND.values())}
    assert {c for c in CODES if c < "ASC070"} == cases | {"ASC001", "ASC015", "ASC017"}
    assert {c for c in CODES if c >= "ASC070"} == {c for _, _, _, c in TARGETS.values()}
    assert all(polyquant.explain(c) == text and text.endswith(".") for c, text in CODES.items())


# ---------------------------------------------------------------- targets


def experts(folder):
    """The layer's up_proj under the name of an expert."""

    def name(n):
        return n.replace("model.layers.0.mlp.", "model.layers.0.mlp.experts.0.")

    edit_tensors(folder, lambda t: [t.__setitem__(name(n), t.pop(n)) for n in list(t)])
    edit_json(description(folder), lambda d: [d.__setitem__(name(n), d.pop(n)) for n in list(d)])


def other_type(folder):
    """Leave v_proj in floats, with quantized q and k."""
    v = K.replace("k_proj", "v_proj")

    def change(tensors):
        for n in list(tensors):
            if n.startswith(f"{v}.") and not n.endswith("bias"):
                del tensors[n]
        tensors[f"{v}.weight"] = np.ones((48, 96), np.float16)

    edit_tensors(folder, change)
    edit_json(
        description(folder), lambda d: [d.pop(n) for n in list(d) if n.startswith(f"{v}.") and not n.endswith("bias")]
    )
    edit_json(description(folder), lambda d: d.update({f"{v}.weight": "FLOAT"}))


def nothing(folder):
    return None


TARGETS = {
    "name of the description": (W8A16, nothing, "vllm-ascend", "ASC070"),
    "sparse": ("v0/fp16/w8a8s", nothing, "vllm-ascend", "ASC071"),
    "W8A16 in SGLang": (W8A16, nothing, "sglang", "ASC071"),
    "static experts": (STATIC, experts, "vllm-ascend", "ASC071"),
    "groups": (GROUPS, nothing, "vllm-ascend", "ASC072"),
    "one scale per matrix": ("v0/fp16/w8a8_per_tensor", nothing, "vllm-ascend", "ASC072"),
    "groups in MindIE": (GROUPS, nothing, "mindie", "ASC072"),
    "asymmetric": ("v0/fp16/w8a16_asym", nothing, "vllm-ascend", "ASC073"),
    "float32 model": ("v1/fp32/w8a8_smoothasym_c8", nothing, "vllm-ascend", "ASC074"),
    "float v, quantized q and k": (STATIC, other_type, "vllm-ascend", "ASC076"),
    "quantization_config": (V1, config(lambda c: c.update(quantization_config={})), "vllm-ascend", "ASC078"),
    "cache with offsets": (CACHE, nothing, "vllm-ascend", "ASC079"),
    "cache undeclared": (SHARDS, said(lambda d: d.pop("kv_cache_type")), "vllm-ascend", "ASC080"),
    "cache in SGLang": (SHARDS, nothing, "sglang", "ASC080"),
    "norm.module": (SMOOTH, nothing, "vllm-ascend", "ASC081"),
    "other safetensors": (V1, write("other.safetensors", b""), "vllm-ascend", "ASC082"),
    "no field quantize": (V1, nothing, "mindie", "ASC083"),
    "cache in bfloat16": (CACHE, nothing, "mindie", "ASC084"),
    "sparse in MindIE": ("v0/fp16/w8a8s", nothing, "mindie", "ASC085"),
    "experts in groups": ("v0/fp16/ascendv1_w4a8_dynamic_g32", experts, "vllm-ascend", "ASC086"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "change", "target", "code"), TARGETS.values(), ids=TARGETS)
def test_folders_that_a_target_rejects(source, change, target, code, tmp_path):
    folder = copy(source, tmp_path)
    change(folder)
    without = {f.code for f in polyquant.validate(folder)}
    assert code not in without
    assert code in {f.code for f in polyquant.validate(folder, target=target)}


@pytest.mark.parametrize("name", ["v1/bf16/w8a16", "v1/bf16/w8a8_static", "v1/bf16/w8a8_dynamic", "v1/bf16/w8a8_mix"])
def test_folders_that_a_target_accepts(name):
    assert [
        f for f in polyquant.validate(MSMODELSLIM / name, target="vllm-ascend") if f.severity is not Severity.NOTE
    ] == []


def test_targets_need_known_names_and_the_format():
    with pytest.raises(UnknownNameError, match="did you mean vllm-ascend"):
        polyquant.validate(MSMODELSLIM / W8A16, target="vllm-ascent")
    with pytest.raises(UnsupportedError, match="--target mindie applies to msModelSlim folders only"):
        polyquant.validate(MSMODELSLIM / "models/qwen2_fp16", target="mindie")


def test_a_hostile_description_is_measured_before_it_is_parsed(tmp_path):
    folder = copy(W8A16, tmp_path)
    for data, line in (
        (b'{"a":' * 100 + b"1" + b"}" * 100, "nested too deep"),
        (b"\xff{}", "not UTF-8"),
        (b'{"a": NaN}', "not finite"),
    ):
        description(folder).write_bytes(data)
        with pytest.raises(InputError, match=line):
            polyquant.open(folder)


def test_names_are_printed_without_control_characters(tmp_path):
    folder = copy(W8A16, tmp_path)
    edit_json(description(folder), lambda d: d.update({"x.\x1b[31m": "W8A16"}))
    assert all("\x1b" not in str(f) for f in polyquant.validate(folder))
    assert json.loads(description(folder).read_text())["x.\x1b[31m"] == "W8A16"
    assert load(folder)
