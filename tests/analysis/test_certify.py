"""Certificates: every injected fault is found and named, and no genuine conversion gives a false alarm."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import polyquant
from analysis.certify_faults import FAULTS
from analysis.certify_target import Target, broken, converted, source_of
from architectures.golden_models import NAMES, Golden
from golden import VECTORS
from msmodelslim_vectors import FOLDERS, runnable
from msmodelslim_vectors import source_of as source_folder
from polyquant.analysis.certification.bounds import Bounds
from polyquant.analysis.certification.codes import CODES
from polyquant.analysis.certification.scan import scan
from polyquant.analysis.certify import Certificate, certify
from polyquant.analysis.side import Side
from polyquant.errors import PlanError
from polyquant.ops.metrics import compares_stored, stored_unit_errors, unit_errors
from polyquant.registry import codec
from polyquant.rows import in_memory
from polyquant.types import Severity, Weight

MODELS, BITNET = VECTORS / "models", VECTORS / "bitnet_gguf"
LLAMA = MODELS / "tiny-llama-untied"
LOSES_THE_SPACE = {"ernie4_5_moe", "mixtral", "nemotron", "phi3"}
"""Their tokenizers put no space before the input, for which llama.cpp's converter writes no key."""


@pytest.fixture(scope="module")
def conversions(tmp_path_factory):
    """A folder for conversions that several tests use."""
    return tmp_path_factory.mktemp("conversions")


def alarms(certificate: Certificate) -> list[str]:
    return [str(f) for f in certificate.failures]


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_fault_is_found_and_named(fault, conversions, tmp_path):
    path = broken(fault, conversions, tmp_path)
    layout = {"ternary_layout": fault.codec} if fault.codec.startswith("i2_s") else {}
    certificate = certify(source_of(fault.model), path, logits=False, **layout)
    assert not certificate.certified
    named = [f for f in certificate.failures if f.code == fault.code]
    assert any(fault.text in str(f) for f in named), alarms(certificate)
    assert {f.code for f in certificate.failures} <= {fault.code, *fault.also}, alarms(certificate)


def test_faults_are_distinct_and_have_codes():
    names = [f.name for f in FAULTS]
    assert len(set(names)) == len(names) >= 100
    assert {f.code for f in FAULTS} <= CODES.keys()


@pytest.mark.parametrize("fault", FAULTS[::9], ids=lambda f: f.name)
def test_conversions_without_the_fault_are_certified(fault, conversions):
    layout = {"ternary_layout": fault.codec} if fault.codec.startswith("i2_s") else {}
    path = converted(fault.model, fault.to, fault.codec, conversions)
    assert alarms(certify(source_of(fault.model), path, logits=False, **layout)) == []


# ---------------------------------------------------------------- genuine conversions


@pytest.mark.parametrize("name", ["Q4_K_M", "IQ4_XS", "Q2_K", "Q4_0", "Q8_0", "TQ2_0", "f16"])
def test_files_of_llama_cpp_are_certified(name):
    certificate = certify(LLAMA / "hf", LLAMA / f"tiny-llama-untied-{name}.gguf")
    assert alarms(certificate) == [] and certificate.logits.error is not None
    assert "samples" in certificate.tokenizer and len(certificate.tensors) == 21


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K_M-bigendian"])
def test_tied_and_big_endian_files_of_llama_cpp_are_certified(name):
    tied = MODELS / "tiny-llama-tied"
    assert alarms(certify(tied / "hf", tied / f"tiny-llama-tied-{name}.gguf")) == []


@pytest.mark.parametrize("layout", ["i2_s-x86_128", "i2_s-arm_64"])
def test_files_of_bitnet_cpp_are_certified(layout):
    options = {"ternary_layout": "i2_s.x86" if "x86" in layout else "i2_s.arm"}
    path = BITNET / f"tiny-bitnet-b158-{layout}.gguf"
    assert alarms(certify(MODELS / "tiny-bitnet" / "hf", path, **options)) == []
    back = certify(path, MODELS / "tiny-bitnet" / "hf", source_layout=options["ternary_layout"])
    assert back.logits.error is not None, back.logits.reason  # the source runs in its stated layout
    assert all(t.verdict in ("equal", "within") for t in back.tensors)


@pytest.mark.parametrize("name", ["hf_packed_bitlinear", "hf_packed_autobitlinear"])
def test_packed_bitnet_folders_are_certified(name):
    assert alarms(certify(MODELS / "tiny-bitnet" / "hf", BITNET / name)) == []


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_another_activation_is_not_certified(name):
    """The graph of llama.cpp's `bitnet` has SiLU, the model relu2: the weights agree, the logits do not."""
    certificate = certify(MODELS / "tiny-bitnet" / "hf", MODELS / "tiny-bitnet" / f"tiny-bitnet-{name}.gguf")
    assert {f.code for f in certificate.failures} == {"CER036", "CER050"}
    assert {t.verdict for t in certificate.tensors} == {"equal", "within"}


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_is_certified_in_both_directions(name, tmp_path):
    """The file has the bytes of llama.cpp's (test_golden_models.py)."""
    golden = Golden(name)
    gguf = golden.to_gguf(tmp_path / "model.gguf")
    certificate = certify(golden.folder, gguf)
    assert alarms(certificate) == [] and certificate.logits.error is not None
    assert any(f.code == "CER062" for f in certificate.findings) == (name in {*LOSES_THE_SPACE, "internlm2"})
    polyquant.convert(gguf, tmp_path / "back", to="hf")
    assert alarms(certify(gguf, tmp_path / "back", logits=False)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_is_certified_in_every_codec(name, kind, tmp_path):
    golden = Golden(name)
    polyquant.convert(golden.folder, tmp_path / "a.gguf", to="gguf", codec=kind, requantize=True)
    assert alarms(certify(golden.folder, tmp_path / "a.gguf")) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_row_is_found_in_every_tensor(name, tmp_path):
    """Negate one row of each tensor in turn: of every architecture, every tensor is compared."""
    golden = Golden(name)
    good = golden.to_gguf(tmp_path / "good.gguf")
    for tensor in polyquant.open(good):
        path = tmp_path / "bad.gguf"
        shutil.copyfile(good, path)
        target = Target(path)
        x = target[tensor]
        flat = x.reshape(-1, x.shape[-1])
        flat[len(flat) // 2] *= -1
        if not flat[len(flat) // 2].any():
            continue
        target[tensor] = x
        failures = certify(golden.folder, path, logits=False).failures
        assert {f.tensor for f in failures} - {None} == {tensor}  # RoPE factors are hyper-parameters too


@pytest.mark.parametrize("kind", ["q5_1", "q3_k", "q6_k", "iq4_nl", "mxfp4", "q1_0"])
def test_our_codecs_are_certified(kind, tmp_path):
    polyquant.convert(LLAMA / "hf", tmp_path / "a.gguf", to="gguf", codec=kind)
    assert alarms(certify(LLAMA / "hf", tmp_path / "a.gguf", logits=False)) == []


@pytest.mark.parametrize(
    ("to", "kind"), [("trellis-v3", "trellis.3"), ("msmodelslim", "w8a16"), ("msmodelslim", "w8a8.dynamic")]
)
def test_our_formats_are_certified(to, kind, tmp_path):
    polyquant.convert(LLAMA / "hf", tmp_path / "out", to=to, codec=kind)
    assert alarms(certify(LLAMA / "hf", tmp_path / "out")) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_of_msmodelslim_are_certified(folder, tmp_path):
    """Smoothed or not: what the tool moved between norms and matrices is recognized."""
    path = runnable(folder, tmp_path)
    for file in source_folder(folder).iterdir():
        if not (path / file.name).exists() and "safetensors" not in file.name:
            shutil.copyfile(file, path / file.name)
    certificate = certify(source_folder(folder), path)
    assert alarms(certificate) == []
    smoothed = any(word in folder for word in ("_m1", "_m2", "_m3", "_m4", "smooth"))
    assert any(f.code == "CER060" for f in certificate.findings) == smoothed


@pytest.mark.parametrize("method", ["m4", "shift"])
def test_our_smoothing_is_certified(method, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("And it came to pass, that Pharaoh dreamed. " * 200, encoding="utf-8")
    options = {"codec": "w8a8", "calibration": str(text), "smooth": method}
    polyquant.convert(LLAMA / "hf", tmp_path / "out", to="msmodelslim", **options)
    certificate = certify(LLAMA / "hf", tmp_path / "out")
    assert alarms(certificate) == []
    assert {f.code for f in certificate.findings} <= {"CER060", "CER061"}
    for name, part, change, code in (
        ("model.layers.1.mlp.down_proj.weight", "deq_scale", lambda x: x * 2, "CER022"),
        ("model.layers.0.self_attn.q_proj.weight", "input_offset", lambda x: x + 5, "CER027"),
        ("model.layers.1.self_attn.v_proj.weight", "weight", np.negative, "CER021"),
    ):
        bad = Target(tmp_path / f"{part}-{method}")
        shutil.copytree(tmp_path / "out", bad.path)
        stored = bad.stored(name, part)
        bad.write(name, part, change(stored.astype(np.float64)).astype(stored.dtype))
        failures = certify(LLAMA / "hf", bad.path, logits=False).failures
        codes = {f.code for f in failures}
        assert code in codes if part == "weight" else codes == {code}, (part, failures)


# ---------------------------------------------------------------- parts


def weight(values, kind: str = "f32") -> Side:
    c = codec(kind)
    x = np.ascontiguousarray(values, np.float32)
    return Side((Weight("w", x.shape, c, in_memory(c.pack(c.quantize(x)))),), x.shape)


@pytest.mark.parametrize("kind", ["q4_0", "q2_k", "q8_0", "iq4_xs", "mxfp4", "w8a8.dynamic"])
def test_heavy_tails_are_within_the_bound(kind):
    """Outliers raise the error of a codec; rows beyond the usual bound are quantized again."""
    rng = np.random.default_rng(2)
    x = rng.standard_t(2, (64, 512)).astype(np.float32)
    x[3] *= 1e-6
    x[5] = 0
    assert scan(weight(x), weight(x, kind), Bounds()).sound


@pytest.mark.parametrize("kind", ["q4_0", "q2_k", "q8_0", "bf16"])
def test_only_the_wrong_rows_are_reported(kind):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((96, 512)).astype(np.float32)
    y = x.copy()
    y[17, :256] = x[18, :256]
    y[40] *= -1
    found = scan(weight(x), weight(y, kind), Bounds())
    assert found.rows == [17, 40] and not found.equal and found.finite
    assert not found.columns[0][-1] and found.columns[0][0]


def test_unit_errors_are_those_of_numpy(engine):
    rng = np.random.default_rng(4)
    a, b = (rng.standard_normal((5, 192)).astype(np.float32) for _ in range(2))
    for unit in (32, 64, 48, 192, 1):
        x, y = (v.reshape(5, -1, unit).astype(np.float64) for v in (a, b))
        wanted = np.stack([(x * x).sum(2), (y * y).sum(2), (x * y).sum(2), ((x - y) ** 2).sum(2)])
        np.testing.assert_allclose(unit_errors(a, b, unit), wanted, rtol=1e-5, atol=1e-5)


STORED_PAIRS = [("bf16", "q8_0", 32), ("f32", "q4_k", 256), ("q6_k", "iq4_xs", 768)]


@pytest.mark.parametrize(("one", "other", "unit"), STORED_PAIRS)
def test_unit_errors_of_stored_blocks_are_those_of_their_floats(one, other, unit):
    if not compares_stored(one, other, unit):
        pytest.skip("no native kernels")
    a, b = codec(one), codec(other)
    x = np.random.default_rng(5).standard_normal((7, 768)).astype(np.float32)
    p, q = a.pack(a.quantize(x)), b.pack(b.quantize(x))
    wanted = unit_errors(a.dequantize(p, x.shape), b.dequantize(q, x.shape), unit)
    stored = [parts["blocks"].reshape(len(x), -1).view(np.uint8) for parts in (p, q)]
    np.testing.assert_array_equal(stored_unit_errors(one, stored[0], other, stored[1], unit, 768 // unit), wanted)


def test_stored_blocks_that_do_not_divide_a_unit_are_not_compared():
    assert not compares_stored("q4_k", "bf16", 128)
    assert not compares_stored("trellis.3", "bf16", 256)


def test_the_certificate_is_written_and_complete(tmp_path):
    certificate = certify(LLAMA / "hf", LLAMA / "tiny-llama-untied-Q4_0.gguf", logits=False)
    certificate.write(tmp_path / "c.json")
    certificate.write(tmp_path / "c.json")  # a certificate may be replaced
    found = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert found["certificate"] == 1 and found["certified"] is True and len(found["tensors"]) == 21
    assert set(found["source"]["files"]) == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    assert all(len(f["sha256"]) == 64 for f in found["target"]["files"].values())
    assert [t["verdict"] for t in found["tensors"]].count("within") == 16
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]
    other = tmp_path / "model.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(PlanError, match="not a certificate"):
        certificate.write(other)
    with pytest.raises(PlanError, match="folder"):
        certificate.write(tmp_path)
    assert other.read_bytes() == b"GGUF"


def test_models_that_are_not_related_are_not_certified():
    certificate = certify(LLAMA / "hf", MODELS / "tiny-llama-tied" / "tiny-llama-tied-Q4_0.gguf")
    assert not certificate.certified
    assert {"CER001", "CER003", "CER031"} <= {f.code for f in certificate.failures}
    assert all(f.severity is Severity.ERROR for f in certificate.failures)


def test_explanations_of_all_codes():
    for code, text in CODES.items():
        assert polyquant.explain(code.lower()) == text and text.endswith(".")
    assert polyquant.explain("TEN001")
