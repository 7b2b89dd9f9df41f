"""Written folders load in their own programs: transformers with compressed-tensors, and AutoAWQ's unpacking functions.

Skipped where they are not installed.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import polyquant
from folders import read_safetensors
from hub_vectors import HUB
from polyquant.codecs.compressed_tensors import CompressedTensors

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "to", "codec"),
    [
        ("gptq-v1-b4-g32-asym", "compressed-tensors", None),
        ("gptq-v1-b8-g32", "compressed-tensors", None),
        ("awq-gemm-g32-odd", "compressed-tensors", None),
        ("ct-int4-g32-asym-odd", "compressed-tensors", None),
        ("ct-int4-channel-asym-ragged", "compressed-tensors", None),
        ("ct-w8a8-int-static-asym", "compressed-tensors", None),
        ("ct-w4a8-int", "compressed-tensors", None),
        ("ct-int4-g128-asym", "compressed-tensors", "compressed.p4.g32"),
        ("ct-int4-g128-asym", "compressed-tensors", "compressed.p8.g128.zpp"),
        ("ct-int4-g128-asym", "compressed-tensors", "compressed.i8.dynamic"),
    ],
)
def test_transformers_with_compressed_tensors(case, to, codec, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    source, floats = HUB / case, tmp_path / "floats"
    if codec is not None:
        polyquant.convert(source, floats, to="hf")
        polyquant.quantize(floats, tmp_path / "out", to=to, codec=codec)
    else:
        polyquant.convert(source, tmp_path / "out", to=to)
    polyquant.convert(tmp_path / "out", tmp_path / "decoded", to="hf")
    ours = polyquant.open(tmp_path / "out")
    codecs = [w.codec for w in ours.values() if isinstance(w.codec, CompressedTensors)]
    if any(c.zeros == "zpp" for c in codecs) and not loads(transformers, HUB / "ct-int4-g32-asym-odd"):
        pytest.skip("this transformers does not load packed zero points, llm-compressor's own included")
    dtype = torch.float16 if codecs[0].dtype == "f16" else torch.bfloat16  # scales are rounded to the model's dtype
    quantized, plain = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype).eval()
        for name in ("out", "decoded")
    )
    loaded = {name: module for name, module in quantized.named_modules() if hasattr(module, "quantization_scheme")}
    tokens = torch.arange(24)[None] * 7 % 300
    with torch.no_grad():
        got, wanted = (np.asarray(m(tokens).logits.float()) for m in (quantized, plain))  # decompresses the weights
    assert len(loaded) == len(codecs)
    for name, module in loaded.items():
        mine = torch.from_numpy(ours[f"{name}.weight"].dequantize()).to(dtype)
        assert torch.equal(mine, module.weight), name
    rounds_inputs = any(c.dynamic or c.static for c in codecs)
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < (0.1 if rounds_inputs else 0.02)


def loads(transformers, folder):
    """True if transformers loads a folder."""
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("case", ["gptq-v1-b4-g32-asym", "ct-int4-g32-asym-odd", "awq-gemm-g32-odd"])
def test_autoawq_unpacks_our_weights(case, tmp_path):
    torch = pytest.importorskip("torch")
    found = importlib.util.find_spec("awq")
    if found is None or found.origin is None:
        pytest.skip("AutoAWQ is not installed")
    place = Path(found.origin).parent / "utils" / "packing_utils.py"  # the package itself imports CUDA kernels
    spec = importlib.util.spec_from_file_location("packing_utils", place)
    assert spec is not None and spec.loader is not None
    packing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packing)
    polyquant.convert(HUB / case, tmp_path / "out", to="awq")
    group = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["group_size"]
    ours, stored = polyquant.open(tmp_path / "out"), read_safetensors(tmp_path / "out")
    kinds = {"I32": torch.int32, "F16": torch.float16}
    names = [n.removesuffix(".qweight") for n in stored if n.endswith(".qweight")]
    for name in names:
        tensors = []
        for part in ("qweight", "qzeros", "scales"):
            dtype, shape, data = stored[f"{name}.{part}"]
            tensors.append(torch.frombuffer(bytearray(data), dtype=kinds[dtype]).reshape(shape))
        theirs = packing.dequantize_gemm(*tensors, 4, group).T
        mine = torch.from_numpy(ours[f"{name}.weight"].dequantize()).to(torch.float16)
        assert torch.equal(theirs, mine), name
    assert names
