"""Folders with small floats: golden values of the real libraries, codes kept in other packings, and broken folders."""

import hashlib
import json
import shutil

import ml_dtypes
import numpy as np
import pytest

import hub_vectors
import polyquant
from golden import VECTORS
from polyquant.codecs.float_codec import factors
from polyquant.codecs.float_forms import as_ggml, refloated, unfloated
from polyquant.errors import InputError, PlanError, PolyquantError
from polyquant.operations import SAME
from polyquant.ops import small_floats as sf
from polyquant.rows import in_memory
from polyquant.runtime.load import load
from polyquant.storage import safetensors
from polyquant.storage.source import Source
from polyquant.types import Weight

GOLDEN = hub_vectors.hashes("floats")
SCHEMES = {"ct": "compressed-tensors", "fp8": "fp8", "modelopt": "modelopt", "gptoss": "mxfp4"}
DOWN = "model.layers.0.mlp.down_proj"


def stored(folder):
    """Name -> dtype, shape and bytes of every tensor of a folder."""
    source = Source(folder / "model.safetensors")
    entries = safetensors.read_header(source).entries
    return {n: (e.dtype, e.shape, source.pread(e.offset, e.nbytes).tobytes()) for n, e in entries.items()}


def weight_named(checkpoint, name):
    """A weight, and its values in the orientation of the library."""
    if f"{name}_blocks" in checkpoint:
        return checkpoint[f"{name}_blocks"].dequantize().transpose(0, 2, 1)
    return checkpoint[name].dequantize()


def codes_of(weight):
    """Codes, and scales as numbers with that of the tensor, of a weight in any packing."""
    codes = unfloated(weight.codec, dict(weight.parts), weight.shape)
    return sf.nibbles(codes.codes) if codes.paired else codes.codes, factors(codes)


@pytest.mark.parametrize("case", GOLDEN)
def test_values_are_those_of_the_library(case, engine):
    checkpoint = polyquant.open(hub_vectors.folder(case))
    for name, want in GOLDEN[case]["weights"].items():
        values = weight_named(checkpoint, name) + np.float32(0)  # libraries decode -0 to either zero
        array = values.astype(ml_dtypes.bfloat16) if GOLDEN[case]["dtype"] == "bfloat16" else values
        assert hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest() == want, name


def without_observer(arguments):
    """Arguments of a quantization except the method that measured the range."""
    return {k: v for k, v in (arguments or {}).items() if k != "observer"}


@pytest.mark.parametrize("case", GOLDEN)
def test_writing_gives_the_same_bytes(case, tmp_path):
    source, out = hub_vectors.folder(case), tmp_path / "out"
    polyquant.convert(source, out, to=SCHEMES[case.partition("-")[0]], allow_unknown=True)
    assert stored(out) == stored(source)
    have, want = (json.loads((f / "config.json").read_text())["quantization_config"] for f in (out, source))
    for key in ("quant_method", "format", "quant_algo", "weight_block_size", "fmt", "activation_scheme", "scale_fmt"):
        assert have.get(key) == want.get(key), key
    for ours, theirs in zip(*(c.get("config_groups", {}).values() for c in (have, want)), strict=True):
        for part in ("weights", "input_activations"):
            assert without_observer(ours.get(part)) == without_observer(theirs.get(part)), part
    described = "hf_quant_config.json"
    assert (out / described).exists() == (source / described).exists()
    if (source / described).exists():
        ours, theirs = (json.loads((f / described).read_text())["quantization"] for f in (out, source))
        assert {*ours.pop("exclude_modules")} <= {*theirs.pop("exclude_modules")}  # the vectors have few tensors
        assert ours == theirs


KEPT = [
    ("ct-mxfp4a16", "modelopt", "copy"), ("modelopt-mxfp4", "compressed-tensors", "copy"),
    ("ct-mxfp8", "modelopt", "copy"), ("modelopt-mxfp8", "compressed-tensors", "copy"),
    ("ct-nvfp4", "modelopt", "transcode"), ("modelopt-nvfp4", "compressed-tensors", "transcode"),
    ("modelopt-nvfp4-a16", "compressed-tensors", "transcode"), ("fp8-block128", "compressed-tensors", "transcode"),
    ("fp8-block128", "modelopt", "transcode"), ("fp8-block128-odd", "compressed-tensors", "transcode"),
    ("fp8-block128-ue8m0", "compressed-tensors", "transcode"), ("ct-fp8-block128", "fp8", "transcode"),
    ("ct-fp8-block128-ragged", "fp8", "transcode"), ("ct-fp8-tensor-static", "modelopt", "transcode"),
    ("modelopt-fp8-kv", "compressed-tensors", "copy"), ("modelopt-fp8-pcpt", "compressed-tensors", "copy"),
    ("ct-fp8-channel-dynamic", "modelopt", "transcode"), ("modelopt-fp8-pb-wo", "fp8", "transcode"),
    ("ct-mxfp8", "mlx", "transcode"), ("modelopt-mxfp8", "mlx", "transcode"), ("ct-mxfp4a16", "mlx", "transcode"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "to", "action"), KEPT)
def test_codes_are_kept(case, to, action, tmp_path):
    source, out = hub_vectors.folder(case), tmp_path / "out"
    report = polyquant.convert(source, out, to=to, allow_unknown=True)
    before, after = polyquant.open(source), polyquant.open(out)
    done = {s.tensor: s for s in report.steps}
    for name in (n for n in GOLDEN[case]["weights"]):
        assert done[name].action == action
        (codes, scales), (kept, there) = codes_of(before[name]), codes_of(after[name])
        np.testing.assert_array_equal(codes, kept)
        np.testing.assert_allclose(there, scales, rtol=3e-7)  # a reciprocal may differ in the last bit
        assert done[name].exact == (action == "transcode" and np.array_equal(there, scales))
    back = tmp_path / "back"
    polyquant.convert(out, back, to=SCHEMES[case.partition("-")[0]], allow_unknown=True)
    ours, theirs = stored(back), stored(source)
    assert {n: t[2] for n, t in ours.items() if n.endswith((".weight", "packed"))} == {
        n: t[2] for n, t in theirs.items() if n.endswith((".weight", "packed"))
    }


@pytest.mark.parametrize("case", ["fp8-block128", "gptoss-mxfp4"])
def test_logits(case):
    tokens, want = hub_vectors.logits(case)
    got = load(hub_vectors.folder(case), activations="float").logits(tokens.tolist())
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()  # the library rounds the weights to bfloat16


def test_float_experts_become_mxfp4(tmp_path):
    source, floats, out = hub_vectors.folder("gptoss-mxfp4"), tmp_path / "bf16", tmp_path / "out"
    polyquant.convert(source, floats, to="hf", codec="bf16")
    polyquant.convert(floats, out, to="mxfp4", codec="hf_mxfp4")
    ours, theirs = stored(out), stored(source)
    assert {n: t[:2] for n, t in ours.items()} == {n: t[:2] for n, t in theirs.items()}
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    for name in (n for n in theirs if n.endswith("_blocks")):
        np.testing.assert_array_equal(polyquant.open(out)[name].dequantize(), polyquant.open(source)[name].dequantize())


GGUF = {
    "modelopt-nvfp4-a16": "nvfp4.scaled", "ct-nvfp4a16": "nvfp4.scaled", "ct-mxfp4a16": "mxfp4",
    "modelopt-nvfp4": "nvfp4.scaled.static", "ct-nvfp4": "nvfp4.scaled.static",
}  # fmt: skip


@pytest.mark.parametrize("case", GGUF)
def test_gguf_and_back(case, tmp_path):
    """The codes and scale bytes, and the scales of the tensor and of the inputs as separate tensors."""
    weight = polyquant.open(hub_vectors.folder(case))[f"{DOWN}.weight"]
    target, gguf = polyquant.codec(GGUF[case]), tmp_path / "a.gguf"
    assert as_ggml([weight], SAME) == target
    parts = refloated(unfloated(weight.codec, dict(weight.parts), weight.shape), target)
    polyquant.save({"x.weight": Weight("x.weight", weight.shape, target, in_memory(parts))}, gguf)
    assert set(polyquant.open(gguf)) == {"x.weight"}
    back = polyquant.open(gguf)["x.weight"]
    assert back.codec.name == target.name
    for ours, theirs in zip(codes_of(back), codes_of(weight), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-7)
    again = refloated(unfloated(back.codec, dict(back.parts), back.shape), weight.codec)
    if "input_scale" in again:  # llama.cpp's converter writes it as ModelOpt does, the reciprocal of the other one's
        stated = np.asarray(weight.parts["input_scale"])
        np.testing.assert_array_equal(back.parts["input_scale"], 1 / stated if case.startswith("ct") else stated)
        np.testing.assert_allclose(again["input_scale"], stated, rtol=2e-7)
    for part in set(again) - {"weight_scale_2", "input_scale"}:
        np.testing.assert_array_equal(again[part].view(np.uint8), np.asarray(weight.parts[part]).view(np.uint8))


def test_gguf_without_the_scale_of_the_tensor(tmp_path):
    """llama.cpp omits a scale of 1."""
    weight = polyquant.open(hub_vectors.folder("modelopt-nvfp4"))[f"{DOWN}.weight"]
    parts = refloated(unfloated(weight.codec, dict(weight.parts), weight.shape), polyquant.codec("nvfp4.scaled.static"))
    blocks = Weight("x.weight", weight.shape, polyquant.codec("nvfp4"), in_memory({"blocks": parts["blocks"]}))
    polyquant.save({"x.weight": blocks, "x.input_scale": parts["input_scale"]}, tmp_path / "a.gguf")
    found = polyquant.open(tmp_path / "a.gguf")["x.weight"]
    assert found.codec.name == "nvfp4.scaled.static"
    assert found.parts["scale"] == 1 and found.parts["input_scale"] == parts["input_scale"]
    np.testing.assert_array_equal(found.dequantize(), blocks.dequantize())


# ---------------------------------------------------------------- broken folders


def changed(case, tmp_path, change, settings=None):
    """A copy of a folder with changed tensors (name -> dtype, shape, bytes) and quantization_config."""
    folder = tmp_path / "m"
    shutil.copytree(hub_vectors.folder(case), folder)
    tensors = stored(folder)
    change(tensors)
    header, _ = safetensors.header_bytes([(n, dtype, shape) for n, (dtype, shape, _) in tensors.items()], {})
    (folder / "model.safetensors").write_bytes(header + b"".join(data for _, _, data in tensors.values()))
    if settings is not None:
        config = json.loads((folder / "config.json").read_text())
        settings(config["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def shorter(part):
    def change(tensors):
        dtype, (rows, *more), data = tensors[f"{DOWN}.{part}"]
        tensors[f"{DOWN}.{part}"] = dtype, (rows - 1, *more), data[: len(data) // rows * (rows - 1)]

    return change


def keep(tensors):
    del tensors


BROKEN = {
    "scales of a wrong shape": ("ct-mxfp4a16", shorter("weight_scale"), None, "weight_scale does not fit the weight"),
    "codes of a wrong shape": ("modelopt-nvfp4", shorter("weight"), None, "does not fit the weight"),
    "no scale of the tensor": (
        "modelopt-nvfp4",
        lambda t: t.pop(f"{DOWN}.weight_scale_2"),
        None,
        "lacks weight_s",
    ),
    "an algorithm of other codes": ("modelopt-nvfp4", keep, lambda q: q.update(quant_algo="FP8"), "contradicts"),
    "a wrong block size": ("fp8-block128", keep, lambda q: q.update(weight_block_size=[64, 64]), "does not fit"),
    "no block size": ("fp8-block128", keep, lambda q: q.pop("weight_block_size"), "does not specify the block size"),
    "oblong blocks": ("fp8-block128", keep, lambda q: q.update(weight_block_size=[1, 128]), "block size"),
    "a lack of scales": ("fp8-block128", lambda t: t.pop(f"{DOWN}.weight_scale_inv"), None, "lacks its scale"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folders_are_refused_in_one_line(name, tmp_path):
    case, change, settings, says = BROKEN[name]
    folder = changed(case, tmp_path, change, settings)
    for use in (polyquant.open, lambda f: polyquant.convert(f, tmp_path / "out", to="hf", allow_unknown=True)):
        with pytest.raises(InputError, match=says) as problem:
            use(folder)
        assert "\n" not in str(problem.value) and "model.layers.0." in str(problem.value)
    assert not (tmp_path / "out").exists()


def with_first_scale(byte):
    def change(tensors):
        dtype, shape, data = tensors[f"{DOWN}.weight_scale"]
        tensors[f"{DOWN}.weight_scale"] = dtype, shape, bytes([byte]) + data[1:]

    return change


@pytest.mark.parametrize("byte", [0x7F, 0x80 | 0x30])  # NaN, negative
def test_scales_that_ggml_reads_otherwise(byte, tmp_path):
    folder = changed("modelopt-nvfp4", tmp_path, with_first_scale(byte))
    report = polyquant.convert(
        folder, tmp_path / "kept", to="modelopt", allow_unknown=True
    )  # ModelOpt's own reader sees the same bytes
    assert {s.action for s in report.steps} == {"copy"}
    with pytest.raises(PolyquantError) as problem:
        polyquant.plan(folder, "gguf", codec="nvfp4.scaled", allow_unknown=True)
    assert "\n" not in str(problem.value)


def test_schemes_that_hold_no_weight(tmp_path):
    with pytest.raises(PlanError, match="no weight can be stored as MXFP4 experts"):
        polyquant.convert(hub_vectors.folder("ct-mxfp4a16"), tmp_path / "out", to="mxfp4", allow_unknown=True)


def test_models_without_weights_that_a_scheme_holds(tmp_path):
    """The codec of the scheme is not suggested where no weight takes it."""
    with pytest.raises(PlanError, match=r"MXFP4 experts \(found bf16\); choose another format"):
        polyquant.quantize(VECTORS / "models/tiny-llama-untied/hf", tmp_path / "out", to="mxfp4")


# ---------------------------------------------------------------- the programs that read what is written

READ = [
    ("compressed-tensors", "hf_nvfp4.div"), ("compressed-tensors", "hf_mxfp4"), ("compressed-tensors", "hf_mxfp8"),
    ("compressed-tensors", "fp8.e4m3"), ("compressed-tensors", "fp8.e4m3.tensor"),
    ("compressed-tensors", "fp8.e4m3.b128"), ("fp8", "fp8.e4m3.b128.inv.f32"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("to", "name"), READ)
def test_transformers_reads_the_same_weights(to, name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    decoded = tmp_path / "bf16"
    polyquant.convert(hub_vectors.folder("fp8-block128"), decoded, to="hf")
    polyquant.convert(decoded, tmp_path / "out", to=to, codec=name)
    if to == "fp8":
        how = transformers.FineGrainedFP8Config(dequantize=True)
    else:
        how = transformers.CompressedTensorsConfig(run_compressed=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, quantization_config=how
    )
    ours = polyquant.open(tmp_path / "out")
    for module, weight in ((n, p) for n, p in model.named_parameters() if "proj" in n):
        values = ours[module].dequantize().astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(weight.detach().float().numpy(), values, module)
