"""ModelOpt's INT4 AWQ folders: values of the library, codes kept, factors of the inputs, broken folders."""

import hashlib
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import hub_vectors
import polyquant
from polyquant.errors import InputError, PlanError, PolyquantError, UnsupportedError
from polyquant.types import Affine

CASE = "modelopt-int4-awq"
GOLDEN = hub_vectors.hashes("modelopt_int4")[CASE]
LAYER = "model.layers.0"
Q, DOWN = f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.down_proj"
PLAIN = "model.layers.0.self_attn.{}_proj"


def folder(path, change=lambda tensors: tensors, **settings):
    """The golden folder, changed."""
    path.mkdir()
    source = hub_vectors.folder(CASE)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] |= settings
    (path / "config.json").write_text(json.dumps(config))
    save_file(change(load_file(source / "model.safetensors")), path / "model.safetensors")
    return path


def without_factors(tensors):
    return {name: t for name, t in tensors.items() if DOWN not in name}


@pytest.mark.parametrize("name", GOLDEN)
def test_values_are_those_of_the_library(name):
    weight = polyquant.open(hub_vectors.folder(CASE))[name]
    parts = {key: np.asarray(part) for key, part in weight.read().items()}
    codes = weight.codec.codes_of(parts, weight.shape, slice(0, weight.shape[0])).astype(np.float32)
    scale = np.repeat(parts["weight_scale"], 128, 1)
    assert hashlib.sha256((codes * scale).tobytes()).hexdigest() == GOLDEN[name]
    factors = parts.get("pre_quant_scale", np.ones(1)).astype(np.float32)
    np.testing.assert_array_equal(weight.dequantize(), codes * (scale * factors))
    np.testing.assert_array_equal(weight.dequantize(rows=slice(3, 8)), weight.dequantize()[3:8])
    assert weight.codec.name == ("modelopt.int4.g128.pre" if name.startswith(DOWN) else "modelopt.int4")


def test_writing_gives_the_same_folder(tmp_path):
    source, out = hub_vectors.folder(CASE), tmp_path / "out"
    report = polyquant.convert(source, out, to="modelopt", allow_unknown=True)
    assert {step.action for step in report.steps} == {"copy"}
    have, want = (load_file(f / "model.safetensors") for f in (out, source))
    assert {n: t.tobytes() for n, t in have.items()} == {n: t.tobytes() for n, t in want.items()}
    described, stated = (json.loads((f / "hf_quant_config.json").read_text())["quantization"] for f in (out, source))
    assert described | {"exclude_modules": None} == stated | {"exclude_modules": None}
    ours, theirs = (json.loads((f / "config.json").read_text())["quantization_config"] for f in (out, source))
    assert ours | {"ignore": None} == theirs | {"ignore": None}


@pytest.mark.parametrize(("to", "codec"), [("compressed-tensors", "compressed.p4.f32"), ("mlx", "mlx.4.g128.f32")])
def test_codes_are_kept_and_come_back(to, codec, tmp_path):
    source = folder(tmp_path / "source", without_factors)
    polyquant.convert(source, tmp_path / "other", to=to, allow_unknown=True)
    have, made = polyquant.open(source), polyquant.open(tmp_path / "other")
    for name in (f"{Q}.weight", PLAIN.format("k") + ".weight"):
        assert made[name].codec.name == codec
        near = 0 if to == "compressed-tensors" else 1e-7  # mlx adds a bias, and rounds twice
        np.testing.assert_allclose(made[name].dequantize(), have[name].dequantize(), rtol=0, atol=near)
    polyquant.convert(tmp_path / "other", tmp_path / "back", to="modelopt", allow_unknown=True)
    (want, got) = (load_file(f / "model.safetensors") for f in (source, tmp_path / "back"))
    assert want[f"{Q}.weight"].tobytes() == got[f"{Q}.weight"].tobytes()
    assert want[f"{Q}.weight_scale"].tobytes() == got[f"{Q}.weight_scale"].tobytes()


def test_factors_are_not_dropped(tmp_path):
    """No other packing has a factor per column: refused, unless these weights become floats."""
    source = hub_vectors.folder(CASE)
    with pytest.raises(PlanError, match="already quantized"):
        polyquant.convert(source, tmp_path / "a", to="compressed-tensors", allow_unknown=True)
    polyquant.convert(
        source, tmp_path / "b", to="compressed-tensors", rules=("*.down_proj.weight=f32",), allow_unknown=True
    )
    have, made = polyquant.open(source), polyquant.open(tmp_path / "b")
    np.testing.assert_array_equal(made[f"{DOWN}.weight"].dequantize(), have[f"{DOWN}.weight"].dequantize())
    assert made[f"{Q}.weight"].codec.name == "compressed.p4.f32"
    with pytest.raises(UnsupportedError, match="read-only"):
        have[f"{DOWN}.weight"].codec.quantize(np.ones((2, 128), np.float32))
    with pytest.raises(UnsupportedError, match="read-only"):
        codes = Affine(4, np.zeros((2, 128), np.int8), np.ones((2, 1), np.float32), np.zeros((2, 1), np.float32))
        have[f"{DOWN}.weight"].codec.pack(codes)


def test_quantized_from_floats(tmp_path):
    rng = np.random.default_rng(1)
    source = tmp_path / "source"
    source.mkdir()
    save_file({f"{Q}.weight": rng.standard_normal((32, 128)).astype(np.float32)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    report = polyquant.quantize(source, tmp_path / "q", to="modelopt", codec="modelopt.int4.g32", allow_unknown=True)
    assert report.steps[0].error.rrmse < 0.12
    described = json.loads((tmp_path / "q/hf_quant_config.json").read_text())["quantization"]
    assert (described["quant_algo"], described["group_size"]) == ("W4A16_AWQ", 32)


def with_factors_for_floats(tensors):
    scale = np.ones((128, 8), ml_dtypes.float8_e4m3fn)
    fp4 = {f"{Q}.weight_scale": scale, f"{Q}.weight_scale_2": np.ones(1, np.float32)}
    fp4 |= {f"{Q}.weight": np.zeros((128, 64), np.uint8), f"{Q}.pre_quant_scale": np.ones(128, ml_dtypes.bfloat16)}
    return {name: t for name, t in tensors.items() if Q not in name} | fp4


@pytest.mark.parametrize(
    ("change", "settings", "error", "match"),
    [
        (lambda t: t | {f"{Q}.weight_scale": np.ones((128, 3), np.float32)}, {}, InputError, "do not divide"),
        (lambda t: t | {f"{Q}.weight_scale": np.ones((64, 1), np.float32)}, {}, InputError, "weight_scale does not"),
        (lambda t: t | {f"{Q}.weight": np.zeros((64, 0), np.uint8)}, {}, InputError, "unexpected shape"),
        (lambda t: t | {f"{DOWN}.pre_quant_scale": np.ones(128, np.float32)}, {}, InputError, "quant_scale does not"),
        (lambda t: t | {f"{DOWN}.pre_quant_scale": np.ones(256, np.int32)}, {}, InputError, "unsupported dtype"),
        (lambda t: t, {"quant_algo": "W4A8_AWQ"}, UnsupportedError, "modelopt W4A8_AWQ"),
        (with_factors_for_floats, {"quant_algo": "NVFP4_AWQ"}, UnsupportedError, "NVFP4_AWQ with pre_quant_scale"),
    ],
)  # fmt: skip
def test_broken_and_other_folders(change, settings, error, match, tmp_path):
    path = folder(tmp_path / "m", change, **settings)
    with pytest.raises(error, match=match) as raised:
        polyquant.plan(path, "hf", codec="f16", allow_unknown=True)
    assert "\n" not in str(raised.value)
    with pytest.raises(PolyquantError):
        polyquant.load(path)


def test_groups_of_several_sizes_are_a_mix(tmp_path):
    source = folder(tmp_path / "m", lambda t: {n: a for n, a in t.items() if "q_proj" in n or "down" in n})
    rules = ("*.q_proj.weight=modelopt.int4.g32", "*.down_proj.weight=modelopt.int4.g64")
    polyquant.convert(source, tmp_path / "o", to="modelopt", rules=rules, requantize=True, allow_unknown=True)
    settings = json.loads((tmp_path / "o" / "config.json").read_text())["quantization_config"]
    assert settings["quant_algo"] == "MIXED_PRECISION"
    sizes = {name.rpartition(".")[2]: layer["group_size"] for name, layer in settings["quantized_layers"].items()}
    assert sizes == {"q_proj": 32, "down_proj": 64}
    codecs = {w.codec.name for w in polyquant.open(tmp_path / "o").values()}
    assert {"modelopt.int4.g32", "modelopt.int4.g64"} <= codecs
