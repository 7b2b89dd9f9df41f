"""Every golden model in every quantizing format: it is written, opens, and gives nearly the same logits."""

from __future__ import annotations

import numpy as np
import pytest

import polyquant
from architectures.golden_models import NAMES, Golden
from polyquant.architectures.find import of_config
from polyquant.runtime.load import load

TARGETS = {
    "gguf": ({"recipe": "q4_k_m"}, 0.85),
    "trellis-v3": ({"bits": 4}, 0.85),
    "msmodelslim": ({"codec": "w8a16"}, 0.99),
}


@pytest.mark.slow
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_quantized_models_stay_close(name, to, tmp_path):
    golden, (options, least) = Golden(name), TARGETS[to]
    record, wanted = of_config(golden.config), golden.logits()
    target = tmp_path / ("model.gguf" if to == "gguf" else "model")
    polyquant.convert(golden.folder, target, to=to, requantize=True, **options)
    assert len(polyquant.open(target)) > 0
    if record.runs and "hf_torch" in wanted:
        found = load(target).logits(wanted["tokens"].tolist())
        assert np.corrcoef(found.ravel(), wanted["hf_torch"].ravel())[0, 1] > least
