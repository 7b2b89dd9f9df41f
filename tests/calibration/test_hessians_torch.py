"""Calibration through transformers: the same Hessians as the decoder's, and support for unknown architectures."""

import json
import shutil

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.calibration.hessians import Hessians
from polyquant.calibration.stages import DecoderStages, calibration_stages
from polyquant.calibration.statistics import CacheRanges, InputRanges
from polyquant.errors import InputError, UnsupportedError
from polyquant.runtime.load import load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LLAMA = VECTORS / "models/tiny-llama-untied/hf"
TEXT = "In the beginning there was a book, and the book was read by a model of two layers.\n" * 6


def test_hessians_equal_those_of_our_decoder():
    from polyquant.calibration.hessians_torch import TorchStages

    theirs = TorchStages(LLAMA, TEXT, windows=3, tokens=32)
    model = load(LLAMA, activations="float")
    ours = DecoderStages(model, [w.numpy()[0] for w in theirs._windows])
    names = [n for stage in theirs.names for n in stage]
    assert names == [n for stage in ours.names[:-1] for n in stage]
    a, b = Hessians(theirs, names), Hessians(ours, names)
    for name in names:
        x, y = a.of(name)[0], b.of(name)[0]
        assert np.abs(x - y).max() < 0.02 * np.abs(y).max()  # bfloat16 against float32


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """An architecture that our decoder refuses, with layers of two kinds of masks."""
    path = tmp_path_factory.mktemp("gemma")
    shutil.copytree(LLAMA, path, dirs_exist_ok=True)
    (path / "model.safetensors").unlink()
    vocab = json.loads((path / "config.json").read_text())["vocab_size"]
    config = transformers.VaultGemmaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16, sliding_window=8, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.VaultGemmaForCausalLM(config).save_pretrained(path)
    return path


def test_hessians_of_an_architecture_that_we_do_not_run(gemma, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    with pytest.raises(UnsupportedError):
        load(gemma)
    report = pq.quantize(gemma, tmp_path / "out", codec="trellis.2.mul1.8", to="trellis-v3", calibration=text)
    assert not [s.note for s in report.steps if s.note]
    with pytest.raises(UnsupportedError, match="cannot generate its own text"):
        calibration_stages(gemma, "self")


def test_each_layer_gets_its_attention_mask(gemma):
    """Stage by stage the states are those of the whole model."""
    from polyquant.calibration.hessians_torch import TorchStages

    stages = TorchStages(gemma, TEXT, windows=1, tokens=32)
    for i in range(2):
        stages.run(i, frozenset(), lambda share: None)
    with torch.no_grad():
        whole = stages.model.model(stages._windows[0], use_cache=False, output_hidden_states=True)
        last = stages.model.model.norm(stages._calls[0].states)
    assert torch.allclose(last, whole.last_hidden_state, atol=1e-4)


def gathered(stages, before):
    """Ranges of all inputs and of the cache of every layer."""
    inputs, caches = {}, []
    wanted = frozenset(n for names in stages.names for n in names)
    for i in range(2):
        caches.append(CacheRanges(before=before))
        inputs |= stages.gather(i, wanted, lambda _: None, InputRanges, caches[-1])
    return inputs, caches


@pytest.mark.parametrize("before", [False, True])
def test_ranges_and_caches_equal_those_of_our_decoder(before):
    from polyquant.calibration.hessians_torch import TorchStages

    ids = np.random.default_rng(0).integers(3, 100, (3, 30)).tolist()
    theirs = TorchStages(LLAMA, ids, windows=8, tokens=24)
    ours = DecoderStages(load(LLAMA, activations="float"), [np.array(x[:24]) for x in ids])
    (a, kept), (b, expected) = gathered(theirs, before), gathered(ours, before)
    assert a.keys() == b.keys()
    for name, found in a.items():
        assert len(found.low) == len(b[name].low) == 3
        near = 0.03 * np.abs(b[name].extremes).max()  # bfloat16 against float32
        np.testing.assert_allclose(found.extremes, b[name].extremes, atol=near)
    for x, y in zip(kept, expected, strict=True):
        for end in ("keys", "values"):
            np.testing.assert_allclose(getattr(x, end), getattr(y, end), atol=0.03 * np.abs(getattr(y, end)).max())


def test_samples_of_an_architecture_that_we_do_not_run(gemma, tmp_path):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(np.random.default_rng(0).integers(3, 100, (4, 30)).tolist()))
    stages = calibration_stages(gemma, ids)
    inputs, caches = gathered(stages, before=False)
    assert len(inputs) == 14
    assert all(len(found.low) == 4 for found in inputs.values())
    assert [len(c.keys[0]) for c in caches] == [16, 16]
    ids.write_text(json.dumps([[100_000] * 70]))
    with pytest.raises(InputError, match="outside the vocabulary"):
        calibration_stages(gemma, ids)
