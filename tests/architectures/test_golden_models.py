"""Every architecture against the original programs.

The converted GGUF equals llama.cpp's tensor by tensor and key by key; converting back gives the folder; the decoder
computes the logits of transformers from both, an encoder its hidden states and pooled vector.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import polyquant
from architectures.golden_models import NAMES, Golden, changed_tensors, differences
from polyquant.architectures.find import of_config
from polyquant.architectures.parts import ConvertedOnly
from polyquant.errors import PolyquantError
from polyquant.ops import native
from polyquant.runtime import identity
from polyquant.runtime.load import load

KNOWN = [n for n in NAMES if of_config(Golden(n).config) is not None]
NOT_RECORDED = {"olmo"}
"""No recorded step: numpy clips q, k and v. (Recurrent parts, also computed by numpy, are not recorded either.)"""
ENCODERS = [n for n in KNOWN if of_config(Golden(n).config).encoder]
RUN = [n for n in KNOWN if of_config(Golden(n).config).runs and n not in ENCODERS]


@pytest.mark.parametrize("name", KNOWN)
def test_gguf_equals_the_real_converter_and_round_trips(name, tmp_path):
    golden = Golden(name)
    gguf = golden.to_gguf(tmp_path / "model.gguf")
    assert differences(golden, gguf) == []
    polyquant.convert(gguf, tmp_path / "back", to="hf")
    assert changed_tensors(golden, tmp_path / "back") == []


@pytest.mark.parametrize("name", RUN)
def test_logits_equal_transformers(name, tmp_path):
    golden = Golden(name)
    wanted = golden.logits()
    gguf = golden.to_gguf(tmp_path / "model.gguf", exact=True)
    for path in (golden.folder, gguf):
        found = load(path, activations="float").logits(wanted["tokens"].tolist())
        error = np.sqrt(np.mean((found - wanted["hf_torch"]) ** 2) / np.mean(wanted["hf_torch"] ** 2))
        assert error < 1e-4, (path.name, error)


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_and_pooled_vectors_equal_transformers(name, tmp_path, engine):
    golden = Golden(name)
    wanted = golden.logits()
    gguf = golden.to_gguf(tmp_path / "model.gguf", exact=True)
    for path in (golden.folder, gguf):
        model = load(path, activations="float")
        pooled = model.embed([wanted["tokens"].tolist()], normalize=False)[0]
        assert pooled.dtype == np.float32
        for found, key in ((model.states(wanted["tokens"]), "hf_hidden"), (pooled, "hf_pooled")):
            assert found.shape == wanted[key].shape
            error = np.sqrt(np.mean((found - wanted[key]) ** 2) / np.mean(wanted[key] ** 2))
            assert error < 1e-4, (path.name, key, error)


@pytest.mark.parametrize("name", ENCODERS)
def test_rounded_encoders_stay_close(name, tmp_path):
    golden = Golden(name)
    wanted = golden.logits()
    polyquant.convert(golden.folder, tmp_path / "q8.gguf", to="gguf", codec="q8_0")
    model = load(tmp_path / "q8.gguf")
    assert np.corrcoef(model.states(wanted["tokens"]).ravel(), wanted["hf_hidden"].ravel())[0, 1] > 0.999
    vector = wanted["hf_pooled"] / np.linalg.norm(wanted["hf_pooled"])
    assert model.embed(wanted["tokens"].tolist())[0] @ vector > 0.999


def test_a_convert_only_architecture_is_an_error(monkeypatch):
    """No built-in record is convert-only, but that of an installed package may be."""
    golden = Golden("llama3")
    record = replace(of_config(golden.config), layer=ConvertedOnly())
    assert not record.runs
    monkeypatch.setattr(identity, "of_config", lambda config: record)
    with pytest.raises(PolyquantError, match="can be converted but not run"):
        load(golden.folder)


@pytest.mark.parametrize("name", RUN)
def test_token_by_token_from_a_recorded_step(name):
    """Each token after the first is one native call that repeats the work of Python."""
    golden = Golden(name)
    wanted = golden.logits()
    session = load(golden.folder, activations="float").session()
    found = np.array([session.feed([t]) for t in wanted["tokens"].tolist()])
    recorded = native.lib() is not None and name not in NOT_RECORDED and not session.cache.recurrent
    assert (session.cache.step is not None) == recorded
    error = np.sqrt(np.mean((found - wanted["hf_torch"]) ** 2) / np.mean(wanted["hf_torch"] ** 2))
    assert error < 1e-4, error


@pytest.mark.parametrize("name", RUN)
def test_rounded_weights_and_activations_stay_close(name, tmp_path):
    golden = Golden(name)
    wanted = golden.logits()
    polyquant.convert(golden.folder, tmp_path / "q8.gguf", to="gguf", codec="q8_0", requantize=True)
    least = 0.95 if of_config(golden.config).has_experts else 0.99  # rounding may change which experts are chosen
    for cache in ("f16", "int8"):
        found = load(tmp_path / "q8.gguf", cache=cache).logits(wanted["tokens"].tolist())
        assert np.isfinite(found).all()
        assert np.corrcoef(found.ravel(), wanted["hf_torch"].ravel())[0, 1] > least
