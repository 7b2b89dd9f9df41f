"""A folder that came back from GGUF is one that transformers loads strictly, and its logits are those of the model it was."""

from __future__ import annotations

import numpy as np
import pytest

import polyquant
from architectures.golden_models import NAMES, Golden
from polyquant.architectures.find import of_config

pytestmark = pytest.mark.slow
ON_THE_HUB = ("baichuan", "internlm2", "minicpm")
"""Their code is not in transformers."""
KNOWN = [n for n in NAMES if of_config(Golden(n).config) is not None and n not in ON_THE_HUB]
COMES_BACK_AS = {"mistral": "LlamaForCausalLM"}
"""GGUF has one name for both."""
COMPLAINTS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


@pytest.fixture
def torch():
    found = pytest.importorskip("torch")
    found.set_num_threads(1)
    return found


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("name", KNOWN)
def test_transformers_loads_what_came_back(name, tmp_path, torch, transformers):
    golden, gguf, back = Golden(name), tmp_path / "model.gguf", tmp_path / "back"
    polyquant.convert(golden.folder, gguf, to="gguf", codec="f32")
    polyquant.convert(gguf, back, to="hf", codec="f32")
    wanted = golden.logits()
    encoder = "hf_hidden" in wanted
    kind = transformers.AutoModel if encoder else transformers.AutoModelForCausalLM
    model, info = kind.from_pretrained(
        back, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    assert {k: sorted(map(str, info[k])) for k in COMPLAINTS if info.get(k)} == {}
    assert type(model).__name__ == COMES_BACK_AS.get(name, golden.config["architectures"][0])
    with torch.no_grad():
        out = model.eval()(torch.from_numpy(wanted["tokens"].astype(np.int64))[None])
    found = (out.last_hidden_state if encoder else out.logits)[0].numpy()
    expected = wanted["hf_hidden" if encoder else "hf_torch"]
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert error < 1e-4, error
