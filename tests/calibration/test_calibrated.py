"""Calibrated Trellis folders and bit allocation: from the float model to the file, also resumed after a kill."""

import json
import shutil

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.analysis.demo import demo_model
from polyquant.calibration.hessians import Hessians
from polyquant.calibration.sensitivity import divergences
from polyquant.calibration.stages import DecoderStages, calibration_windows, cut
from polyquant.conversion.convert import plan
from polyquant.errors import InputError, PlanError, UnsupportedError
from polyquant.opening import open_checkpoint
from polyquant.ops import native
from polyquant.registry import codec
from polyquant.runtime.load import load

LLAMA = VECTORS / "models/tiny-llama-untied/hf"
Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"


encodes = pytest.mark.skipif(native.lib() is None, reason="the numpy encoder would take hours")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        "In the beginning there was a book, and the book was read by a model of two layers.\n" * 12, encoding="utf-8"
    )
    return path


@pytest.fixture(scope="module")
def stages(text):
    model = load(LLAMA, activations="float")
    return DecoderStages(model, calibration_windows(model, text, windows=3, tokens=40))


def files(path):
    return {f.name: f.read_bytes() for f in path.iterdir()}


def test_every_linear_of_a_layer_is_recorded(stages):
    names = [set(s) for s in stages.names]
    assert len(names) == 3
    assert len(names[0]) == len(names[1]) == 7
    assert names[2] == {"lm_head.weight"}


def test_hessians_equal_those_of_the_inputs(stages):
    """The first layer's are computed here, the head's compared with the states of the whole decoder."""
    decoder = stages.model.decoder
    hessians = Hessians(stages, ["lm_head.weight", Q])
    embeddings = np.concatenate([next(decoder.states(t, decoder.cache())).copy() for t in stages.windows])
    rms = np.sqrt(np.square(embeddings).mean(-1, keepdims=True) + decoder.hyper.norm_eps)
    last = np.concatenate([decoder.hidden(t, decoder.cache()) for t in stages.windows])
    for name, x in ((Q, embeddings / rms * decoder.layers[0].attention.norm.weight), ("lm_head.weight", last)):
        found, why = hessians.of(name)
        assert not why
        np.testing.assert_allclose(found, x.T @ x / len(x), rtol=1e-3, atol=1e-4 * np.abs(found).max())


def test_windows_cover_the_text_after_bos():
    ids = np.arange(100, 300)
    windows = cut(ids, 1, 128, 41, None)
    assert [len(w) for w in windows] == [41] * 5
    assert all(w[0] == 1 for w in windows)
    assert set(np.concatenate([w[1:] for w in windows])) == set(ids)
    assert len(cut(ids, None, 2, 40, None)) == 2
    assert len(cut(ids[:70], None, 128, 512, None)[0]) == 70
    with pytest.raises(InputError, match="too little text"):
        cut(ids[:10], 1, 128, 512, None)


def test_a_model_generates_calibration_text():
    model = load(LLAMA, activations="float")
    a, b = (calibration_windows(model, "self", windows=8, tokens=12) for _ in range(2))
    assert sum(map(len, a)) >= 24
    assert all(w[0] == model.tokenizer.special["bos"] and len(w) <= 12 for w in a)
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@encodes
def test_calibration_lowers_the_output_error(text, stages, tmp_path):
    hessians = Hessians(stages, stages.names[0])
    h = {name: hessians.of(name)[0] for name in stages.names[0]}
    source = open_checkpoint(LLAMA)

    def cost(path):
        made = open_checkpoint(path)
        errors = {n: (made[n].dequantize() - source[n].dequantize()).astype(np.float64) for n in h}
        return sum(np.einsum("nk,nk->", e @ h[n], e) / np.trace(h[n]) for n, e in errors.items())

    pq.quantize(LLAMA, tmp_path / "a", codec="trellis.2.mul1.8", to="trellis-v3")
    pq.quantize(LLAMA, tmp_path / "b", codec="trellis.2.mul1.8", to="trellis-v3", calibration=text)
    assert cost(tmp_path / "b") < 0.8 * cost(tmp_path / "a")
    said = [json.loads((tmp_path / x / "quantization_config.json").read_text())["quantization_method"] for x in "ab"]
    assert said == ["trellis_viterbi", "trellis_ldlq"]


@encodes
def test_a_killed_run_resumes_to_equal_bytes(text, tmp_path):
    options = {"codec": "trellis.3.mul1.8", "to": "trellis-v3", "calibration": text}
    told = []

    def kill(progress):
        told.append(progress.tensor)
        if progress.tensor == DOWN:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pq.quantize(LLAMA, tmp_path / "out", on_progress=kill, **options)
    assert "calibrating" in told
    assert not (tmp_path / "out").exists()
    pq.quantize(LLAMA, tmp_path / "out", resume="required", **options)
    pq.quantize(LLAMA, tmp_path / "whole", **options)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@encodes
def test_progress_counts_calibration_and_never_decreases(text, tmp_path):
    seen = []
    pq.quantize(
        LLAMA, tmp_path / "out", codec="trellis.2.mul1.4", to="trellis-v3", calibration=text, on_progress=seen.append
    )
    done = [p.done for p in seen]
    assert done == sorted(done)
    assert seen[-1].done == seen[-1].total


def test_different_calibration_text_is_a_different_job(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "More.\n")
    prints = {plan(LLAMA, "trellis-v3", bits=3, calibration=t).fingerprint for t in (None, text, other, "self")}
    assert len(prints) == 4


# ---------------------------------------------------------------- bits for each weight


@encodes
@pytest.mark.parametrize("calibrated", [False, True])
def test_target_bpw_is_reached_and_written(calibrated, text, tmp_path):
    made = plan(LLAMA, "trellis-v3", target_bpw=3.6, effort="fast", calibration=text if calibrated else None)
    assert 3.5 <= made.quantized_bpw <= 3.6  # 14 weights: steps of 0.07
    assert ("KL" if calibrated else "error of the weights") in made.recipe.name
    bits = {s.map.target: s.target.bits for s in made.steps if s.searches}
    assert len(bits) == 14
    assert len(set(bits.values())) > 1
    path = tmp_path / "out"
    if not calibrated:
        pq.convert(made, path)
        said = json.loads((path / "quantization_config.json").read_text())
        assert said["layer_allocation"]["1"]["mlp.down_proj"] == bits[DOWN]
        assert said["global_config"]["average_bits_per_weight"] == pytest.approx(made.quantized_bpw, abs=1e-5)


def test_the_demonstration_model_meets_its_target():
    for target in (2.625, 3.3, 4.5):
        assert target - 0.02 <= plan(demo_model("llama"), "trellis-v3", target_bpw=target).quantized_bpw <= target


def test_rules_keep_their_bits_and_count_towards_the_target():
    made = plan(LLAMA, "trellis-v3", target_bpw=3.5, rules=["*down_proj*=trellis.6"], effort="fast")
    bits = {s.map.target: s.target.bits for s in made.steps if s.searches}
    assert {b for n, b in bits.items() if "down_proj" in n} == {6}
    assert 3.4 <= made.quantized_bpw <= 3.5


@encodes
def test_sensitivities_are_measured(text):
    """One of two weights is zero, so quantizing it has no effect."""
    wanted = dict.fromkeys((Q, DOWN), codec("trellis.4.mul1.8"))
    found = divergences(LLAMA, text, wanted, calibrated=False)
    better = divergences(LLAMA, text, wanted, calibrated=True)
    assert set(found) == {Q, DOWN}
    assert all(1e-9 < x < 10 for x in found.values())
    assert better[DOWN] < found[DOWN]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "trellis_ldlq", "bits": 3}, "trellis_ldlq needs calibration"),
        ({"method": "trellis_viterbi", "bits": 3, "calibration": "self"}, "does not use calibration"),
        ({"method": "gptq", "bits": 3}, "unknown method"),
        ({"bits": 3, "target_bpw": 3.5}, "mutually exclusive"),
        ({"target_bpw": 2.0}, "too small for these weights"),
        ({"target_bpw": 99}, "out of range"),
        (
            {"bits": 3, "calibration": "self", "importance": {Q: np.ones(256, np.float32)}},
            "--importance and --calibration are mutually exclusive",
        ),
    ],
)
def test_conflicting_options(options, message):
    with pytest.raises(PlanError, match=message):
        plan(LLAMA, "trellis-v3", **options)


def test_missing_or_too_short_text(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("Hello.")
    for path in (tmp_path / "none.txt", short):
        with pytest.raises(InputError):
            pq.quantize(LLAMA, tmp_path / "out", bits=2, effort="fast", calibration=path)
    assert not (tmp_path / "out").exists()


def test_calibration_that_reaches_no_layer(text, tmp_path):
    with pytest.raises(UnsupportedError, match="reaches none"):
        pq.convert(
            LLAMA,
            tmp_path / "out",
            to="trellis-v3",
            calibration=text,
            rules=["model.embed_tokens.weight=trellis.4.mul1.8"],
        )
    assert not (tmp_path / "out").exists()


@encodes
def test_an_unusable_hessian_is_reported(text, tmp_path):
    """The tensor is named; it is quantized without calibration."""
    folder = tmp_path / "in"
    shutil.copytree(LLAMA, folder)
    report = pq.quantize(
        folder,
        tmp_path / "out",
        to="trellis-v3",
        calibration=text,
        rules=["model.embed_tokens.weight=trellis.4.mul1.8", "*lm_head*=trellis.4.mul1.8"],
    )
    notes = [s.note for s in report.steps if s.note]
    assert notes == ["model.embed_tokens.weight: not calibrated: the model gives it no inputs"]
