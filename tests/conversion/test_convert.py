"""Conversions compared with the files that llama.cpp and bitnet.cpp write for the same folders."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.conversion.merge import sum_reports
from polyquant.conversion.report import StepReport, errors_of
from polyquant.errors import InputError, PlanError
from polyquant.ops.metrics import error_sums

MODELS = VECTORS / "models"
SEARCHED = {"q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "iq4_nl"}


def made(tmp_path, model, **options):
    pq.convert(MODELS / model / "hf", tmp_path / "out.gguf", **options)
    return pq.open(tmp_path / "out.gguf")


@pytest.mark.parametrize(
    "model, options, twin",
    [
        ("tiny-llama-untied", {"codec": "f16"}, "f16"),
        ("tiny-llama-untied", {"recipe": "q8_0"}, "Q8_0"),
        ("tiny-llama-untied", {"recipe": "q4_0"}, "Q4_0"),
        ("tiny-llama-untied", {"recipe": "q4_k_m"}, "Q4_K_M"),
        ("tiny-llama-untied", {"recipe": "q2_k"}, "Q2_K"),
        ("tiny-llama-untied", {"recipe": "iq4_xs"}, "IQ4_XS"),
        ("tiny-llama-untied", {"recipe": "tq2_0"}, "TQ2_0"),
        ("tiny-llama-tied", {"recipe": "q4_0"}, "Q4_0"),
        ("tiny-bitnet", {"recipe": "tq1_0", "architecture": "bitnet"}, "TQ1_0"),
        ("tiny-bitnet", {"recipe": "tq2_0", "architecture": "bitnet"}, "TQ2_0"),
    ],
)
def test_tensors_equal_llama_cpp(tmp_path, model, options, twin, engine):
    """Equal names, shapes, types and bytes; for searched types, at most the same error."""
    ours, theirs = made(tmp_path, model, **options), pq.open(MODELS / model / f"{model}-{twin}.gguf")
    source = {t.name: t for t in pq.open(made_float(tmp_path, model, options)).values()}
    assert set(ours) == set(theirs)
    for name, w in theirs.items():
        mine = ours[name]
        assert (mine.shape, str(mine.codec)) == (w.shape, str(w.codec)), name
        if str(w.codec) not in SEARCHED:
            np.testing.assert_array_equal(mine.parts["blocks"], w.parts["blocks"], err_msg=name)
            continue
        truth = source[name].dequantize()
        assert error_sums(truth, mine.dequantize()).dd <= error_sums(truth, w.dequantize()).dd * 1.0001, name


def made_float(tmp_path, model, options):
    path = tmp_path / "float.gguf"
    pq.convert(MODELS / model / "hf", path, codec="f32", architecture=options.get("architecture"))
    return path


@pytest.mark.parametrize("folder", ["hf_packed_autobitlinear", "hf_packed_bitlinear"])
@pytest.mark.parametrize("layout", ["i2_s.x86", "i2_s.arm"])
def test_packed_bitnet_becomes_bitnet_cpps_i2_s(tmp_path, folder, layout):
    pq.convert(VECTORS / "bitnet_gguf" / folder, tmp_path / "out.gguf", codec=layout)
    twin = VECTORS / "bitnet_gguf" / f"tiny-bitnet-b158-i2_s-{'x86_128' if layout == 'i2_s.x86' else 'arm_64'}.gguf"
    ours, theirs = pq.open(tmp_path / "out.gguf", ternary_layout=layout), pq.open(twin, ternary_layout=layout)
    assert set(ours) == set(theirs)
    for name, w in theirs.items():
        if "i2_s" in str(w.codec):
            n = w.shape[0] * w.shape[1] // 4
            np.testing.assert_array_equal(ours[name].parts["blocks"][:n], w.parts["blocks"][:n], err_msg=name)
            mine, scale = (x.parts["blocks"][n : n + 4].view(np.float32)[0] for x in (ours[name], w))
            assert mine == pytest.approx(scale, rel=0 if folder.endswith("autobitlinear") else 1 / 128)


@pytest.mark.parametrize(
    "codec", ["tq2_0", "tq1_0", "i2_s.x86", "i2_s.arm", "i2_s.x4", "trinity.i2_s", "trinity.tq2_0"]
)
def test_ternaries_keep_every_code(tmp_path, codec):
    source = VECTORS / "bitnet_gguf" / "hf_packed_autobitlinear"
    pq.convert(source, tmp_path / "a.gguf", codec=codec)
    layout = {"ternary_layout": codec} if "i2_s" in codec else {}
    found = pq.compare(source, tmp_path / "a.gguf", **layout)
    shares = [t.equal_codes for t in found.tensors if t.equal_codes is not None and t.b == codec]
    assert shares and all(share == 1.0 for share in shares)


@pytest.mark.parametrize("model", ["tiny-llama-untied", "tiny-llama-tied"])
def test_gguf_round_trip_is_lossless(tmp_path, model):
    source = MODELS / model / "hf"
    pq.convert(source, tmp_path / "m.gguf")
    pq.convert(tmp_path / "m.gguf", tmp_path / "back", to="hf")
    a, b = pq.open(source), pq.open(tmp_path / "back")
    assert set(a) == set(b)
    for name in a:
        np.testing.assert_array_equal(a[name].dequantize(), b[name].dequantize(), err_msg=name)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "vocab_size",
        "tie_word_embeddings",
    ):
        assert config[key] == a.config[key], key


def test_bytes_do_not_depend_on_threads(tmp_path):
    for n in (1, 3):
        pq.convert(MODELS / "tiny-llama-untied" / "hf", tmp_path / f"{n}.gguf", recipe="q4_k_m", threads=n)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()


def test_the_plan_has_the_exact_size(tmp_path):
    plan = pq.plan(MODELS / "tiny-llama-untied" / "hf", "gguf", recipe="q4_k_m")
    pq.convert(plan, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").stat().st_size == plan.nbytes


def test_a_killed_conversion_resumes_to_equal_bytes(tmp_path):
    source = MODELS / "tiny-llama-untied" / "hf"
    pq.convert(source, tmp_path / "whole.gguf", codec="q8_0")

    class Killed(BaseException):
        pass

    def kill(event):
        if event.done > event.total // 2:
            raise Killed

    with pytest.raises(Killed):
        pq.convert(source, tmp_path / "m.gguf", codec="q8_0", on_progress=kill)
    assert not (tmp_path / "m.gguf").exists()
    pq.convert(source, tmp_path / "m.gguf", codec="q8_0", resume="required")
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_quantized_sources_are_refused_by_default(tmp_path):
    source = MODELS / "tiny-llama-untied" / "tiny-llama-untied-Q4_0.gguf"
    with pytest.raises(PlanError, match="--requantize"):
        pq.convert(source, tmp_path / "m.gguf", codec="q8_0")
    report = pq.convert(source, tmp_path / "m.gguf", codec="q8_0", requantize=True)
    assert {s.action for s in report.steps} >= {"requantize", "copy"}


def test_q4_0_becomes_floats_without_requantize(tmp_path):
    source = MODELS / "tiny-llama-untied" / "tiny-llama-untied-Q4_0.gguf"
    pq.convert(source, tmp_path / "hf", to="hf", codec="f32")
    error = pq.compare(source, tmp_path / "hf").error
    assert error.dd == 0


def test_weights_that_are_proved_equal_are_reported_so(tmp_path):
    source = MODELS / "tiny-llama-untied" / "tiny-llama-untied-Q4_0.gguf"
    report = pq.convert(source, tmp_path / "out", to="compressed-tensors")
    steps = [s for s in report.steps if s.action == "transcode" and s.source == "q4_0"]
    assert steps and all(s.exact and s.error is None for s in steps)
    rows = {row["tensor"]: row for row in report.rows()}
    after, before = pq.open(tmp_path / "out"), pq.open(source)
    for step in steps:
        assert (rows[step.tensor]["snr_db"], rows[step.tensor]["max_error"]) == (math.inf, 0)
        assert StepReport.from_json(step.to_json()) == step
        if "o_proj" not in step.tensor:
            continue
        name = step.tensor.replace("model.layers.", "blk.").replace("self_attn.o_proj", "attn_output")
        np.testing.assert_array_equal(after[step.tensor].dequantize(), before[name].dequantize())
    rounded = replace(steps[0], error=error_sums(np.ones(2, np.float32), np.zeros(2, np.float32)), exact=False)
    assert sum_reports(steps[0], steps[1:]).exact and not sum_reports(steps[0], [rounded]).exact
    assert errors_of([*steps, rounded])["snr_db"] == 0 and errors_of(steps)["rrmse"] == 0
    assert errors_of([replace(steps[0], exact=False)]) is None


def test_a_split_gguf_opens_as_one(tmp_path):
    source = MODELS / "tiny-llama-untied" / "hf"
    pq.convert(source, tmp_path / "m.gguf", codec="q8_0", shard_bytes=300_000)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [f"m-{i:05}-of-{len(names):05}.gguf" for i in range(1, len(names) + 1)]
    assert len(names) > 2
    pq.convert(source, tmp_path / "whole.gguf", codec="q8_0")
    assert pq.compare(tmp_path / "whole.gguf", tmp_path / names[0]).error.dd == 0
    with pytest.raises(PlanError, match="target exists"):
        pq.convert(source, tmp_path / "m.gguf", codec="q8_0", shard_bytes=300_000)


def test_a_nan_in_the_source_stops_the_job(tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(MODELS / "tiny-llama-tied" / "hf", folder)
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-2:] = b"\x00\x7e"
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(InputError, match="NaN"):
        pq.convert(folder, tmp_path / "m.gguf", codec="q8_0")
    assert not (tmp_path / "m.gguf").exists()
    assert any(f.code == "TEN001" for f in pq.validate(folder))


def test_importance_changes_the_codes(tmp_path):
    source = MODELS / "tiny-llama-untied" / "hf"
    shapes = {w.name: w.shape for w in pq.open(MODELS / "tiny-llama-untied" / "tiny-llama-untied-f16.gguf").values()}
    rng = np.random.default_rng(0)
    importance = {
        n: rng.gamma(0.3, 1.0, s[-1]).astype(np.float32) + np.float32(1e-3) for n, s in shapes.items() if len(s) == 2
    }
    plain, weighted = made(tmp_path, "tiny-llama-untied", codec="q4_k"), {}
    truth = {n: plain[n].dequantize().copy() for n in importance}
    weighted = made(tmp_path / ".", "tiny-llama-untied", codec="q4_k", importance=importance, overwrite=True)
    source_weights = pq.open(made_float(tmp_path, "tiny-llama-untied", {}))
    name = "blk.0.ffn_up.weight"
    w = source_weights[name].dequantize()
    cost = [float((importance[name] * (w - x) ** 2).sum()) for x in (truth[name], weighted[name].dequantize())]
    assert cost[1] < cost[0]
    assert source.is_dir()
