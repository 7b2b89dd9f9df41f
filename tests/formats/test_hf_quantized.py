"""Folders of GPTQ, AWQ, compressed-tensors and ChatGLM checkpoints: opened, checked, refused."""

import json
import math
import shutil
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import packers
from format_modules import hf
from golden import VECTORS
from polyquant.errors import InputError
from polyquant.formats.huggingface.quantized import method_of
from polyquant.types import Affine

MSMODELSLIM = VECTORS / "msmodelslim"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def compressed(layout, **inputs):
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}, "input_activations": inputs or None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


DYNAMIC = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}


def folder(path, tensors, quantization, **config):
    path.mkdir(parents=True, exist_ok=True)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, path / "model.safetensors")
    said = {"quantization_config": quantization} if quantization else {}
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2", **said, **config}))
    (path / "tokenizer.json").write_text("{}")
    return path


def codes_of(path):
    return {f.code for f in hf.check(path)}


def grouped(codes, zeros, scales):
    n, k = codes.shape
    return (
        ((codes.reshape(n, scales.shape[1], -1) - zeros[:, :, None]) * scales[:, :, None])
        .reshape(n, k)
        .astype(np.float32)
    )


# ---------------------------------------------------------------- genuine exports


EXPORTS = [
    ("w4a16_g32_to_gptq", "w4a16_g32", GPTQ, "gptq.4.g32.f32"),
    ("w8a16_g32_asym_to_gptq", "w8a16_g32_asym", {**GPTQ, "bits": 8}, "gptq.8.g32.f32"),
    ("w4a16_g32_to_awq", "w4a16_g32", AWQ, "awq.4.g32.f32"),
]


@pytest.mark.parametrize(("export", "mode", "quantization", "codec"), EXPORTS)
def test_exports_of_the_tool_decode_correctly(tmp_path, export, mode, quantization, codec):
    tensors = load_file(MSMODELSLIM / "export" / f"{export}.safetensors")
    if quantization["quant_method"] == "gptq":  # its GPTQ export cuts off zeros of 48 outputs
        cut = [n.removesuffix(".qzeros") for n in tensors if "k_proj.qz" in n or "v_proj.qz" in n]
        tensors = {n: a for n, a in tensors.items() if n.rpartition(".")[0] not in cut}
    origin = load_file(next((MSMODELSLIM / "v0/fp16" / mode).glob("quant_model_weight*.safetensors")))
    path = folder(tmp_path / "m", tensors, quantization)
    checkpoint = hf.open(path)
    linears = [w for w in checkpoint.values() if w.codec.form is Affine]
    assert len(linears) == (10 if quantization["quant_method"] == "gptq" else 14)
    for w in linears:
        assert w.codec.name == codec
        stem = w.name.removesuffix("weight")
        scale, offset = origin[f"{stem}weight_scale"], origin[f"{stem}weight_offset"]
        want = grouped(origin[w.name].astype(np.float32), offset.astype(np.float32), scale.astype(np.float32))
        np.testing.assert_array_equal(w.dequantize(), want)
        assert f"{stem}qweight" not in checkpoint
    assert not codes_of(path)


def test_the_export_with_truncated_zeros_is_refused_and_reported(tmp_path):
    path = folder(tmp_path / "m", load_file(MSMODELSLIM / "export/w4a16_g32_to_gptq.safetensors"), GPTQ)
    with pytest.raises(InputError, match=r"qzeros does not fit.*expected I32 \[3, 6\].*found I32 \[3, 4\]"):
        hf.open(path)
    findings = [f for f in hf.check(path) if f.code == "HF063"]
    assert len(findings) == 4
    assert all("k_proj" in f.tensor or "v_proj" in f.tensor for f in findings)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_chatglm(tmp_path, bits, file):
    shutil.copytree(MSMODELSLIM / f"chatglm2/int{bits}", tmp_path / "m", copy_function=shutil.copyfile)
    (tmp_path / "m" / ({"model.safetensors", "pytorch_model.bin"} - {file}).pop()).unlink()
    checkpoint, floats = hf.open(tmp_path / "m"), hf.open(MSMODELSLIM / "chatglm2/float")
    assert set(checkpoint) == set(floats)
    quantized = [w for w in checkpoint.values() if w.codec.name == f"chatglm.{bits}"]
    assert len(quantized) == 8
    for w in quantized:
        assert w.shape == floats[w.name].shape
        scale = w.parts["weight_scale"].astype(np.float32)[:, None]
        miss = np.abs(w.dequantize() - floats[w.name].dequantize())
        assert (miss <= 0.65 * scale).all()  # half a step, plus the error of its quantizer's half-precision division


# ---------------------------------------------------------------- folders of reference packers


def module(codes, zeros, scales, kind, **options):
    pack = {"gptq": packers.gptq, "awq": packers.awq, "compressed": packers.compressed}[kind]
    return {f"model.layers.0.mlp.up_proj.{part}": a for part, a in pack(codes, zeros, scales, **options).items()}


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("ordered", [False, True])
def test_g_idx_decides_instead_of_desc_act(tmp_path, ordered):
    codes, zeros, scales = packers.some_codes(0, 32, 64, 2, 4)
    g_idx = np.arange(64) // 32
    g_idx = g_idx[::-1] if ordered else g_idx
    tensors = module(codes, zeros, scales, "gptq", bits=4, g_idx=g_idx)
    w = hf.open(folder(tmp_path / "m", tensors, {**GPTQ, "desc_act": True}))[f"{UP}.weight"]
    assert w.codec.name == ("gptq.4.g32.act" if ordered else "gptq.4.g32")
    assert set(w.arrays) == {"qweight", "qzeros", "scales", *(["g_idx"] if ordered else [])}
    np.testing.assert_array_equal(w.dequantize(), (codes - zeros[:, g_idx]).astype(np.float32) * scales[:, g_idx])


def test_a_module_may_override_the_bits_of_the_config(tmp_path):
    codes, zeros, scales = packers.some_codes(0, 32, 64, 2, 8)
    tensors = module(codes, zeros, scales, "gptq", bits=8, g_idx=np.arange(64) // 32, v2=True)
    w = hf.open(folder(tmp_path / "m", tensors, {**GPTQ, "checkpoint_format": "gptq_v2"}))[f"{UP}.weight"]
    assert w.codec.name == "gptq.8.g32.v2"
    np.testing.assert_array_equal(w.dequantize(), grouped(codes, zeros, scales))


@pytest.mark.parametrize(("kind", "file", "said"), [
    ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
    ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
])  # fmt: skip
def test_early_tools_wrote_a_separate_file(tmp_path, kind, file, said):
    codes, zeros, scales = packers.some_codes(0, 32, 64, 2, 4)
    path = folder(tmp_path / "m", module(codes, zeros, scales, kind, **({"bits": 4} if kind == "gptq" else {})), None)
    (path / file).write_text(json.dumps(said))
    checkpoint = hf.open(path)
    assert checkpoint[f"{UP}.weight"].codec.name == f"{kind}.4.g32"
    np.testing.assert_array_equal(checkpoint[f"{UP}.weight"].dequantize(), grouped(codes, zeros, scales))
    assert not codes_of(path)
    (path / file).write_text("[]")
    with pytest.raises(InputError, match=file):
        hf.open(path)
    assert "HF031" in codes_of(path)


@pytest.mark.parametrize("zeros_too", [False, True])
def test_compressed_tensors_packed(tmp_path, zeros_too):
    codes, zeros, scales = packers.some_codes(1, 20, 60, 2, 4)
    parts = packers.compressed(codes - 8, scales, 4, zeros - 8 if zeros_too else None)
    tensors = {f"{UP}.{part}": a for part, a in parts.items()}
    checkpoint = hf.open(folder(tmp_path / "m", tensors, compressed("pack-quantized")))
    w = checkpoint[f"{UP}.weight"]
    assert list(checkpoint) == [f"{UP}.weight"]
    assert (w.codec.name, w.shape) == (f"compressed.p4.g30{'.zpp' * zeros_too}.f32", (20, 60))
    np.testing.assert_array_equal(
        w.dequantize(), grouped(codes, zeros if zeros_too else np.full_like(zeros, 8), scales)
    )


@pytest.mark.parametrize(("inputs", "name"), [({}, "compressed.i8.f32"), (DYNAMIC, "compressed.i8.f32.dynamic")])
def test_compressed_tensors_int8(tmp_path, inputs, name):
    codes, _, scales = packers.some_codes(2, 20, 30, 1, 8)
    tensors = {f"{UP}.weight": (codes - 128).astype(np.int8), f"{UP}.weight_scale": scales, "lm_head.weight": scales}
    checkpoint = hf.open(folder(tmp_path / "m", tensors, compressed("int-quantized", **inputs)))
    assert {n: w.codec.name for n, w in checkpoint.items()} == {f"{UP}.weight": name, "lm_head.weight": "f32"}
    assert not checkpoint.notes


def test_static_input_scales_of_another_dtype_are_dropped_with_a_note(tmp_path):
    codes, _, scales = packers.some_codes(2, 20, 30, 1, 8)
    tensors = {f"{UP}.weight": (codes - 128).astype(np.int8), f"{UP}.weight_scale": scales}
    tensors |= {f"{UP}.input_scale": np.ones(1, np.float16), f"{UP}.input_zero_point": np.zeros(1, np.int8)}
    said = compressed("int-quantized", num_bits=8, type="int", dynamic=False)
    checkpoint = hf.open(folder(tmp_path / "m", tensors, said))
    assert {n: w.codec.name for n, w in checkpoint.items()} == {f"{UP}.weight": "compressed.i8.f32"}
    assert any("2 static input scales are omitted" in note for note in checkpoint.notes)


# ---------------------------------------------------------------- unsupported and broken folders


ODD = [
    {"quant_method": ["gptq"]},
    {"quant_method": {"gptq": 1}},
    {"quant_method": None},
    {**GPTQ, "bits": True},
    {**GPTQ, "bits": [4]},
    {**GPTQ, "checkpoint_format": {}},
    {**AWQ, "version": []},
    {**AWQ, "bits": {}},
    {"quant_method": "compressed-tensors", "format": ["pack-quantized"]},
    {"quant_method": "compressed-tensors", "config_groups": [1]},
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"format": [], "input_activations": 3}}},
]


@pytest.mark.parametrize("said", ODD)
def test_odd_configs_give_weights_or_one_error(tmp_path, said):
    codes, zeros, scales = packers.some_codes(3, 32, 64, 2, 4)
    tensors = module(codes, zeros, scales, "gptq", bits=4)
    tensors |= {f"{UP}x.{p}": a for p, a in packers.compressed(codes - 8, scales, 4).items()}
    path = folder(tmp_path / "m", tensors, said)
    list(hf.check(path))
    try:
        assert hf.open(path).weights
    except InputError as e:
        assert e.tensor


def without(part):
    return lambda tensors: tensors.pop(f"{UP}.{part}")


def reshaped(part, shape):
    return lambda tensors: tensors.update({f"{UP}.{part}": np.zeros(shape, tensors[f"{UP}.{part}"].dtype)})


def retyped(part, dtype):
    return lambda tensors: tensors.update({f"{UP}.{part}": tensors[f"{UP}.{part}"].astype(dtype)})


BROKEN = {
    "no zeros": (GPTQ, without("qzeros"), "lacks qzeros"),
    "no scales": (GPTQ, without("scales"), "lacks scales"),
    "bits of text": ({**GPTQ, "bits": "4"}, without("g_idx"), "unsupported GPTQ weight"),
    "bits that are not": ({**GPTQ, "bits": 5}, without("g_idx"), "unsupported GPTQ weight"),
    "a kernel's order": ({**GPTQ, "checkpoint_format": "marlin"}, None, "kernel-specific order"),
    "codes of floats": (GPTQ, retyped("qweight", np.float32), "qweight does not fit"),
    "scales of doubles": (GPTQ, retyped("scales", np.float64), "scales has an unsupported dtype"),
    "groups that do not divide": (GPTQ, reshaped("scales", (3, 32)), "groups do not divide"),
    "empty scales": (GPTQ, reshaped("scales", (0, 32)), "scales has an unexpected shape"),
    "vector of codes": (GPTQ, reshaped("qweight", (64,)), "qweight has an unexpected shape"),
    "index too long": (GPTQ, reshaped("g_idx", (63,)), "unsupported GPTQ weight"),
    "index of floats": (GPTQ, retyped("g_idx", np.float32), "g_idx has an unexpected shape"),
    "plain too": (GPTQ, lambda t: t.update({f"{UP}.weight": np.zeros((32, 64), np.float32)}),
        "both quantized and plain"),
    "another kernel of AWQ": ({**AWQ, "version": "gemv"}, None, "this variant of AWQ"),
    "AWQ codes on the wrong axis": (AWQ, None, "does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_gptq_and_awq(tmp_path, case):
    quantization, change, said = BROKEN[case]
    codes, zeros, scales = packers.some_codes(3, 32, 64, 2, 4)
    tensors = module(codes, zeros, scales, "gptq", bits=4, g_idx=np.arange(64) // 32)
    if change is not None:
        change(tensors)
    path = folder(tmp_path / "m", tensors, quantization)
    with pytest.raises(InputError, match=said) as e:
        hf.open(path)
    assert str(e.value).count("\n") <= 1
    if case != "plain too":
        assert "HF063" in codes_of(path)


def shaped(*numbers):
    return lambda tensors: tensors.update({f"{UP}.weight_shape": np.array(numbers, np.int64)})


BROKEN_COMPRESSED = {
    "no scale": (without("weight_scale"), "lacks weight_scale"),
    "no shape": (without("weight_shape"), "lacks weight_shape"),
    "another shape": (shaped(20, 600), "does not fit weight_shape"),
    "a negative shape": (shaped(-20, -60), "does not fit weight_shape"),
    "a huge shape": (shaped(1 << 40, 1 << 40), "does not fit weight_shape"),
    "three numbers": (shaped(20, 60, 1), "weight_shape has an unexpected shape"),
    "too many groups": (reshaped("weight_scale", (20, 7)), "groups do not divide"),
    "zeros that do not fit": (lambda t: t.update({f"{UP}.weight_zero_point": np.zeros((4, 2), np.int32)}),
        "weight_zero_point does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_COMPRESSED)
def test_broken_compressed_tensors(tmp_path, case):
    change, said = BROKEN_COMPRESSED[case]
    codes, _, scales = packers.some_codes(4, 20, 60, 2, 4)
    tensors = {f"{UP}.{part}": a for part, a in packers.compressed(codes - 8, scales, 4).items()}
    change(tensors)
    path = folder(tmp_path / "m", tensors, compressed("pack-quantized"))
    with pytest.raises(InputError, match=said):
        hf.open(path)
    assert "HF063" in codes_of(path)


@pytest.mark.parametrize(
    ("change", "said"), [("weight_scale", "lacks weight_scale"), ("bits", "quantization_bit 4 or 8")]
)
def test_broken_chatglm(tmp_path, change, said):
    tensors = {f"{UP}.weight": np.ones((4, 6), np.int8), f"{UP}.weight_scale": np.ones(4, np.float16)}
    tensors.pop(f"{UP}.{change}", None)
    path = folder(tmp_path / "m", tensors, None, quantization_bit=3 if change == "bits" else 8)
    with pytest.raises(InputError, match=said):
        hf.open(path)


def test_non_finite_scales_are_reported(tmp_path):
    codes, zeros, scales = packers.some_codes(5, 32, 64, 2, 4)
    scales[3, 1] = np.nan
    assert "HF064" in codes_of(folder(tmp_path / "m", module(codes, zeros, scales, "gptq", bits=4), GPTQ))


def test_a_method_without_any_weight(tmp_path):
    path = folder(tmp_path / "m", {"model.norm.weight": np.ones(4, np.float32)}, AWQ)
    assert any("but no weight uses it" in note for note in hf.open(path).notes)
    assert "HF061" in codes_of(path)


# ---------------------------------------------------------------- 8-bit floats


def blocks_of_128(values, n, k):
    return np.repeat(np.repeat(values, 128, 0), 128, 1)[:n, :k]


FP8 = {
    "rows": (compressed("float-quantized"), "weight_scale", (200, 1), np.float32, "fp8.e4m3.f32.static"),
    "one": (compressed("float-quantized"), "weight_scale", (1,), np.float16, "fp8.e4m3.tensor.f16"),
    "scalar": (compressed("float-quantized"), "weight_scale", (), np.float32, "fp8.e4m3.tensor.f32.static"),
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "weight_scale_inv",
        (2, 3),
        np.float32,
        "fp8.e4m3.b128.inv.f32.static",
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "weight_scale", (200, 1), np.float32, "fp8.e4m3.f32.static"),
}


@pytest.mark.parametrize("case", FP8)
def test_8_bit_floats(tmp_path, case):
    said, part, shape, dtype, name = FP8[case]
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((200, 300)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.01, 1, shape).astype(dtype)
    tensors = {f"{UP}.weight": weight, f"{UP}.{part}": scale, f"{UP}.input_scale": np.ones(1, np.float32)}
    path = folder(tmp_path / "m", tensors, said)
    checkpoint = hf.open(path)
    assert list(checkpoint) == [f"{UP}.weight"]
    w = checkpoint[f"{UP}.weight"]
    assert w.codec.name == name
    table = blocks_of_128(scale.astype(np.float32), 200, 300) if case == "blocks" else scale.astype(np.float32)
    want = weight.astype(np.float32) * table
    np.testing.assert_array_equal(w.dequantize(), want)
    np.testing.assert_array_equal(w.dequantize(rows=slice(100, 140)), want[100:140])
    assert not codes_of(path)
    if w.codec.row_sliced:
        np.testing.assert_array_equal(w.codec.dequantize(w.read(slice(5, 9)), (4, 300)), want[5:9])


@pytest.mark.parametrize(
    ("said", "change", "error"),
    [
        ({"quant_method": "fp8"}, {}, "does not specify the block size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, {}, "does not specify the block size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {"weight_scale_inv": np.ones((3, 3), np.float32)},
            "does not fit"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {"weight_scale_inv": None}, "lacks its scale"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {"weight_scale_inv": np.ones((2, 3), np.int8)},
            "unsupported dtype"),
    ],
)  # fmt: skip
def test_broken_8_bit_floats(tmp_path, said, change, error):
    parts = {
        "weight": np.ones((200, 300), ml_dtypes.float8_e4m3fn),
        "weight_scale_inv": np.ones((2, 3), np.float32),
        **change,
    }
    path = folder(tmp_path / "m", {f"{UP}.{p}": a for p, a in parts.items() if a is not None}, said)
    with pytest.raises(InputError, match=error):
        hf.open(path)
    assert "HF063" in codes_of(path)


# ---------------------------------------------------------------- any header


@dataclass(frozen=True)
class Claim:
    """The header entry of a tensor."""

    dtype: str
    shape: tuple


PARTS = ["qweight", "qzeros", "scales", "g_idx", "weight", "weight_scale", "weight_scale_inv", "weight_packed",
    "weight_shape",
         "weight_zero_point", "weight_g_idx", "input_scale"]  # fmt: skip
CLAIMS = st.builds(
    Claim,
    st.sampled_from(["I32", "I8", "F16", "F32", "BF16", "I64", "F8_E4M3", "U8"]),
    st.lists(st.sampled_from([0, 1, 2, 8, 16, 64, 1 << 40]), max_size=3).map(tuple),
)
VALUES = st.sampled_from([4, 8, 3, 0, -1, 1 << 70, None, "4", True, [], {}, "gemm", "gptq_v2", "pack-quantized",
        [128, 128],
                          {"a": {"format": "pack-quantized", "input_activations": DYNAMIC,
                                  "weights": {"block_structure": [4, 4]}}}])  # fmt: skip
KEYS = ["bits", "checkpoint_format", "version", "format", "config_groups", "weight_block_size", "w_bit", "backend"]


@given(
    st.sampled_from(["gptq", "awq", "compressed-tensors", "fp8"]),
    st.dictionaries(st.sampled_from(KEYS), VALUES),
    st.dictionaries(st.sampled_from(PARTS).map("x.{}".format), CLAIMS),
    st.lists(st.integers(-2, 1 << 40), min_size=2, max_size=64),
)
@settings(max_examples=300, deadline=None)
def test_headers_give_a_weight_or_one_error(method, said, tensors, numbers):
    found = method_of({"quantization_config": {"quant_method": method, **said}})
    for name in list(found[0].modules(tensors)):
        try:
            weight = found[0].weight_of(name, tensors, found[1], lambda _: np.array(numbers))
        except InputError:
            continue
        if not isinstance(weight, str):
            for part, spec in weight.codec.specs(weight.shape).items():
                assert math.prod(tensors[f"x.{part}"].shape) == math.prod(spec.shape)
