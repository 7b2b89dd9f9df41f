"""To msModelSlim with codes kept, and back: equal to the original conversions, with equal model outputs."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import packers
import polyquant
from golden import VECTORS
from polyquant.errors import PlanError, UnsupportedError
from polyquant.opening import open_checkpoint
from polyquant.runtime.load import load
from polyquant.types import Action, Affine, Floats

MSMODELSLIM = VECTORS / "msmodelslim"
IDS = [5, 17, 3, 99, 42, 8, 77, 120, 64, 31, 2, 9, 55, 101, 12, 70]


def model_folder(path, mode, model):
    """A genuine msModelSlim folder with the config.json of its model."""
    shutil.copytree(MSMODELSLIM / mode, path, copy_function=shutil.copyfile)
    shutil.copyfile(MSMODELSLIM / "models" / model / "config.json", path / "config.json")
    return path


def hf_folder(path, tensors, model="qwen2_fp16", **config):
    path.mkdir()
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, path / "model.safetensors")
    said = json.loads((MSMODELSLIM / "models" / model / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**said, **config}))
    return path


def genuine(mode):
    (file,) = (MSMODELSLIM / mode).glob("quant_model_weight*.safetensors")
    return load_file(file)


def logits(path):
    return load(path, activations="float").logits(IDS)


def far(found, wanted):
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


# ---------------------------------------------------------------- ChatGLM


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_chatglm_equals_the_example_of_the_tool(tmp_path, bits, file):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", file):
        shutil.copyfile(MSMODELSLIM / f"chatglm2/int{bits}" / name, source / name)
    polyquant.convert(source, tmp_path / "out", to="msmodelslim", dialect="v0")
    wanted = MSMODELSLIM / f"chatglm2/msmodelslim_from_int{bits}"
    for name in ("quant_model_weight_w8a16.safetensors", "quant_model_description_w8a16.json"):
        assert (tmp_path / "out" / name).is_file()
    said = [json.loads((p / "quant_model_description_w8a16.json").read_text()) for p in (tmp_path / "out", wanted)]
    assert said[0] == said[1]
    found, expected = (load_file(p / "quant_model_weight_w8a16.safetensors") for p in (tmp_path / "out", wanted))
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_bit" not in config


# ---------------------------------------------------------------- GPTQ, AWQ, compressed-tensors


def unsigned(mode, name, bits):
    """codes and zeros from 0 up, and scales, of a linear of a genuine folder."""
    tensors = genuine(mode)
    stem, half = name.removesuffix("weight"), 2 ** (bits - 1)
    zeros = np.rint(tensors[f"{stem}weight_offset"].astype(np.float32)).astype(int)
    return tensors[name].astype(int) + half, zeros + half, tensors[f"{stem}weight_scale"].astype(np.float32)


METHODS = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, lambda q, z, s: packers.gptq(q, z, s, 4)),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
        lambda q, z, s: packers.gptq(q, z, s, 4, v2=True, g_idx=np.arange(q.shape[1]) // 32),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, packers.awq),
    "compressed": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        lambda q, z, s: packers.compressed(q - 8, s, 4, z - 8),
    ),
}


def quantized_folder(path, method):
    """The model of v0/fp16/w4a16_g32 as another tool would write it, and the names of its linears."""
    tensors = genuine("v0/fp16/w4a16_g32")
    linears = [n for n in tensors if f"{n}_scale" in tensors]
    plain = {n: a for n, a in tensors.items() if not n.startswith(tuple(linears))}
    said, pack = METHODS[method]
    for name in linears:
        parts = pack(*unsigned("v0/fp16/w4a16_g32", name, 4))
        plain |= {name.removesuffix("weight") + part: a for part, a in parts.items()}
    return hf_folder(path, plain, quantization_config=said), linears


@pytest.mark.parametrize("method", METHODS)
def test_codes_of_other_tools_are_kept(tmp_path, method):
    source, linears = quantized_folder(tmp_path / "source", method)
    made = polyquant.plan(source, "msmodelslim", dialect="v0")
    steps = {s.map.target: s for s in made.steps}
    assert {(steps[n].action, steps[n].why, steps[n].target.name) for n in linears} == {
        (Action.TRANSCODE, "codes kept", "w4a16.g32")
    }
    polyquant.convert(made, tmp_path / "out")
    (file,) = (tmp_path / "out").glob("quant_model_weight*.safetensors")
    found, expected = load_file(file), genuine("v0/fp16/w4a16_g32")
    assert set(found) == set(expected)
    for name, array in expected.items():
        want = array
        if name.endswith("weight_scale") and method != "compressed":
            want = array.astype(np.float16).astype(np.float32)  # GPTQ and AWQ store half precision
        np.testing.assert_array_equal(found[name].astype(np.float32), want.astype(np.float32), err_msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_folders_of_other_tools_run_and_become_floats(tmp_path, method):
    source, linears = quantized_folder(tmp_path / "source", method)
    report = polyquant.convert(source, tmp_path / "floats", to="hf")
    assert {s.target for s in report.steps} == {"f16"}
    assert "quantization_config" not in json.loads((tmp_path / "floats/config.json").read_text())
    assert all(open_checkpoint(tmp_path / "floats")[n].codec.form is Floats for n in linears)
    assert far(logits(source), logits(tmp_path / "floats")) < 1e-3
    assert far(logits(source), logits(MSMODELSLIM / "models/qwen2_fp16")) < 0.25  # 4 bits of a tiny model


def test_chatglm_runs_from_its_own_codes(tmp_path):
    runs = {}
    for kind in ("float", "int8", "int4"):
        shutil.copytree(MSMODELSLIM / "chatglm2" / kind, tmp_path / kind, copy_function=shutil.copyfile)
        runs[kind] = logits(tmp_path / kind)
    assert far(runs["int8"], runs["float"]) < 0.05
    assert 0 < far(runs["int4"], runs["float"]) < 0.6


def test_int8_of_compressed_tensors_becomes_w8a8_dynamic_unchanged(tmp_path):
    tensors = genuine("v0/fp16/w8a8_dynamic")
    plain = {n: a for n, a in tensors.items() if not n.endswith("weight_offset")}
    group = {"input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}
    said = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    source = hf_folder(tmp_path / "source", plain, quantization_config=said)
    polyquant.convert(source, tmp_path / "out", to="msmodelslim", dialect="v0")
    (file,) = (tmp_path / "out").glob("quant_model_weight*.safetensors")
    found = load_file(file)
    assert set(found) == set(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    (description,) = (tmp_path / "out").glob("quant_model_description*.json")
    assert "W8A8_DYNAMIC" in json.loads(description.read_text()).values()


def test_8_bit_floats_become_floats_and_run(tmp_path):
    floats = load_file(MSMODELSLIM / "models/qwen2_fp16/model.safetensors")
    tensors = dict(floats)
    for name in [n for n in floats if "_proj.weight" in n]:
        scale = np.abs(floats[name]).max(1, keepdims=True).astype(np.float32) / 448
        tensors[name] = (floats[name] / scale).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    said = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    source = hf_folder(tmp_path / "source", tensors, quantization_config=said)
    here = logits(source)
    assert far(here, logits(MSMODELSLIM / "models/qwen2_fp16")) < 0.08
    for to, out in (("hf", tmp_path / "b"), ("gguf", tmp_path / "b.gguf")):
        report = polyquant.convert(source, out, to=to)
        assert sum(s.source == "fp8.e4m3.f32" and s.target == "f16" for s in report.steps) == 14
        assert far(logits(out), here) < 2e-3
    with pytest.raises(PlanError, match="already quantized"):
        polyquant.plan(source, "msmodelslim", codec="w8a16")
    report = polyquant.convert(source, tmp_path / "c", to="msmodelslim", codec="w8a16", requantize=True)
    assert far(logits(tmp_path / "c"), here) < 0.03


def test_act_order_cannot_be_kept(tmp_path):
    codes, zeros, scales = packers.some_codes(0, 96, 64, 2, 4)
    g_idx = np.random.default_rng(0).permutation(np.arange(64) // 32)
    name = "model.layers.0.mlp.up_proj"
    tensors = {f"{name}.{p}": a for p, a in packers.gptq(codes, zeros, scales, 4, g_idx=g_idx).items()}
    source = hf_folder(tmp_path / "source", tensors, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(PlanError, match="no weight would be quantized"):
        polyquant.plan(source, "msmodelslim", allow_unknown=True)
    with pytest.raises(PlanError, match="already quantized"):
        polyquant.plan(source, "msmodelslim", codec="w8a16.g32", allow_unknown=True)
    options = {"codec": "w8a16.g32", "requantize": True, "allow_unknown": True}
    report = polyquant.convert(source, tmp_path / "out", to="msmodelslim", **options)
    assert 0 < report.error.rrmse < 0.02
    gguf = polyquant.plan(source, "gguf", codec=None, allow_unknown=True)
    assert [s.target.name for s in gguf.steps] == ["f16"]


def test_a_codec_that_cannot_hold_the_codes_is_a_new_quantization(tmp_path):
    source, _ = quantized_folder(tmp_path / "source", "awq")
    with pytest.raises(PlanError, match="already quantized"):
        polyquant.plan(source, "msmodelslim", codec="w8a16")
    wider = polyquant.plan(source, "msmodelslim", codec="w8a16.g32")
    assert {s.action for s in wider.steps if s.target.form is Affine} == {Action.TRANSCODE}
    polyquant.convert(wider, tmp_path / "out")
    for w in open_checkpoint(tmp_path / "out").values():
        np.testing.assert_array_equal(w.dequantize(), open_checkpoint(source)[w.name].dequantize())


# ---------------------------------------------------------------- GGUF and ternaries


@pytest.mark.parametrize(
    ("block", "codec"), [("q8_0", "w8a16.g32"), ("q5_0", "w8a16.g32"), ("q4_0", "w4a16.g32.pack_n")]
)
def test_ggml_blocks_round_trip(tmp_path, block, codec):
    source = VECTORS / "models/tiny-llama-untied/hf"  # llama.cpp permutes its q and k
    polyquant.convert(source, tmp_path / "a.gguf", to="gguf", codec=block)
    report = polyquant.convert(tmp_path / "a.gguf", tmp_path / "b", to="msmodelslim")
    kept = {s.tensor: s for s in report.steps if s.action == "transcode" and len(s.shape) == 2}
    linears = [s for s in kept.values() if s.target == codec]
    assert len(linears) == 7 * json.loads((source / "config.json").read_text())["num_hidden_layers"]
    assert all(s.error is None for s in linears)  # equal by proof: not measured
    assert (
        far(logits(tmp_path / "b"), logits(tmp_path / "a.gguf")) < 5e-3
    )  # the head and the embedding, decoded to bf16
    if block == "q5_0":
        return
    back = polyquant.convert(tmp_path / "b", tmp_path / "c.gguf", to="gguf")
    assert [s.target for s in back.steps].count(block) == len(linears)
    before, after = polyquant.open(tmp_path / "a.gguf"), polyquant.open(tmp_path / "c.gguf")
    names = [n for n, w in after.items() if w.codec.name == block]
    for name in names:
        np.testing.assert_array_equal(after[name].parts["blocks"], before[name].parts["blocks"], err_msg=name)


@pytest.mark.parametrize("kind", ["i2_s.x86", "tq2_0", "tq1_0"])
def test_ternaries(tmp_path, kind):
    source = VECTORS / "models/tiny-bitnet/hf"
    polyquant.convert(source, tmp_path / "a.gguf", to="gguf", codec=kind)
    report = polyquant.convert(tmp_path / "a.gguf", tmp_path / "b", to="msmodelslim")
    kept = [s for s in report.steps if s.source == kind]
    assert kept
    assert {s.action for s in kept} == {"transcode"}
    assert all(s.error is None for s in kept)
    made = open_checkpoint(tmp_path / "b")
    for s in kept:
        assert s.target == ("w8a16" if kind.startswith("i2") or s.shape[1] == 256 else "w8a16.g256")
        assert set(np.unique(made[s.tensor].parts["weight"])) <= {-1, 0, 1}


def test_packed_bitnet_folders(tmp_path):
    source = VECTORS / "bitnet_gguf/hf_packed_autobitlinear"
    report = polyquant.convert(source, tmp_path / "b", to="msmodelslim")
    kept = [s for s in report.steps if s.source == "hf_bitnet.autobitlinear"]
    assert kept
    assert all(s.target == "w8a16" and s.error is None for s in kept)
    assert "quantization_config" not in json.loads((tmp_path / "b/config.json").read_text())


def test_a_codec_that_holds_the_codes_keeps_them(tmp_path):
    source = model_folder(tmp_path / "a", "v0/fp16/w8a16", "qwen2_fp16")
    made = polyquant.plan(source, "gguf", codec="q8_0")
    linears = [s for s in made.steps if s.source is not None and s.source.form is Affine]
    assert {(s.action, s.target.name) for s in linears} == {(Action.TRANSCODE, "q8_0")}
    polyquant.convert(made, tmp_path / "a.gguf")
    found, wanted = polyquant.open(tmp_path / "a.gguf"), genuine("v0/fp16/w8a16")
    blocks = found["blk.0.ffn_up.weight"].parts["blocks"].reshape(160, 3, 34)
    codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(160, 96)
    np.testing.assert_array_equal(codes, wanted["model.layers.0.mlp.up_proj.weight"])
    with pytest.raises(PlanError, match="already quantized"):
        polyquant.plan(source, "gguf", codec="q4_k")


def test_asymmetric_codes_of_8_bits_become_floats_in_gguf_and_those_of_4_bits_q4_1(tmp_path):
    source = model_folder(tmp_path / "a", "v0/fp16/w8a16_asym", "qwen2_fp16")
    assert {s.target.name for s in polyquant.plan(source, "gguf").steps} == {"f16", "f32"}
    with pytest.raises(PlanError, match="already quantized"):
        polyquant.plan(source, "gguf", codec="q8_0")
    codes, zeros, scales = packers.some_codes(3, 96, 64, 2, 4)
    tensors = {f"model.layers.0.mlp.up_proj.{p}": a for p, a in packers.awq(codes, zeros, scales).items()}
    source = hf_folder(tmp_path / "b", tensors, quantization_config={"quant_method": "awq", "bits": 4})
    report = polyquant.convert(source, tmp_path / "b.gguf", to="gguf", allow_unknown=True)
    assert [s.target for s in report.steps] == ["q4_1"]
    assert report.error.rrmse < 5e-4  # the minimum of a block in half precision


# ---------------------------------------------------------------- from msModelSlim


OUT = [
    ("v0/fp16/w8a16", "qwen2_fp16", 0.02, "q8_0"),
    ("v0/bf16/w8a8_m4", "qwen2_bf16", 0.025, "q8_0"),
    ("v0/fp16/w8a8_m4_fallback", "qwen2_fp16", 0.03, "q8_0"),
    ("v0/fp16/w8a8s_lowbit_smooth", "qwen2_fp16", 0.12, "q8_0"),
    ("v1/fp32/w8a8_smoothasym_c8", "qwen3_bf16", 0.015, "q8_0"),
    ("v0/fp16/ascendv1_w4a16_g32_packed", "qwen2_fp16", 0.2, "q4_0"),
    ("v0/fp16/w8a8_c8_sharded", "qwen2_fp16", 0.03, "q8_0"),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "model", "bar", "block"), OUT)
@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_converted_models_give_equal_logits(tmp_path, mode, model, bar, block, to):
    source = model_folder(tmp_path / "a", mode, model)
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    report = polyquant.convert(source, out, to=to)
    assert far(logits(out), logits(MSMODELSLIM / "models" / model)) < bar
    assert not any(word in s.tensor for s in report.steps for word in (".module.", "kv_cache", "norm.bias"))
    if to == "gguf":
        assert block in {s.target for s in report.steps}
    floats = {n: w.shape for n, w in polyquant.open(MSMODELSLIM / "models" / model).items()}
    if to == "hf":
        assert {n: w.shape for n, w in polyquant.open(out).items()} == floats
    told = " ".join(report.warnings)
    assert ("cache" in told) == ("c8" in mode)
    assert ("cancel the shift" in told) == ("smoothasym" in mode or mode.endswith("smooth"))


MODES = sorted(str(p.relative_to(MSMODELSLIM)) for p in MSMODELSLIM.glob("v?/*/*"))


@pytest.mark.parametrize("mode", MODES)
def test_every_genuine_folder_converts_to_its_model(tmp_path, mode):
    version, dtype, _ = mode.split("/")
    source = model_folder(tmp_path / "a", mode, "qwen3_bf16" if version == "v1" else f"qwen2_{dtype}")
    here = logits(source)
    bar = (
        0.05 if mode.endswith("smooth") else 0.01
    )  # smoothed: the rest of a shift for which the architecture has no bias
    for to, out in (("hf", tmp_path / "b"), ("gguf", tmp_path / "b.gguf")):
        polyquant.convert(source, out, to=to)
        assert far(logits(out), here) < bar


def test_dropping_the_shift_changes_the_model(tmp_path):
    """The bar above notices a shift that is lost."""
    source = model_folder(tmp_path / "a", "v0/fp16/w8a8s_lowbit_smooth", "qwen2_fp16")
    polyquant.convert(source, tmp_path / "out", to="hf")
    tensors = load_file(tmp_path / "out/model.safetensors")
    bias = "model.layers.0.self_attn.q_proj.bias"
    stored = genuine("v0/fp16/w8a8s_lowbit_smooth")[bias].astype(np.float32)
    floats = load_file(MSMODELSLIM / "models/qwen2_fp16/model.safetensors")[bias].astype(np.float32)
    assert np.abs(stored - floats).max() > 0.5
    assert np.abs(tensors[bias] - floats).max() < 0.2


def test_a_shifted_norm_elsewhere_is_refused(tmp_path):
    source = model_folder(tmp_path / "a", "v1/fp32/w8a8_smoothasym_c8", "qwen3_bf16")
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.bias"] = np.ones(96, np.float32)
    save_file(tensors, file)
    said = json.loads((source / "quant_model_description.json").read_text())
    (source / "quant_model_description.json").write_text(json.dumps({**said, "model.norm.bias": "FLOAT"}))
    with pytest.raises(UnsupportedError, match="no linear layer follows it"):
        polyquant.plan(source, "hf")


NORM = "model.layers.0.post_attention_layernorm"


def with_tensors(source, change):
    """The folder with other tensors; change(tensors, description)."""
    (file,), (said,) = source.glob("quant_model_weight*"), source.glob("quant_model_description*")
    tensors, description = load_file(file), json.loads(said.read_text())
    change(tensors, description)
    save_file(tensors, file)
    said.write_text(json.dumps({k: v for k, v in description.items() if k in tensors or "." not in k}))
    return source


@pytest.mark.parametrize("float_layers", [(), ("gate_proj", "up_proj"), ("up_proj",)])
def test_a_duplicated_norm_with_different_values(tmp_path, float_layers):
    """The document: norm.weight is unchanged for layers that stay float."""

    def change(tensors, description):
        tensors[f"{NORM}.weight"] = tensors[f"{NORM}.weight"] * np.float16(2)
        for layer in float_layers:
            stem = f"model.layers.0.mlp.{layer}."
            for name in [n for n in tensors if n.startswith(stem)]:
                del tensors[name]
            tensors[f"{stem}weight"] = np.ones((160, 96), np.float16)
            description[f"{stem}weight"] = "FLOAT"

    source = with_tensors(model_folder(tmp_path / "a", "v0/fp16/w8a8_m1", "qwen2_fp16"), change)
    smoothed = genuine("v0/fp16/w8a8_m1")[f"{NORM}.weight"]
    if len(float_layers) == 1:
        with pytest.raises(UnsupportedError, match="need different copies of it"):
            polyquant.plan(source, "hf")
        return
    polyquant.convert(source, tmp_path / "b", to="hf")
    found = load_file(tmp_path / "b/model.safetensors")[f"{NORM}.weight"]
    np.testing.assert_array_equal(found, smoothed * np.float16(2) if float_layers else smoothed)


@pytest.mark.parametrize("mode", ["v0/fp16/w8a8", "v0/fp16/w8a8_per_tensor"])
def test_biases_stored_only_in_quant_bias(tmp_path, mode):
    def change(tensors, description):
        for name in [n for n in tensors if n.endswith("q_proj.bias")]:
            del tensors[name]

    source = with_tensors(model_folder(tmp_path / "a", mode, "qwen2_fp16"), change)
    report = polyquant.convert(source, tmp_path / "b", to="hf")
    assert any("2 biases were only included in quant_bias" in w for w in report.warnings)
    found = load_file(tmp_path / "b/model.safetensors")
    bias = "model.layers.1.self_attn.q_proj.bias"
    deq = genuine(mode)[f"{bias[:-5]}.deq_scale"].astype(np.uint32).view(np.float32)
    wanted = genuine(mode)[bias].astype(np.float32)
    assert (np.abs(found[bias] - wanted) <= 0.51 * deq + 1e-3).all()
    assert np.abs(wanted).max() > 0.05
    assert far(logits(tmp_path / "b"), logits(MSMODELSLIM / "models/qwen2_fp16")) < 0.05


def test_shifts_of_an_unknown_architecture_are_kept_with_a_note(tmp_path):
    source = model_folder(tmp_path / "a", "v0/fp16/w8a8s_lowbit_smooth", "qwen2_fp16")
    (source / "config.json").write_text('{"model_type": "strange", "torch_dtype": "float16"}')
    report = polyquant.convert(source, tmp_path / "b", to="hf")
    assert sum("architecture is unknown" in w for w in report.warnings) == 4
    assert f"{NORM}.bias" in load_file(tmp_path / "b/model.safetensors")


def test_into_trellis_via_floats(tmp_path):
    source = model_folder(tmp_path / "a", "v0/fp16/w8a16", "qwen2_fp16")
    with pytest.raises(PlanError, match="already quantized"):
        polyquant.plan(source, "trellis-v3", bits=4)
    report = polyquant.convert(source, tmp_path / "out", to="trellis-v3", bits=4, effort="fast", requantize=True)
    assert sum(s.target.startswith("trellis.4") for s in report.steps) == 14
    assert far(logits(tmp_path / "out"), logits(source)) < 0.35
