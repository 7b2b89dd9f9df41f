"""Folders of quantization schemes that are not decoded: inspect shows them, all other commands refuse them by name."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import packers
import polyquant
from format_modules import hf
from polyquant.errors import UnsupportedError
from polyquant.opening import open_checkpoint
from polyquant.types import Severity

UP = "model.layers.0.mlp.up_proj"
EXPERTS = "model.layers.0.mlp.experts"
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
FP8, BYTES = np.ones((32, 64), E4M3), np.ones((32, 32), np.uint8)
MLX4 = {"bits": 4, "group_size": 64, "mode": "fp4x"}


def parts(stem=UP, **tensors):
    return {f"{stem}.{part.replace('__', '.')}": array for part, array in tensors.items()}


def floats(*shape):
    return np.ones(shape, np.float32)


def said(method, **more):
    return {"quantization_config": {"quant_method": method, **more}}


def compressed(layout, bits, **more):
    group = {"format": layout, "weights": {"num_bits": bits}}
    return said("compressed-tensors", format=layout, config_groups={"group_0": group}, **more)


MLX = parts(weight=np.ones((32, 8), np.uint32), scales=floats(32, 1).astype(BF16), biases=floats(32, 1).astype(BF16))
NF4 = {
    **parts(weight=np.ones((1024, 1), np.uint8), weight__absmax=floats(32), weight__quant_map=floats(16)),
    f"{UP}.weight.quant_state.bitsandbytes__nf4": np.ones(80, np.uint8),
}
INT8 = parts(weight=np.ones((32, 64), np.int8), SCB=floats(32), weight_format=np.zeros((), np.uint8))
SCALED = parts(weight=FP8, weight_scale=floats(), input_scale=floats())
NVFP4 = parts(weight=BYTES, weight_scale=np.ones((32, 4), E4M3), weight_scale_2=floats())
PACKED4 = parts(weight_packed=BYTES, weight_scale=np.ones((32, 4), E4M3), weight_global_scale=floats(1))
INT3 = parts(weight_packed=np.ones((32, 6), np.int32), weight_scale=floats(32, 2), weight_shape=np.array([32, 64]))
BLOCKS = {
    f"{EXPERTS}.down_proj_blocks": np.ones((4, 64, 3, 16), np.uint8),
    f"{EXPERTS}.down_proj_scales": np.ones((4, 64, 3), np.uint8),
}
TORCHAO = parts(_weight_qdata=np.ones((32, 64), np.int8), _weight_scale=floats(32, 2).astype(BF16))
QUANTO = parts(weight___data=np.ones((32, 64), np.int8), weight___scale=floats(32, 1))
QUANTO = {name.replace("weight._", "weight.__").replace("__", "_"): a for name, a in QUANTO.items()}
GPTQ = {f"{UP}.{p}": a for p, a in packers.gptq(*packers.some_codes(0, 32, 64, 2, 4), 4).items()}
POWERS = parts(weight=FP8, weight_scale_inv=np.ones((1, 1), np.uint8))

SCHEMES = {  # name: (config, tensors, scheme, the scheme recognised from the tensors alone)
    "modelopt fp8": (said("modelopt", quant_algo="FP8"), SCALED, "modelopt FP8", "8-bit floats with weight_scale"),
    "modelopt nvfp4": (said("modelopt", quant_algo="NVFP4"), NVFP4, "modelopt NVFP4", "ModelOpt nvfp4"),
    "mlx": ({"quantization": MLX4, "quantization_config": MLX4}, MLX, "MLX 4-bit fp4x, group 64",
        "MLX codes, U32 with scales"),
    "nf4": (said("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"), NF4, "bitsandbytes nf4",
        "bitsandbytes nf4"),
    "llm.int8": (said("bitsandbytes", load_in_8bit=True), INT8, "bitsandbytes int8", "bitsandbytes int8"),
    "gpt-oss": ({"model_type": "gpt_oss", **said("mxfp4")}, BLOCKS, "gpt-oss mxfp4", "mxfp4 blocks"),
    "compressed nvfp4": (compressed("nvfp4-pack-quantized", 4), PACKED4, "compressed-tensors nvfp4-pack-quantized",
        "compressed-tensors nvfp4"),
    "compressed 3-bit": (compressed("pack-quantized", 3), INT3, "compressed-tensors 3-bit pack-quantized",
        "compressed-tensors packed codes"),
    "compressed mxfp8": (compressed("mxfp8-quantized", 8), parts(weight=FP8, weight_scale=np.ones((32, 2), np.uint8)),
                         "compressed-tensors mxfp8-quantized", "8-bit floats with weight_scale"),
    "torchao": (said("torchao", quant_type={"default": {"_type": "Int4WeightOnlyConfig"}}), TORCHAO,
        "torchao Int4WeightOnlyConfig", "torchao"),
    "quanto": (said("quanto", weights="int8"), QUANTO, "quanto", "quanto"),
    "auto-round": (said("auto-round", bits=4, group_size=128), GPTQ, "auto-round 4-bit, group 128",
        "GPTQ or AWQ codes"),
    "fp8, powers of two": (said("fp8", weight_block_size=[128, 128]), POWERS, "fp8 with power-of-two scales",
        "8-bit floats with weight_scale_inv"),
}  # fmt: skip
DECODED = {
    "gpt-oss",
    "nf4",
    "llm.int8",
    "torchao",
    "modelopt fp8",
    "modelopt nvfp4",
    "compressed 3-bit",
    "compressed nvfp4",
    "compressed mxfp8",
    "fp8, powers of two",
}  # with quantization_config at the top level of config.json


def folder(path, tensors, config):
    path.mkdir(parents=True, exist_ok=True)
    norm = {"model.norm.weight": np.ones(64, np.float32)}
    save_file({n: np.array(a, order="C") for n, a in {**norm, **tensors}.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2", **config}))
    (path / "tokenizer.json").write_text("{}")
    return path


def refused(path, scheme, code):
    """Everything except inspecting is refused."""
    uses = [
        lambda: open_checkpoint(path),
        lambda: polyquant.plan(path, "gguf", codec="f16"),
        lambda: polyquant.plan(path, "hf"),
        lambda: polyquant.convert(path, path.parent / "out.gguf", codec="q8_0", requantize=True),
        lambda: polyquant.load(path),
        lambda: polyquant.compare(path, path),
    ]
    for use in uses:
        with pytest.raises(UnsupportedError) as e:
            use()
        assert f"unsupported quantization scheme: {scheme}" in str(e.value)
        assert str(path) in str(e.value) and "\n" not in str(e.value) and "codec" not in e.value.hint
    assert not (path.parent / "out.gguf").exists()
    assert any(scheme in note for note in polyquant.inspect(path).notes)
    found = [f for f in polyquant.validate(path) if f.severity is Severity.ERROR]
    assert [f.code for f in found] == [code] and scheme in str(found[0])


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - DECODED))
def test_schemes_in_config_are_rejected_by_name(tmp_path, name):
    config, tensors, scheme, _ = SCHEMES[name]
    refused(folder(tmp_path / "m", tensors, config), scheme, "HF061")


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_missing_in_config_are_rejected_too(tmp_path, name):
    _, tensors, _, betrayed = SCHEMES[name]
    refused(folder(tmp_path / "m", tensors, {}), betrayed, "HF065")


@pytest.mark.parametrize("name", SCHEMES)
def test_inner_configs_name_the_scheme(tmp_path, name):
    config, tensors, scheme, _ = SCHEMES[name]
    inner = {"text_config": {"model_type": config.get("model_type", "qwen2"), **config}}
    said_so = "fp8" if name.startswith("fp8") else scheme.replace(" 3-bit", "")
    refused(folder(tmp_path / "m", tensors, inner), said_so, "HF061")


@pytest.mark.parametrize("name", SCHEMES)
def test_a_single_file_is_rejected(tmp_path, name):
    config, tensors, _, betrayed = SCHEMES[name]
    path = folder(tmp_path / "m", tensors, config) / "model.safetensors"
    with pytest.raises(UnsupportedError, match=f"scheme: {betrayed}.*open its folder"):
        open_checkpoint(path)
    assert "HF065" in {f.code for f in hf.check(path)}
    assert polyquant.inspect(path).tensors


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - DECODED))
def test_opening_gives_stored_arrays_but_no_values(tmp_path, name):
    config, tensors, scheme, _ = SCHEMES[name]
    checkpoint = polyquant.open(folder(tmp_path / "m", tensors, config))
    assert set(checkpoint) == {*tensors, "model.norm.weight"}
    assert checkpoint["model.norm.weight"].dequantize().tolist() == [1] * 64
    for key, array in tensors.items():
        w = checkpoint[key]
        assert (w.shape, w.nbytes) == (array.shape, array.nbytes)
        assert w.read()["blocks"].tobytes() == array.tobytes()
        if array.dtype.name not in ("float32", "bfloat16", "float16"):
            with pytest.raises(UnsupportedError, match=scheme.split(",")[0]):
                w.dequantize()


# ---------------------------------------------------------------- schemes declared elsewhere


def test_modelopt_has_a_separate_file(tmp_path):
    path = folder(tmp_path / "m", SCALED, {})
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert str(open_checkpoint(path)[f"{UP}.weight"].codec) == "fp8.e4m3.tensor.f32.static"
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    refused(folder(path, parts(weight=BYTES, weight_scale=floats(64, 2)), {}), "modelopt W4A8_AWQ", "HF061")


def test_a_named_scheme_is_refused_for_any_tensors(tmp_path):
    path = folder(tmp_path / "m", parts(weight=floats(32, 64)), said("vptq"))
    with pytest.raises(UnsupportedError, match="scheme: vptq"):
        open_checkpoint(path)


def test_rotated_weights_are_refused(tmp_path):
    scaled = parts(weight=np.ones((32, 64), np.int8), weight_scale=floats(32, 1))
    turned = compressed("int-quantized", 8, transform_config={"config_groups": {"R1": {"type": "hadamard"}}})
    with pytest.raises(UnsupportedError, match="compressed-tensors with transforms"):
        open_checkpoint(folder(tmp_path / "a", scaled, turned))
    assert open_checkpoint(folder(tmp_path / "b", scaled, compressed("int-quantized", 8, transform_config={})))


def test_mixtures_with_an_undecoded_scheme_are_refused(tmp_path):
    tensors = {**parts(weight=FP8, weight_scale=floats(32, 1)), **parts("x", weight=np.ones((32, 8), np.uint32))}
    tensors |= parts("y", weight=FP8) | {"model.layers.0.mlp.experts.up": np.ones((2, 8, 8), E4M3)}
    path = folder(tmp_path / "m", {n: a for n, a in tensors.items() if not n.startswith("y")}, said("fbgemm_fp8"))
    with pytest.raises(UnsupportedError, match=r"x\.weight: unsupported quantization scheme: integers, U32"):
        open_checkpoint(path)
    codecs = {n: str(w.codec) for n, w in polyquant.open(path).items()}
    assert codecs[f"{UP}.weight"] == "fp8.e4m3.f32"
    assert codecs["x.weight"] == "undecoded.u32" and codecs["model.layers.0.mlp.experts.up"] == "undecoded.f8_e4m3"


def test_mixed_formats_of_compressed_tensors(tmp_path):
    codes, _, scales = packers.some_codes(1, 32, 64, 2, 4)
    packed = {f"a.{p}": t for p, t in packers.compressed(codes - 8, scales, 4).items()}
    whole = parts("b", weight=np.ones((32, 64), np.int8), weight_scale=floats(32, 1))
    inputs = {"input_activations": {"dynamic": True, "num_bits": 8, "type": "int"}}
    groups = {"group_0": {"format": "pack-quantized"}, "group_1": {"format": "int-quantized", **inputs}}
    mixed = said("compressed-tensors", format="mixed-precision", config_groups=groups)
    checkpoint = open_checkpoint(folder(tmp_path / "m", {**packed, **whole}, mixed))
    assert {n: str(checkpoint[n].codec) for n in ("a.weight", "b.weight")} == {
        "a.weight": "compressed.p4.g32.f32", "b.weight": "compressed.i8.f32.dynamic",
    }  # fmt: skip
    np.testing.assert_array_equal(
        checkpoint["a.weight"].dequantize(), (codes - 8).astype(np.float32) * np.repeat(scales, 32, 1)
    )
    groups["group_2"] = {"format": "nvfp4-pack-quantized"}
    checkpoint = open_checkpoint(folder(tmp_path / "n", {**packed, **PACKED4}, mixed))
    assert str(checkpoint[f"{UP}.weight"].codec) == "hf_nvfp4.div"


def test_scales_next_to_float_weights(tmp_path):
    """They may be applied already or not."""
    path = folder(tmp_path / "m", parts(weight=floats(32, 64), weight_scale_inv=floats(1, 1)), {})
    refused(path, "floats with weight_scale_inv", "HF065")


# ---------------------------------------------------------------- unquantized models


@pytest.mark.parametrize("config", [
    {}, {"quantization_config": None}, {"quantization_config": {}}, {"quantization": None}, {"quantization": False},
    said("modelopt", quant_algo=None, kv_cache_quant_algo="FP8"),
    {"quantization_config": {"load_in_8bit": False, "load_in_4bit": False}},
])  # fmt: skip
def test_float_models_open(tmp_path, config):
    tensors = parts(weight=floats(32, 64), bias=floats(32))
    tensors |= parts("model.layers.0.attn", bias=np.ones((1, 1, 4, 4), np.uint8), k_scale=floats())
    tensors |= {
        "model.position_ids": np.arange(8)[None],
        "scores": np.ones((4, 4), np.int8),
        "relative_index": np.ones((4, 4), np.int32),
    }
    checkpoint = open_checkpoint(folder(tmp_path / "m", tensors, config))
    assert set(checkpoint) == {*tensors, "model.norm.weight"} and checkpoint.undecoded is None


def test_8_bit_floats_without_scales_are_values(tmp_path):
    path = folder(tmp_path / "m", parts(weight=(np.arange(2048) % 7).reshape(32, 64).astype(E4M3)), {})
    assert open_checkpoint(path)[f"{UP}.weight"].dequantize().max() == 6


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "bool"])
def test_integers_are_not_weights(tmp_path, dtype):
    path = folder(tmp_path / "m", parts(weight=np.ones((32, 64), dtype)), {})
    with pytest.raises(UnsupportedError, match="integers, "):
        open_checkpoint(path)


ODD = [
    {"quantization_config": value}
    for value in ([], "x", 3, {"quant_method": []}, {"quant_method": {"a": 1}}, {"quant_method": "\x1b[2J\n"})
]
ODD += [
    {"quantization": {"bits": True, "group_size": 1}},
    {"a": {"b": {"c": {"d": said("x")}}}},
    {"compression_config": {"quant_method": 1 << 90}},
]
ODD += [
    said("torchao", quant_type=[1]),
    said("torchao", quant_type={"default": 3}),
    said("bitsandbytes", load_in_4bit=[1], bnb_4bit_quant_type={}),
]


@pytest.mark.parametrize("config", ODD)
def test_odd_configs(tmp_path, config):
    path = folder(tmp_path / "m", MLX, config)
    with pytest.raises(UnsupportedError) as e:
        open_checkpoint(path)
    assert str(e.value).isprintable()
    assert all(str(f).isprintable() for f in hf.check(path))
