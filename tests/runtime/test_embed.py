"""Strings -> vectors: pooling, normalization, refusals, and decoders that give embeddings."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import polyquant as pq
from architectures.golden_models import Golden
from polyquant.analysis.demo import demo_model
from polyquant.errors import InputError, UnsupportedError
from polyquant.runtime.embed import unit

TOKENS = [2, 40, 41, 42, 3]
MODULES = [{"idx": i, "path": "1_Pooling" if k == "Pooling" else "", "type": f"sentence_transformers.models.{k}"}
           for i, k in enumerate(("Transformer", "Pooling", "Normalize"))]  # fmt: skip


def configured(folder, pooling, *, normalize=True, modules=None):
    """A folder as sentence-transformers writes one."""
    folder.joinpath("modules.json").write_text(json.dumps(modules or MODULES[: 3 if normalize else 2]))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return folder


@pytest.fixture
def bert(tmp_path):
    shutil.copytree(Golden("bert").folder, tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize(
    ("said", "of"),
    [
        ({"pooling_mode_mean_tokens": True}, lambda x: x.mean(0)),
        ({"pooling_mode_cls_token": True}, lambda x: x[0]),
        ({"pooling_mode_lasttoken": True}, lambda x: x[-1]),
    ],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_pooling_defaults_to_the_models(bert, said, of, normalize):
    model = pq.load(configured(bert, said, normalize=normalize))
    wanted = of(model.states(TOKENS))
    wanted = wanted / np.linalg.norm(wanted) if normalize else wanted
    np.testing.assert_allclose(model.embed(TOKENS), wanted[None], rtol=0, atol=1e-6)
    pq.convert(bert, bert.parent / "x.gguf", to="gguf", codec="f32")
    gguf = pq.load(bert.parent / "x.gguf", activations="float")
    np.testing.assert_allclose(gguf.embed(TOKENS), [unit(wanted)], rtol=0, atol=1e-5)
    np.testing.assert_allclose(gguf.embed(TOKENS, normalize=False), [of(model.states(TOKENS))], rtol=0, atol=1e-5)


def test_arguments_override_the_model(bert):
    model = pq.load(bert)
    states = model.states(TOKENS)
    np.testing.assert_array_equal(model.embed(TOKENS, pooling="cls"), states[:1])
    np.testing.assert_array_equal(model.embed(TOKENS, pooling="last"), states[-1:])
    assert np.linalg.norm(model.embed(TOKENS, normalize=True)[0]) == pytest.approx(1, abs=1e-6)


def test_strings_lists_and_ids(bert):
    model = pq.load(bert)
    both = model.embed(["the word", "of the lord"])
    assert both.shape == (2, 64) and both.dtype == np.float32
    np.testing.assert_array_equal(model.embed("the word"), both[:1])
    ids = [model.tokenizer.encode(text) for text in ("the word", "of the lord")]
    assert ids[0][0] == 2 and ids[0][-1] == 3
    np.testing.assert_array_equal(model.embed(ids), both)
    np.testing.assert_array_equal(model.embed(np.array(ids[1])), both[1:])


@pytest.mark.parametrize(
    ("texts", "match"),
    [
        ([], "there is no input text"), ([[]], "an input is empty"), ([[1.5]], "list of token ids"),
        ([[[1]]], "list of token ids"), ([[384]], "outside the vocabulary"),
        ([[-1]], "outside the vocabulary"), ([[5] * 129], "at most 128 tokens, found 129"),
        ("a " * 100_000, "found an input of 200000 characters"), ("a b " * 200, "longer"),
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_embedded(bert, texts, match):
    with pytest.raises(InputError, match=match):
        pq.load(bert).embed(texts)


def test_a_smaller_context(bert):
    with pytest.raises(InputError, match="at most 4 tokens"):
        pq.load(bert, context=4).embed([[5] * 5])


def test_a_model_without_declared_pooling(bert):
    (bert / "modules.json").unlink()
    model = pq.load(bert)
    with pytest.raises(UnsupportedError, match="choose one: --pooling mean, cls, last"):
        model.embed(TOKENS)
    np.testing.assert_allclose(model.embed(TOKENS, pooling="mean"), [model.states(TOKENS).mean(0)], atol=1e-6)
    with pytest.raises(InputError, match="unknown pooling"):
        model.embed(TOKENS, pooling="max")


def test_unsupported_modules_and_poolings(bert):
    dense = [*MODULES[:2], {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    with pytest.raises(UnsupportedError, match="Dense"):
        pq.load(configured(bert, {"pooling_mode_mean_tokens": True}, modules=dense)).embed(TOKENS)
    with pytest.raises(UnsupportedError, match="pooling"):
        pq.load(configured(bert, {"pooling_mode_max_tokens": True})).embed(TOKENS)
    with pytest.raises(InputError, match=r"modules\.json"):
        pq.load(configured(bert, {"pooling_mode_mean_tokens": True}, modules=[3])).embed(TOKENS)
    configured(bert, {"pooling_mode_mean_tokens": True})
    pq.convert(bert, bert.parent / "x.gguf", to="gguf", codec="f32")
    pq.edit(bert.parent / "x.gguf", set={"bert.pooling_type": 4})
    with pytest.raises(UnsupportedError, match="found 4"):
        pq.load(bert.parent / "x.gguf").embed(TOKENS)


def test_an_encoder_does_not_generate(bert):
    model = pq.load(bert)
    for asked in (lambda: model.generate("a"), lambda: model.logits(TOKENS), model.session, lambda: model.decoder):
        with pytest.raises(UnsupportedError, match="encoder: it produces embeddings and generates no text"):
            asked()
    with pytest.raises(InputError, match="has no key/value cache"):
        pq.load(bert, cache="f16")
    text = bert.parent / "text.txt"
    text.write_text("In the beginning was the word. " * 20)
    for asked in (
        lambda: pq.evaluate(bert, text=text),
        lambda: pq.quantize(bert, bert.parent / "out", to="trellis-v3", calibration=text),
    ):
        with pytest.raises(UnsupportedError, match="generates no text"):
            asked()


def test_a_decoder_with_a_pooling(tmp_path):
    """As Qwen3-Embedding: the last token's state, of length 1; GGUF and the folder made from it keep the pooling."""
    folder = tmp_path / "model"
    shutil.copytree(demo_model("llama"), folder)
    configured(folder, {"pooling_mode_lasttoken": True})
    model = pq.load(folder)
    ids = model.tokenizer.encode("In the beginning")
    wanted = unit(model.session().states(ids)[-1])
    np.testing.assert_allclose(model.embed("In the beginning"), [wanted], atol=1e-6)
    np.testing.assert_allclose(model.decoder.logits(model.states(ids)), model.logits(ids), atol=1e-4)
    pq.convert(folder, tmp_path / "x.gguf", to="gguf", codec="f32")
    np.testing.assert_allclose(pq.load(tmp_path / "x.gguf", activations="float").embed([ids]), [wanted], atol=1e-4)
    pq.convert(tmp_path / "x.gguf", tmp_path / "back", to="hf")
    assert pq.load(tmp_path / "back").pooling.kind == "last"


def test_a_pooling_unknown_to_gguf_still_converts(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(demo_model("llama"), folder)
    configured(folder, {"pooling_mode_weightedmean_tokens": True})
    assert any("pooling" in w for w in pq.plan(folder, to="gguf").warnings)
    with pytest.raises(UnsupportedError, match="does not specify"):
        pq.load(demo_model("llama")).embed("a")


def test_inputs_longer_than_the_position_table(tmp_path):
    """A decoder takes them in pieces: the states are those of one pass."""
    model = pq.load(demo_model("llama"))
    tokens = np.random.default_rng(1).integers(3, 200, 512)
    session = model.session()
    single = [session.states([t])[0] for t in tokens[:40]]
    np.testing.assert_allclose(model.states(tokens)[:40], single, atol=2e-3)


@pytest.mark.slow
def test_nomic_bert_equals_transformers(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(7)
    config = transformers.NomicBertConfig(
        vocab_size=40, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    theirs = transformers.NomicBertModel(config, add_pooling_layer=False).float().eval()
    for weights in theirs.parameters():
        weights.data.copy_(torch.randn(weights.shape) * 0.2 + (1.0 if weights.ndim == 1 else 0.0))
    theirs.save_pretrained(tmp_path / "nomic")
    ids = np.random.default_rng(2).integers(0, 40, 24)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(ids)[None]).last_hidden_state[0].numpy()
    pq.convert(tmp_path / "nomic", tmp_path / "x.gguf", to="gguf", codec="f32")
    for path in (tmp_path / "nomic", tmp_path / "x.gguf"):
        np.testing.assert_allclose(pq.load(path, activations="float").states(ids), wanted, rtol=0, atol=2e-5)
