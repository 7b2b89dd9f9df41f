"""Smoothing: scales and shifts equal those in the golden folders; the model's output is unchanged."""

import contextlib
import json
import shutil

import numpy as np
import pytest

import polyquant as pq
from folders import safetensors_bytes
from golden import VECTORS
from polyquant.architectures.find import known
from polyquant.calibration.statistics import InputRanges
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import InputError, UnsupportedError
from polyquant.formats.msmodelslim.options import MsModelSlimOptions
from polyquant.formats.msmodelslim.prepare import prepare
from polyquant.formats.smoothing import Smoothing, last_norm, links
from polyquant.formats.trellis.target import is_linear
from polyquant.opening import open_checkpoint
from polyquant.runtime import identity
from polyquant.testing.architectures import tiny_model

ROOT = VECTORS / "msmodelslim"
QWEN2, QWEN3, CHATGLM = (ROOT / "models" / n for n in ("qwen2_fp16", "qwen3_bf16", "../chatglm2/float"))


def prepared(folder, method, ids, **options):
    source = open_checkpoint(folder)
    targets = {n: MsModelSlim("w8a8") for n, w in source.items() if is_linear(n, w.shape)}
    return source, prepare(
        source, MsModelSlimOptions(smooth=method, calibration=str(ids), **options), targets.items(), lambda _: None
    )


def random_ids(path, vocab):
    ids = np.random.default_rng(1).integers(0, vocab, (4, 40)).tolist()
    path.write_text(json.dumps(ids))
    return path


@pytest.mark.parametrize(("run", "method"), [("w8a8_m1", "m1"), ("ascendv1_w8a8_m4", "m4")])
def test_scales_equal_the_tools(run, method):
    source, found = prepared(QWEN2, method, QWEN2 / "calib_ids.json")
    theirs = open_checkpoint(ROOT / "v0/fp16" / run)
    checked = 0
    for name, value in found.values.items():
        np.testing.assert_allclose(
            value, theirs[name].dequantize(), rtol=2e-3, atol=1e-4, err_msg=name
        )  # float16 on their side
        checked += 1
    assert checked == (4 if method == "m1" else 6)  # norms; with m4 the biases of v too
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        assert found.changes(name) == (method == "m4")
        w = found.weight(name, source[name].dequantize())
        assert np.linalg.norm(theirs[name].dequantize() - w) < 0.02 * np.linalg.norm(w)


def test_shifts_equal_the_tools(tmp_path):
    """The v1 run of the vectors; of its first layer, whose inputs no rounding has touched."""
    vocab = json.loads((QWEN3 / "vocab.json").read_text())
    spelled = {" ": "Ġ", "\n": "Ċ"}  # bytes as the vocabulary writes them
    texts = [json.loads(line)["inputs_pretokenized"] for line in (QWEN3 / "calib.jsonl").read_text().splitlines()]
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([[vocab[spelled.get(c, c)] for c in text] for text in texts]))
    _, found = prepared(float32(QWEN3, tmp_path / "float32"), "shift", ids, kv="c8", dtype="f32")
    theirs = open_checkpoint(ROOT / "v1/fp32/w8a8_smoothasym_c8")
    first = [n for n in found.values if ".layers.0." in n and "kv_cache" not in n]
    assert len(first) == 4 + 5  # norms, and a bias for each linear that reads one
    for name in first:
        np.testing.assert_allclose(found.values[name], theirs[name].dequantize(), rtol=1e-4, atol=2e-6, err_msg=name)
    name = "model.layers.0.self_attn.q_proj.weight"
    low, high = found.input_range(name)
    np.testing.assert_allclose((high - low) / 255, theirs[name].parts["input_scale"], rtol=1e-5)
    for part in (
        "k_proj",
        "v_proj",
    ):  # theirs are those of the last text alone, with rounded layers before: never much above ours
        scale = f"model.layers.0.self_attn.{part}.kv_cache_scale"
        ratio = found.values[scale] / theirs[scale].dequantize()
        assert ratio.min() > 0.97
        assert ratio.max() < 2


def float32(folder, out, change=lambda name, w: w, extra=()):
    """A copy of a checkpoint in float32, its tensors passed through `change`."""
    out.mkdir()
    tensors = {
        n: np.ascontiguousarray(change(n, w.dequantize()), "<f4") for n, w in open_checkpoint(folder).items()
    } | dict(extra)
    (out / "model.safetensors").write_bytes(
        safetensors_bytes({n: ("F32", list(a.shape), a.tobytes()) for n, a in tensors.items()})
    )
    for name in ("config.json", "tokenizer.json"):
        if (folder / name).exists():
            shutil.copy(folder / name, out / name)
    return out


@pytest.mark.parametrize("folder", [QWEN2, QWEN3, CHATGLM], ids=["qwen2", "qwen3", "chatglm"])
@pytest.mark.parametrize("method", ["m1", "m4", "shift"])
def test_the_model_is_unchanged(folder, method, tmp_path):
    vocab = open_checkpoint(folder)[EMBEDDING[folder]].shape[0]
    plain = float32(folder, tmp_path / "plain")
    _, found = prepared(plain, method, random_ids(tmp_path / "ids.json", vocab))
    smoothed = float32(
        folder, tmp_path / "smoothed", lambda n, w: found.values.get(n, found.weight(n, w)), found.values.items()
    )
    tokens = np.random.default_rng(2).integers(0, vocab, 20)
    before, after = (pq.load(path, activations="float").logits(tokens) for path in (plain, smoothed))
    np.testing.assert_allclose(after, before, atol=2e-4 * np.abs(before).max())
    changed = [n for n, w in open_checkpoint(plain).items() if found.changes(n) or n in found.values]
    assert len(changed) >= 8  # in each of two layers two norms and the matrices that read them


EMBEDDING = {
    QWEN2: "model.embed_tokens.weight",
    QWEN3: "model.embed_tokens.weight",
    CHATGLM: "transformer.embedding.word_embeddings.weight",
}


@pytest.mark.parametrize("folder", [QWEN2, QWEN3, CHATGLM], ids=["qwen2", "qwen3", "chatglm"])
def test_norm_and_linears_compute_the_same(folder, tmp_path):
    """With shifts and norms rounded to their half precision: (n w' + b') W'^T + bias' = n w W^T + bias."""
    source = open_checkpoint(folder)
    source, found = prepared(folder, "shift", random_ids(tmp_path / "ids.json", source[EMBEDDING[folder]].shape[0]))
    for link in links(source, "shift"):
        norm = source[link.feeder].dequantize()
        n = np.random.default_rng(3).standard_normal((7, len(norm)))
        new = n * found.values[link.feeder] + found.values[link.feeder.replace(".weight", ".bias")]
        for name in link.readers:
            w, had = source[name].dequantize(), source.weights.get(name.replace(".weight", ".bias"))
            before = (n * norm) @ w.T + (0 if had is None else had.dequantize())
            after = new @ found.weight(name, w).T + found.bias(name)
            np.testing.assert_allclose(after, before, atol=1e-5 * np.abs(before).max())
            np.testing.assert_array_equal(found.weight(name, w[3:5], slice(3, 5)), found.weight(name, w)[3:5])


def test_unknown_structure_is_refused():
    with pytest.raises(UnsupportedError, match="--smooth"):
        links(open_checkpoint(VECTORS / "models/tiny-bitnet/hf"), "m1")
    assert last_norm(open_checkpoint(CHATGLM)) == "transformer.encoder.final_layernorm.weight"


def test_a_dead_channel_is_unchanged():
    source = open_checkpoint(QWEN2)
    link = links(source, "m1")[0]
    ranges = InputRanges(96)
    ranges.add(np.zeros((2, 96), np.float32))
    smoothing = Smoothing(source, "m1")
    smoothing.add(link, {link.readers[0]: ranges})
    assert all(np.isfinite(x).all() for x in (*smoothing.norms.values(), *smoothing.columns.values()))
    with pytest.raises(InputError, match="no inputs seen"):
        smoothing.add(link, {link.readers[0]: InputRanges(96)})


@pytest.mark.parametrize("name", ["gemma2", "cohere2", "starcoder2", "gpt2", "falcon", "nemotron"])
def test_only_smoothable_layers_are_calibrated(name, tmp_path):
    """Norms with a bias or stored as their distance from one, permuted rows and Conv1D are left unchanged."""
    record = known()[name]
    source = open_checkpoint(tiny_model(record, tmp_path / "hf"))
    names = identity.names(source, record)
    found = []
    with contextlib.suppress(UnsupportedError):
        found = links(source, "m4")
    changed = {names[n] for n in names if record.change(n) is not None}
    assert not {link.feeder for link in found} & changed
    assert bool(found) == (name not in ("gpt2", "falcon"))
    if name == "cohere2":
        assert [len(link.readers) for link in found if link.norm] == [5, 5]  # both parts read one norm
