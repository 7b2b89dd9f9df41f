"""Evaluation windows, perplexity against llama.cpp and transformers, divergence against the formula on full logits."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyquant
from golden import VECTORS
from polyquant.analysis.demo import demo_model
from polyquant.errors import InputError, PlanError, PolyquantError
from polyquant.ops import native
from polyquant.runtime import scoring
from polyquant.runtime import text as text_module
from polyquant.runtime.windows import halves, sliding

DEMO = demo_model("llama")
HELD_OUT = DEMO.parent / "held-out.txt"
UNTIED = VECTORS / "models/tiny-llama-untied"
BOS = 7

# ---------------------------------------------------------------- windows

texts = st.integers(0, 200).map(lambda n: np.arange(1000, 1000 + n))


@given(texts, st.integers(4, 40), st.sampled_from([None, BOS]))
def test_halves_scores_the_second_half_of_adjacent_windows(text, context, bos):
    stream = text if bos is None else np.concatenate([[bos], text])  # as a tokenizer gives it
    if len(stream) < context:
        with pytest.raises(InputError, match=r"too short for one window|no tokens"):
            list(halves(text, context, bos))
        return
    windows = list(halves(text, context, bos))
    assert len(windows) == len(stream) // context
    for i, w in enumerate(windows):
        expected = stream[i * context : (i + 1) * context].copy()
        if bos is not None:
            expected[0] = bos
        assert w.tokens.tolist() == expected.tolist()
        assert w.first == context // 2 + 1  # n_ctx / 2 predicts the first one
        assert text[w.start : w.stop].tolist() == expected[w.first :].tolist()


@given(texts, st.integers(2, 40), st.data(), st.sampled_from([None, BOS]))
def test_sliding_scores_every_token_once_with_enough_context(text, context, data, bos):
    stride = data.draw(st.integers(1, context - 1))
    if len(text) < (2 if bos is None else 1):
        with pytest.raises(InputError, match="too short"):
            list(sliding(text, context, stride, bos))
        return
    windows = list(sliding(text, context, stride, bos))
    scored = np.concatenate([w.tokens[w.first :] for w in windows])
    assert scored.tolist() == text[0 if bos is not None else 1 :].tolist()
    for w in windows:
        assert len(w.tokens) <= context and w.first >= 1
        assert text[w.start : w.stop].tolist() == w.tokens[w.first :].tolist()
        assert bos is None or w.tokens[0] == bos
    for w in windows[1:]:
        assert w.first >= context - stride


@pytest.mark.parametrize("stride", [0, -1, 8, 9])
def test_a_stride_that_does_not_fit_is_refused(stride):
    with pytest.raises(InputError, match="expected 1 to 7"):
        list(sliding(np.arange(20), 8, stride, None))


# ---------------------------------------------------------------- perplexity

LLAMA_CPP = {"q8_0": 35.142754, "q4_k_m": 35.401005}
"""Reference perplexities of llama-cpp-python 0.3.36 on files of `polyquant quantize demo/llama --recipe ...`.

The first 2048 tokens of held-out.txt including BOS, in 4 windows of 512 with the last 255 scored; defaults (float16
cache), one thread.
"""


@pytest.mark.parametrize("recipe", LLAMA_CPP)
def test_perplexity_equals_llama_cpp(recipe, tmp_path):
    path = tmp_path / "model.gguf"
    polyquant.quantize(DEMO, path, recipe=recipe)
    found = polyquant.evaluate(path, text=HELD_OUT, tokens=2047)
    assert (found.windows, found.context, found.model.tokens) == (4, 512, 1020)
    assert found.model.perplexity.value == pytest.approx(LLAMA_CPP[recipe], rel=1e-3)
    assert found.model.nbytes == sum(w.nbytes for w in polyquant.open(path).values())


def test_perplexity_equals_transformers():
    """Reference values of transformers 5.23.0, torch 2.13.0, float32 on demo/llama.

    1500 tokens, windows of BOS and 255 tokens with stride 100; the sum of log_softmax in float64.
    """
    found = polyquant.evaluate(DEMO, text=HELD_OUT, tokens=1500, context=256, stride=100, activations="float")
    assert (found.method, found.model.tokens, found.model.bytes) == ("sliding", 1500, 5317)
    assert found.model.nll.value == pytest.approx(3.715786485966396, abs=1e-6)
    assert found.model.nll.error == pytest.approx(0.07128449725300302, abs=1e-6)
    assert found.model.perplexity.value == pytest.approx(math.exp(found.model.nll.value))
    assert found.model.perplexity.error == pytest.approx(found.model.perplexity.value * found.model.nll.error)
    assert found.model.bits_per_byte == pytest.approx(1500 * 3.715786485966396 / math.log(2) / 5317, abs=1e-6)


@pytest.mark.parametrize(
    "model", ["tiny-llama-untied/tiny-llama-untied-Q4_K_M.gguf", "tiny-bitnet/tiny-bitnet-TQ2_0.gguf"]
)
def test_kernels_and_numpy_agree(model):
    if native.lib() is None:
        pytest.skip("native kernels are not built or switched off")
    path, found = VECTORS / "models" / model, {}
    for engine in ("native", "numpy"):
        with native.engine(engine):
            found[engine] = polyquant.evaluate(path, text=HELD_OUT, tokens=150, context=64, activations="float")
    assert found["native"].model.nll.value == pytest.approx(found["numpy"].model.nll.value, abs=1e-5)


def test_bytes_are_counted_in_utf8(tmp_path):
    text = tmp_path / "text"
    text.write_text("naïve — 中文字 and 🙂 more of it, " * 20, encoding="utf-8")
    found = polyquant.evaluate(UNTIED / "hf", text=text, context=32, stride=31, activations="float")
    assert found.model.bytes == pytest.approx(
        text.stat().st_size, rel=0.02
    )  # characters cut by windows count as U+FFFD


def test_progress_ends_with_the_result():
    told = []
    found = polyquant.evaluate(UNTIED / "hf", text=HELD_OUT, tokens=300, context=64, on_progress=told.append)
    assert [event.done for event in told] == [31 * (i + 1) for i in range(found.windows)]
    last = told[-1]
    assert last.done == last.total == found.model.tokens
    assert last.tensor == f"perplexity {found.model.perplexity.value:.4g}"


# ---------------------------------------------------------------- against another


def by_hand(path, other, text, context):
    """Compute every figure from full float64 log-probabilities."""
    a, b = polyquant.load(path, activations="float"), polyquant.load(other, activations="float")
    ids = np.array(a.tokenizer.encode(text.read_text(), add_special=False)[:200])
    bos = a.tokenizer.special["bos"] if a.tokenizer.encode("")[:1] == [a.tokenizer.special.get("bos")] else None
    p, q, targets = [], [], []
    for w in halves(ids, context, bos):
        for model, out in ((a, q), (b, p)):
            z = model.logits(w.tokens)[w.first - 1 : -1].astype(np.float64)
            out.append(
                z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) - z.max(-1, keepdims=True)
            )
        targets += w.tokens[w.first :].tolist()
    p, q = np.concatenate(p), np.concatenate(q)
    kl = (np.exp(p) * (p - q)).sum(-1)
    rows = np.arange(len(targets))
    chosen = q[rows, targets], p[rows, targets]
    return {
        "kl": kl.mean(),
        "kl_error": kl.std(ddof=1) / len(kl) ** 0.5,
        "kl_99": np.quantile(kl, 0.99),
        "kl_max": kl.max(),
        "top_1": (p.argmax(-1) == q.argmax(-1)).mean(),
        "probability_rms": np.sqrt(np.mean((np.exp(chosen[0]) - np.exp(chosen[1])) ** 2)),
        "nll": -chosen[0].mean(),
        "reference": -chosen[1].mean(),
    }


@pytest.mark.parametrize(
    ("fed", "logits"), [(512, 1 << 23), (7, 3 * 512), (19, 1)], ids=["whole", "pieces", "one by one"]
)
def test_divergence_equals_the_formula_for_any_chunk_size(fed, logits, monkeypatch):
    monkeypatch.setattr(scoring, "_FED", fed)
    monkeypatch.setattr(scoring, "_LOGITS", logits)
    path, other = UNTIED / "tiny-llama-untied-Q2_K.gguf", UNTIED / "tiny-llama-untied-f16.gguf"
    found = polyquant.evaluate(path, text=HELD_OUT, against=other, context=50, tokens=200, activations="float")
    truth, got = by_hand(path, other, HELD_OUT, 50), found.divergence
    assert got.kl.value == pytest.approx(truth["kl"], rel=1e-4) and got.kl.value > 0.01
    assert got.kl.error == pytest.approx(truth["kl_error"], rel=1e-4)
    assert got.kl_99 == pytest.approx(truth["kl_99"], rel=1e-4) and got.kl_max == pytest.approx(
        truth["kl_max"], rel=1e-4
    )
    assert got.top_1.value == truth["top_1"]
    assert got.probability_rms == pytest.approx(truth["probability_rms"], rel=1e-3)
    assert found.model.nll.value == pytest.approx(truth["nll"], abs=1e-5)
    assert found.reference.nll.value == pytest.approx(truth["reference"], abs=1e-5)
    assert got.log_ratio.value == pytest.approx(truth["nll"] - truth["reference"], abs=1e-5)


def test_divergence_of_a_model_from_itself_is_zero():
    found = polyquant.evaluate(UNTIED / "hf", text=HELD_OUT, against=UNTIED / "hf", context=64, tokens=200).divergence
    assert (found.top_1.value, found.log_ratio.value, found.probability_rms) == (1.0, 0.0, 0.0)
    assert abs(found.kl_max) < 1e-12
    assert all(layer.output == layer.alone == 0 for layer in found.layers)
    assert [layer.name for layer in found.layers] == ["embedding", "layer 0", "layer 1", "head"]


@pytest.mark.parametrize(
    ("rule", "blamed"),
    [
        ("blk.2.ffn_up.weight=q2_k", "layer 2"),
        ("blk.0.attn_v.weight=q2_k", "layer 0"),
        ("token_embd.weight=q4_0", "embedding"),
    ],
)
def test_the_modified_layer_is_named(rule, blamed, tmp_path):
    path = tmp_path / "model.gguf"
    polyquant.quantize(DEMO, path, codec="f32", rules=[rule])
    found = polyquant.evaluate(path, text=HELD_OUT, against=DEMO, tokens=300, context=100, activations="float")
    alone = {layer.name: layer.alone for layer in found.divergence.layers}
    if blamed == "embedding":  # which is the head, too
        assert alone.pop("head") > 1e-3
    assert alone.pop(blamed) > 1e-3
    assert all(error < 1e-5 for error in alone.values()), alone
    names = [layer.name for layer in found.divergence.layers]
    for layer in found.divergence.layers[names.index(blamed) :]:
        assert layer.output > 1e-3, layer  # later layers inherit the error


def test_ternary_layout_applies_to_both_models(tmp_path):
    bitnet = demo_model("bitnet")
    paths = {layout: tmp_path / f"{layout}.gguf" for layout in ("i2_s.x86", "i2_s.arm")}
    for layout, path in paths.items():
        polyquant.convert(bitnet, path, codec=layout)
    common = {"text": HELD_OUT, "tokens": 150, "context": 100}
    found = polyquant.evaluate(
        paths["i2_s.arm"], against=paths["i2_s.x86"], ternary_layout="i2_s.arm", against_layout="i2_s.x86", **common
    )
    assert found.divergence.kl_max < 1e-6
    wrong = polyquant.evaluate(paths["i2_s.arm"], against=bitnet, **common)
    assert wrong.divergence.kl.value > 1 and wrong.divergence.top_1.value < 0.2


@pytest.mark.parametrize(("cache", "error"), [("f16", 1e-4), ("int8", 1e-2)])
def test_the_requested_cache_is_used(cache, error):
    """Keys and values in fewer bits change the figures slightly."""
    path = UNTIED / "tiny-llama-untied-Q8_0.gguf"
    common = {"text": HELD_OUT, "tokens": 99, "context": 100, "stride": 99, "activations": "float"}
    found, exact = polyquant.evaluate(path, cache=cache, **common), polyquant.evaluate(path, **common)
    assert (found.model.cache, exact.model.cache) == (cache, "f32")
    assert 0 < abs(found.model.nll.value - exact.model.nll.value) < error


def test_long_windows_are_fed_in_parts_with_the_same_result(monkeypatch):
    def layers():
        return polyquant.evaluate(
            UNTIED / "tiny-llama-untied-Q8_0.gguf",
            text=HELD_OUT,
            against=UNTIED / "hf",
            context=120,
            tokens=130,
            activations="float",
        ).divergence.layers

    whole = layers()
    monkeypatch.setattr(scoring, "_FED", 11)
    for a, b in zip(whole, layers(), strict=True):
        assert a.output == pytest.approx(b.output, rel=1e-3) and a.alone == pytest.approx(b.alone, rel=1e-3)


def test_json_contains_every_figure():
    found = polyquant.evaluate(
        UNTIED / "tiny-llama-untied-Q8_0.gguf", text=HELD_OUT, against=UNTIED / "hf", tokens=100, context=64
    )
    told = json.loads(json.dumps(found.to_json()))
    assert told["model"]["perplexity"]["value"] == found.model.perplexity.value
    assert told["model"]["bpw"] == found.model.bpw and told["reference"]["nbytes"] == found.reference.nbytes
    assert told["divergence"]["kl"]["value"] == found.divergence.kl.value
    assert told["divergence"]["layers"][1]["name"] == "layer 0"


# ---------------------------------------------------------------- unusable input

BAD = {
    "missing": (lambda t: None, {}, "cannot be opened"),
    "a folder": (lambda t: t.mkdir(), {}, "not a regular file"),
    "no UTF-8": (lambda t: t.write_bytes(b"abc\xff"), {}, "not UTF-8 (byte 3)"),
    "empty": (lambda t: t.write_bytes(b""), {}, "the text has no tokens"),
    "short": (lambda t: t.write_text("And it came to pass"), {}, "too short for one window"),
    "nothing to slide over": (lambda t: t.write_bytes(b""), {"stride": 4}, "too short to be scored"),
    "window beyond the model": (lambda t: t.write_text("x"), {"context": 10**9}, "does not fit the model"),
    "window of one": (lambda t: t.write_text("x"), {"context": 1}, "does not fit the model"),
    "no tokens": (lambda t: t.write_text("x"), {"tokens": 0}, "at least 1"),
    "stride beyond the window": (lambda t: t.write_text("x"), {"context": 16, "stride": 16}, "expected 1 to 15"),
}


@pytest.mark.parametrize("case", BAD)
def test_unusable_text_is_a_one_line_error(case, tmp_path):
    make, options, said = BAD[case]
    make(tmp_path / "text")
    with pytest.raises(PolyquantError) as refused:
        polyquant.evaluate(UNTIED / "hf", text=tmp_path / "text", **options)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_oversized_text_is_refused_without_reading(monkeypatch):
    monkeypatch.setattr(text_module, "MAX_TEXT_BYTES", 1000)
    with pytest.raises(InputError, match="too large"):
        polyquant.evaluate(UNTIED / "hf", text=HELD_OUT)


def test_different_vocabularies_are_not_compared():
    with pytest.raises(PlanError, match=r"vocabulary sizes differ.*bits per byte"):
        polyquant.evaluate(UNTIED / "hf", text=HELD_OUT, against=DEMO)


def test_vocabularies_of_equal_size_but_different_tokens_are_not_compared(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in (UNTIED / "hf").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    body = json.loads((other / "tokenizer.json").read_text())
    vocabulary = body["model"]["vocab"]
    a, b = [token for token in vocabulary if vocabulary[token] in (300, 301)]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (other / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(PlanError, match="vocabularies differ at token 300"):
        polyquant.evaluate(UNTIED / "hf", text=HELD_OUT, against=other)


def test_models_of_different_depth_are_compared_without_layers():
    """Two models that share only the vocabulary."""
    tied = VECTORS / "models/tiny-llama-tied"
    found = polyquant.evaluate(tied / "hf", text=HELD_OUT, against=UNTIED / "hf", tokens=100, context=64)
    assert found.divergence.layers == () and found.divergence.kl.value > 0.1


def test_a_model_with_nan_logits_is_an_error():
    with pytest.raises(InputError, match=r"not a number.*polyquant validate"):
        scoring.log_sum_exp(np.array([[1.0, np.nan]], np.float32))
