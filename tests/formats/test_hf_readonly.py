"""Folders of bitsandbytes, HQQ, torchao and Quark: values of the libraries, hostile files, running, converting."""

import json
import random
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import polyquant
from folders import mutate
from format_modules import hf
from golden import VECTORS, arrays
from polyquant.codecs.affine_forms import affine_of, recoded, same_codes
from polyquant.errors import InputError, PolyquantError, UnsupportedError
from polyquant.formats.steps import BLOCK_WEIGHTS, by_blocks
from polyquant.opening import open_checkpoint
from polyquant.types import Affine

HUB = VECTORS / "hub_readonly"
BF16, F16 = ml_dtypes.bfloat16, np.float16

GOLDEN = {  # folder -> the weights' codecs and the dtype that the library's values have
    "bnb-nf4": {"bnb.nf4.b64": BF16},
    "bnb-nf4-double": {"bnb.nf4.b64.double": BF16},
    "bnb-fp4-odd": {"bnb.fp4.b64.flat": BF16},
    "bnb-int8": {"bnb.int8": None},
    "torchao-intx4-g32": {"torchao.int4.g32": BF16},
    "quark-fp8": {"fp8.e4m3.tensor": BF16},
    "quark-int8": {"compressed.i8.zp": BF16},
    "quark-uint4": {"awq.4.g32.bf16": BF16},
    "quark-mxfp4": {"hf_mxfp4": BF16},
}
FORMS = {  # folder -> {module: (codec, dtype of the library's values, None for float32)}
    "bnb-forms": {
        "nf4_b64": ("bnb.nf4.b64", BF16), "nf4_b128_half": ("bnb.nf4.b128", F16),
        "fp4_b64_float": ("bnb.fp4.b64", None),
        "nf4_flat": ("bnb.nf4.b64.flat", None), "nf4_short": ("bnb.nf4.b64.flat", None),
        "nf4_oddk": ("bnb.nf4.b64.flat", None), "fp4_double": ("bnb.fp4.b64.double", BF16),
        "nf4_double_long": ("bnb.nf4.b64.double", None), "nf4_stored_bf16": ("bnb.nf4.b64", BF16),
        "nf4_b32": ("bnb.nf4.b32", None),
    },
    "hqq-forms": {
        "b8_axis1": ("hqq.8.g64.axis1.bf16", BF16), "b4_axis1": ("hqq.4.g32.axis1.f32", None),
        "b4_axis1_half": ("hqq.4.g64.axis1", F16), "b4_axis0": ("hqq.4.g64.axis0.bf16", BF16),
        "b3_axis1": ("hqq.3.g32.axis1.f32", None), "b3_axis0": ("hqq.3.g64.axis0", F16),
        "b2_axis1": ("hqq.2.g16.axis1.bf16", BF16), "b2_axis0": ("hqq.2.g64.axis0.f32", None),
        "b1_axis1": ("hqq.1.g32.axis1.f32", None), "b1_axis0": ("hqq.1.g8.axis0.f32", None),
        "b158_axis1": ("hqq.2.g32.axis1.f32", None), "b5_axis1": ("hqq.8.g64.axis1.f32", None),
        "b4_crossing": ("hqq.4.g64.axis1.f32", None), "b4_viewed": ("hqq.4.g64.axis1.bf16", BF16),
    },
    "torchao-int4": {
        "g32": ("torchao.int4.g32", BF16), "g32_half": ("torchao.int4.g32.f16", F16),
        "rows": ("torchao.int4.f32", None),
        "int2": ("torchao.int4.g32", BF16), "asym": ("torchao.int4.g32.f32", None),
        "dynamic": ("torchao.int4.g32", BF16),
    },
    "torchao-int8": {
        "rows": ("torchao.int8.f32", BF16), "rows_float": ("torchao.int8.f32", None),
        "g32": ("torchao.int8.g32.f32", BF16), "dynamic": ("torchao.int8.f32", BF16),
        "intx_asym": ("torchao.int8.g32.f32", None),
    },
    "torchao-float8": {
        "rows": ("fp8.e4m3.f32", BF16), "rows_float": ("fp8.e4m3.f32", None), "tensor": ("fp8.e4m3.tensor.f32", None),
    },
}  # fmt: skip


def rounded(values, dtype):
    return values if dtype is None else values.astype(dtype).astype(np.float32)


def by_rows(weight, step):
    rows = range(0, weight.shape[0], step)
    return np.concatenate([weight.dequantize(rows=slice(a, min(a + step, weight.shape[0]))) for a in rows])


def of_library(weight, dtype):
    """The values as the library rounds them: HQQ the difference and the product, the others once."""
    if not weight.codec.name.startswith("hqq") or dtype is None:
        return rounded(weight.dequantize(), dtype)
    parts, codec = weight.parts, weight.codec
    zero, scale = (np.asarray(parts[key], np.float32) for key in ("zero", "scale"))
    difference = rounded(codec.codes(parts, weight.shape).astype(np.float32) - zero, dtype)
    return rounded(difference * scale, dtype).reshape(weight.shape)


# ---------------------------------------------------------------- values of the libraries


@pytest.mark.parametrize("case", GOLDEN)
def test_checkpoints_decode_as_the_library_does(case):
    checkpoint, want = open_checkpoint(HUB / case), arrays(f"hub_readonly/{case}/dequantized.npz")
    ((codec, dtype),) = GOLDEN[case].items()
    for name, values in want.items():
        weight = checkpoint[name]
        assert weight.codec.name == codec
        np.testing.assert_array_equal(rounded(weight.dequantize(), dtype), values)
        np.testing.assert_array_equal(by_rows(weight, 7), weight.dequantize())
    assert not any(f.code in ("HF061", "HF063", "HF064", "HF065") for f in hf.check(HUB / case))


@pytest.mark.parametrize(("case", "module"), [(c, m) for c, forms in FORMS.items() for m in forms])
def test_every_form_decodes_as_the_library_does(case, module):
    codec, dtype = FORMS[case][module]
    weight = open_checkpoint(HUB / case)[f"model.{module}.weight"]
    assert weight.codec.name == codec
    values = arrays(f"hub_readonly/{case}/dequantized.npz")[weight.name]
    np.testing.assert_array_equal(of_library(weight, dtype), values)
    np.testing.assert_array_equal(by_rows(weight, 5), weight.dequantize())
    if weight.codec.form is Affine:
        codes = weight.codec.unpack(weight.parts, weight.shape)
        assert codes.bits == (4 if "int4" in codec else 8)


@pytest.mark.parametrize(("case", "error"), [("bnb-nf4-double", 0.01), ("hqq-model", 1e-6)])
def test_models_run(case, error):
    """Logits against the library's, which computes in bfloat16 and in float32; relative root mean square."""
    golden = arrays(f"hub_readonly/{case}/logits.npz")
    logits = polyquant.load(HUB / case, activations="float").logits([int(t) for t in golden["tokens"].reshape(-1)])
    want = golden["logits"].reshape(logits.shape)
    assert np.sqrt(np.square(logits - want).sum() / np.square(want).sum()) < error


# ---------------------------------------------------------------- conversions


@pytest.mark.parametrize("case", ["bnb-nf4-double", "hqq-model"])
def test_converted_to_floats(tmp_path, case):
    source, target = HUB / case, tmp_path / "floats"
    polyquant.convert(source, target, to="hf", codec="f32")
    made = open_checkpoint(target)
    assert "quantization_config" not in made.config
    for name, weight in open_checkpoint(source).items():
        np.testing.assert_array_equal(made[name].dequantize(), weight.dequantize())


def test_converted_without_a_codec(tmp_path):
    """Read-only codecs become floats of the model's dtype; codes with integer zero points keep their codes."""
    polyquant.convert(HUB / "hqq-model", tmp_path / "hf", to="hf")
    assert {str(w.codec) for w in open_checkpoint(tmp_path / "hf").values()} <= {"f32", "bf16"}
    polyquant.convert(HUB / "bnb-nf4-double", tmp_path / "m.gguf", codec="q8_0", requantize=True)
    assert "q8_0" in {str(w.codec) for w in open_checkpoint(tmp_path / "m.gguf").values()}
    with pytest.raises(PolyquantError, match="requantize"):
        polyquant.convert(HUB / "bnb-nf4-double", tmp_path / "n.gguf", codec="q4_0")
    assert not (tmp_path / "n.gguf").exists()


@pytest.mark.parametrize(("case", "name"), [("torchao-intx4-g32", "q4_0"), ("bnb-int8", "q8_0")])
def test_integer_codes_are_kept_in_ggml_blocks(case, name):
    target = polyquant.codec(name)
    for weight in open_checkpoint(HUB / case).values():
        assert same_codes(weight, target)
        codes = weight.codec.unpack(weight.parts, weight.shape)
        parts = recoded(codes, target)
        again = affine_of(target, parts, weight.shape)
        np.testing.assert_array_equal(again.codes, codes.codes)
        w = weight.dequantize()
        assert (np.abs(target.dequantize(parts, weight.shape) - w) <= 2.0**-10 * np.abs(w)).all()


# ---------------------------------------------------------------- hostile files


def opened(path, tensors, method, **settings):
    path.mkdir()
    save_file({k: np.array(v, order="C") for k, v in tensors.items()}, path / "model.safetensors")
    said = {"quantization_config": {"quant_method": method, **settings}}
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", **said}))
    return path


def nf4(module="nf4_double_long", **changes):
    """One 4-bit module with some tensors or entries of its quant_state replaced; None removes them."""
    m = f"model.{module}"
    tensors = {k: v for k, v in load_file(HUB / "bnb-forms/model.safetensors").items() if k.startswith(f"{m}.")}
    key = next(k for k in tensors if "quant_state" in k)
    state = json.loads(tensors[key].tobytes())
    for name, value in changes.items():
        if name in ("text", "rename"):
            continue
        if name.startswith("t_"):
            at = f"{m}.weight" + (f".{name[2:]}" if name != "t_weight" else "")
            tensors.pop(at)
            if value is not None:
                tensors[at] = value
        elif value is None:
            del state[name]
        else:
            state[name] = value
    text = changes.get("text", json.dumps(state).encode())
    tensors.pop(key)
    if text is not None:
        tensors[key + changes.get("rename", "")] = np.frombuffer(text, np.uint8)
    return tensors


NAN = np.full(16, np.nan, np.float32)
BNB = {  # changed member -> expected error
    "blocksize 0": (nf4(blocksize=0), "invalid blocksize.*expected 32, 64.*found 0"),
    "blocksize 2^60": (nf4(blocksize=2**60), "invalid blocksize"),
    "blocksize true": (nf4(blocksize=True), "invalid blocksize"),
    "blocksize text": (nf4(blocksize="64"), "invalid blocksize"),
    "no blocksize": (nf4(blocksize=None), "invalid blocksize.*found nothing"),
    "another blocksize": (nf4(blocksize=128), "absmax does not fit the shape in .*expected 136 bytes of U8"),
    "shape too large": (nf4(shape=[68, 2**39]), "weight does not fit the shape in quant_state"),
    "shape beyond all": (nf4(shape=[2**60, 2**60]), "invalid shape"),
    "shape negative": (nf4(shape=[-68, -256]), "invalid shape"),
    "shape of floats": (nf4(shape=[68.0, 256.0]), "invalid shape"),
    "shape of one": (nf4(shape=[17408]), "invalid shape"),
    "shape swapped fits no more": (nf4("nf4_b64", shape=[13, 128]), "weight does not fit"),
    "no shape": (nf4(shape=None), "invalid shape"),
    "dtype unknown": (nf4(dtype="complex64"), "invalid dtype.*expected bfloat16, float16, float32"),
    "dtype a list": (nf4(dtype=["float32"]), "invalid dtype"),
    "type contradicts": (nf4(quant_type="fp4"), "invalid quant_type.*expected nf4.*found fp4"),
    "no nested_offset": (nf4(nested_offset=None), "invalid nested_offset"),
    "nested_offset huge": (nf4(nested_offset=1e300), "invalid nested_offset"),
    "nested_offset true": (nf4(nested_offset=True), "invalid nested_offset"),
    "nested_offset of 30 digits": (nf4(text=b'{"nested_offset": 1' + b"0" * 30 + b"}"), "quant_state: "),
    "nested_blocksize": (nf4(nested_blocksize=0), "unsupported nested_blocksize"),
    "nested_dtype": (nf4(nested_dtype="float16"), "unsupported nested_dtype"),
    "no nested_absmax": (nf4(t_nested_absmax=None), "absmax does not fit.*of F32.*found U8"),
    "nested_absmax short": (nf4(t_nested_absmax=np.ones(1, np.float32)), "nested_absmax does not fit"),
    "no nested_quant_map": (nf4(t_nested_quant_map=None), "lacks nested_quant_map"),
    "nested_quant_map short": (nf4(t_nested_quant_map=np.ones(16, np.float32)), "nested_quant_map does not fit"),
    "absmax short": (nf4("nf4_b64", t_absmax=np.ones(23, np.float32)), "absmax does not fit"),
    "absmax f64": (nf4("nf4_b64", t_absmax=np.ones(24, np.float64)), "absmax does not fit"),
    "no absmax": (nf4("nf4_b64", t_absmax=None), "lacks absmax"),
    "quant_map NaN": (nf4(t_quant_map=NAN), "quant_map is not the table of nf4.*expected -1 for code 0, found nan"),
    "quant_map of fp4": (nf4(t_quant_map=np.zeros(16, np.float32)), "not the table of nf4"),
    "quant_map short": (nf4(t_quant_map=np.ones(15, np.float32)), "lacks its quant_map"),
    "no quant_map": (nf4(t_quant_map=None), "lacks its quant_map"),
    "weight short": (nf4(t_weight=np.ones((8703, 1), np.uint8)), "weight does not fit"),
    "weight missing": (nf4(t_weight=None), "lacks weight"),
    "no quant_state": (nf4(text=None), "lacks its quant_state"),
    "unknown type": (nf4(rename="x"), "lacks its quant_state|unsupported"),
    "not JSON": (nf4(text=b"{'blocksize': 64}"), "quant_state: not valid JSON"),
    "a list": (nf4(text=b"[1]"), "quant_state"),
    "deep": (nf4(text=b"[" * 100 + b"]" * 100), "quant_state: JSON is nested too deep"),
    "twice": (nf4(text=b'{"blocksize": 64, "blocksize": 128}'), "quant_state: "),
    "not UTF-8": (nf4(text=b'{"\xff": 1}'), "quant_state: JSON is not UTF-8"),
    "too long": (nf4(text=b" " * 5000), "quant_state has an unexpected shape or dtype"),
}  # fmt: skip


def hqq(module="b4_axis1", **changes):
    tensors = {k: v for k, v in load_file(HUB / "hqq-forms/model.safetensors").items() if f".{module}." in k}
    for part, value in changes.items():
        tensors.pop(f"model.{module}.{part}")
        if value is not None:
            tensors[f"model.{module}.{part}"] = np.array(value)
    return tensors


def i32(value):
    return np.array(value, np.int32)


OTHERS = {
    "group 0": ("hqq", hqq(group_size=i32(0)), "group_size is out of range"),
    "group does not divide": ("hqq", hqq(group_size=i32(7)), "do not divide this weight"),
    "another group": ("hqq", hqq(group_size=i32(16)), "W_q does not fit the weight|scale does not fit"),
    "axis 2": ("hqq", hqq(axis=i32(2)), "unsupported HQQ weight"),
    "axis twice": ("hqq", hqq(axis=i32([1, 1])), "axis has an unexpected shape"),
    "no axis": ("hqq", hqq(axis=None), "axis has an unexpected shape.*found nothing"),
    "shape of floats": ("hqq", hqq(shape=np.ones(2, np.float32)), "shape has an unexpected shape or dtype"),
    "shape huge": ("hqq", hqq(shape=np.array([2**62, 2**62])), "shape is out of range"),
    "shape negative": ("hqq", hqq(shape=np.array([-12, 96])), "shape is out of range"),
    "shape contradicts": ("hqq", hqq(shape=np.array([24, 96])), "does not fit the weight"),
    "packing": ("hqq", hqq(packing=np.frombuffer(b"7bit_\x1b[", np.uint8)), "unsupported HQQ weight"),
    "packing of another": ("hqq", hqq(packing=np.frombuffer(b"2bit_u8", np.uint8)), "W_q does not fit"),
    "no scale": ("hqq", hqq(scale=None), "lacks scale"),
    "no zero": ("hqq", hqq(zero=None), "lacks zero"),
    "float16 zero": ("hqq", hqq(zero=np.ones((36, 1), np.float16)), "zero does not fit"),
    "scale of integers": ("hqq", hqq(scale=np.ones((36, 1), np.int32)), "scale has an unsupported dtype"),
    "SCB short": ("bitsandbytes", {"a.weight": np.ones((4, 8), np.int8), "a.SCB": np.ones(3, np.float32)},
        "SCB does not"),
    "SCB alone": ("bitsandbytes", {"a.SCB": np.ones(3, np.float32)}, "lacks weight"),
    "SCB of a vector": ("bitsandbytes", {"a.weight": np.ones(4, np.int8), "a.SCB": np.ones(4, np.float32)},
        "dimensions"),
    "int8 in tiles": ("bitsandbytes", {"a.weight": np.ones((4, 8), np.int8), "a.SCB": np.ones(4, np.float32),
        "a.weight_format": np.array(2, np.uint8)}, "in the order of a GPU kernel.*found 2"),
    "torchao groups": ("torchao", {"a._weight_qdata": np.ones((4, 8), np.int8),
        "a._weight_scale": np.ones((4, 3), np.float32)}, "groups do not divide"),
    "torchao rows": ("torchao", {"a._weight_qdata": np.ones((4, 8), np.int8),
        "a._weight_scale": np.ones((5, 2), np.float32)}, "does not fit the weight"),
    "torchao without scale": ("torchao", {"a._weight_qdata": np.ones((4, 8), np.int8)}, "lacks _weight_scale"),
    "torchao blocks": ("torchao", {"a._weight_qdata": np.ones((4, 8), ml_dtypes.float8_e4m3fn),
        "a._weight_scale": np.ones((2, 3), np.float32)}, "_weight_scale does not fit"),
    "quark scales": ("quark", {"a.weight": np.ones((4, 8), ml_dtypes.float8_e4m3fn),
        "a.weight_scale": np.ones(3, np.float32)}, "weight_scale does not fit"),
    "quark of one dimension": ("quark", {"a.weight": np.ones(4, np.int8), "a.weight_scale": np.ones(4, np.float32)},
        "weight has an unexpected shape"),
}  # fmt: skip


def refused(path, says):
    with pytest.raises(InputError, match=says) as e:
        hf.open(path)
    assert "\n" not in str(e.value) and str(e.value).isprintable()
    assert [f.code for f in hf.check(path) if f.code not in ("HF030", "HF019")] == ["HF063"]


@pytest.mark.parametrize("what", BNB)
def test_bitsandbytes_that_lies(tmp_path, what):
    tensors, says = BNB[what]
    refused(opened(tmp_path / "m", tensors, "bitsandbytes", load_in_4bit=True), says)


@pytest.mark.parametrize("what", OTHERS)
def test_others_that_lie(tmp_path, what):
    method, tensors, says = OTHERS[what]
    refused(opened(tmp_path / "m", tensors, method), says)


@pytest.mark.parametrize(("part", "value"), [("absmax", np.nan), ("SCB", np.inf), ("nested_absmax", np.nan)])
def test_scales_that_are_not_finite_are_reported(tmp_path, part, value):
    if part == "SCB":
        tensors = {"a.weight": np.ones((4, 8), np.int8), "a.SCB": np.full(4, value, np.float32)}
    else:
        module, size = ("nf4_b64", 24) if part == "absmax" else ("nf4_double_long", 2)
        tensors = nf4(module, **{f"t_{part}": np.full(size, value, np.float32)})
    assert "HF064" in {f.code for f in hf.check(opened(tmp_path / "m", tensors, "bitsandbytes"))}


def test_codes_out_of_the_declared_range(tmp_path):
    tensors = {"a._weight_qdata": np.full((4, 8), 9, np.int8), "a._weight_scale": np.ones((4, 2), np.float32)}
    path = opened(
        tmp_path / "m", tensors, "torchao", quant_type={"default": {"_data": {"weight_dtype": {"_data": "int4"}}}}
    )
    with pytest.raises(PolyquantError, match=r"codes out of range.*expected -8 to 7, found 9 to 9"):
        hf.open(path)["a.weight"].dequantize()


# ---------------------------------------------------------------- types that are not decoded


PACKED = {"a._weight_qdata": np.ones((4, 8), np.uint8), "a._weight_scale": np.ones((2, 4), np.float32)}
PRESCALED = {**PACKED, "a._weight_qdata": np.ones((4, 8), np.int8), "a._weight_act_pre_scale": np.ones(8, np.float32)}
QUARK4 = {"a.weight": np.ones((32, 4), np.int32), "a.weight_scale": np.ones((1, 32), np.float32),
          "a.weight_zero_point": np.ones((1, 4), np.int32)}  # fmt: skip
UINT4 = {"global_quant_config": {"weight": {"dtype": "uint4"}}, "export": {"pack_method": "reorder"}}


@pytest.mark.parametrize(("method", "tensors", "settings", "scheme"), [
    ("torchao", PACKED, {}, r"torchao packed codes \(U8\)"),
    ("torchao", PRESCALED, {}, "act_pre_scale"),
    ("quark", QUARK4, {**UINT4, "global_quant_config": {"weight": {"dtype": "int4"}}}, "quark int4 in I32"),
    ("quark", QUARK4, {**UINT4, "export": {"pack_method": "order"}}, "quark uint4 in I32"),
    ("quark", QUARK4, {**UINT4, "layer_quant_config": {"*": {}}}, "quark uint4 and others in I32"),
    ("quark", {**QUARK4, "a.weight": np.ones((32, 4), np.uint8)}, {}, "quark None in U8"),
    ("quark", {"a.weight": np.ones((4, 32), np.uint8), "a.weight_scale": np.ones((4, 2), np.uint8)},
        {"global_quant_config": {"weight": {"dtype": "fp4", "scale_format": "e8m0", "group_size": 16}}},
        "quark fp4 in U8"),
])  # fmt: skip
def test_other_types_are_refused_by_name(tmp_path, method, tensors, settings, scheme):
    path = opened(tmp_path / "m", tensors, method, **settings)
    with pytest.raises(UnsupportedError, match=f"scheme: .*{scheme}"):
        open_checkpoint(path)
    assert polyquant.inspect(path).tensors


# ---------------------------------------------------------------- mutated files


def fuzz(folder, rounds, seed):
    rng = random.Random(seed)
    file = folder / "model.safetensors"
    original = file.read_bytes()
    size = 8 + int.from_bytes(original[:8], "little")
    done = 0
    for _ in range(rounds):
        if rng.random() < 0.5:  # payloads: quant_state, shapes, group indices
            data = bytearray(original)
            for _ in range(rng.randint(1, 200)):
                data[rng.randrange(size, len(data))] = rng.choice((0, 1, 0x22, 0x30, 0x7F, 0x80, 0xFF))
            file.write_bytes(bytes(data))
        else:
            file.write_bytes(mutate(original[:size], rng) + original[size:])
        try:
            for weight in hf.open(folder).values():
                if weight.codec.name.startswith("undecoded"):
                    continue
                with np.errstate(all="ignore"):
                    assert weight.dequantize().shape == weight.shape
            done += 1
        except PolyquantError as e:
            assert "\n" not in str(e)
        for finding in hf.check(folder):
            assert finding.code in hf.CODES and "\n" not in str(finding)
    return done


FUZZED = ["bnb-forms", "bnb-int8", "hqq-forms", "torchao-int4", "torchao-float8", "quark-uint4"]


@pytest.mark.parametrize("case", FUZZED)
def test_mutated_folders(tmp_path, case):
    shutil.copytree(HUB / case, tmp_path / "m")
    fuzz(tmp_path / "m", 12, 18)


@pytest.mark.slow
@pytest.mark.parametrize("case", FUZZED)
def test_mutated_folders_for_longer(tmp_path, case):
    shutil.copytree(HUB / case, tmp_path / "m")
    assert fuzz(tmp_path / "m", 1000, 1800) > 0


def test_weights_that_only_decode_by_rows_are_converted_in_blocks():
    plan = polyquant.plan(HUB / "bnb-nf4-double", "hf", codec="f16")
    steps = [s for s in plan.steps if str(s.source) == "bnb.nf4.b64.double"]
    assert steps and all(by_blocks(s) and not s.streams for s in steps)
    rows = BLOCK_WEIGHTS // steps[0].map.shape[1]
    assert steps[0].block_rows == rows > steps[0].map.shape[0]  # small matrices here; the size does not grow with them
