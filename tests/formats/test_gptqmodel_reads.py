"""GPTQ folders that we write give the same weights in gptqmodel's own layer, on a CPU.

Skipped where gptqmodel is not installed.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import polyquant
from golden import VECTORS
from hub_vectors import HUB
from polyquant.codecs.gptq import GPTQ

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is None, reason="gptqmodel is not installed"),
]
MODEL = VECTORS / "models" / "tiny-llama-untied" / "hf"
WRITTEN = [
    (MODEL, "gptq.4.g128.sym"), (MODEL, "gptq.4.g32"), (MODEL, "gptq.4.g32.v2"), (MODEL, "gptq.8.g64"),
    (MODEL, "gptq.2.g32"), (MODEL, "gptq.3.g32"), (MODEL, "gptq.4"),
    (HUB / "ct-int4-g128-asym", None), (HUB / "awq-gemm-g32-odd", None),
    (HUB / "ct-int4-g32-asym-gptq-actorder-group-odd", None),
]  # fmt: skip


@pytest.mark.parametrize(("source", "codec"), WRITTEN, ids=lambda x: x.name if isinstance(x, Path) else x)
def test_gptqmodel_dequantizes_to_our_weights(source, codec, tmp_path):
    torch = pytest.importorskip("torch")
    layers = importlib.import_module("gptqmodel.nn_modules.qlinear.torch")
    model = importlib.import_module("gptqmodel.utils.model")
    out = tmp_path / "out"
    if codec is None:
        polyquant.convert(source, out, to="gptq", allow_unknown=True)
    else:
        polyquant.quantize(source, out, to="gptq", codec=codec)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    found = [w for w in polyquant.open(out).values() if isinstance(w.codec, GPTQ)]
    assert found
    for weight in found[:7]:
        n, k = weight.shape
        bits, sym, group = weight.codec.bits, settings["sym"], weight.codec.group or -1
        layer = layers.TorchLinear(bits, group, sym, settings["desc_act"], k, n, False, register_buffers=True)
        parts = {key: torch.from_numpy(np.array(part)) for key, part in weight.read().items()}
        parts.setdefault("g_idx", torch.arange(k, dtype=torch.int32) // (weight.codec.group or k))
        assert not set(dict(layer.named_buffers())) - set(parts)
        layer.load_state_dict(parts)
        if settings["checkpoint_format"] == "gptq":
            model.convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
        layer.optimized = True  # do not compile
        layer.post_init()
        theirs = layer.dequantize_weight().T.to(torch.float32).numpy()
        np.testing.assert_array_equal(theirs, weight.dequantize().astype(np.float16).astype(np.float32))
