"""The tool's integers from the float models of the vectors; the default codes never have a larger error."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from golden import VECTORS
from polyquant.codecs.dtypes import NUMPY
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import CodecError
from polyquant.opening import open_checkpoint
from polyquant.ops.metrics import error_sums
from polyquant.quantizers.affine import quantize_linear
from polyquant.quantizers.exact_tool import exact_codes

ROOT = VECTORS / "msmodelslim"
SOURCES = {"fp16": ("qwen2_fp16", "F16"), "bf16": ("qwen2_bf16", "BF16"), "v1": ("qwen3_bf16", "BF16")}
EXACT = [
    "v0/fp16/w8a16", "v0/bf16/w8a16", "v0/fp16/w8a16_asym", "v0/bf16/w8a16_asym", "v0/fp16/w8a16_g32",
    "v0/fp16/w8a16_g32_asym",
    "v0/fp16/w4a16_g32", "v0/fp16/w8a8_dynamic", "v0/bf16/w8a8_dynamic", "v0/fp16/w8a8", "v0/bf16/w8a8",
    "v0/fp16/w8a8_c8_sharded",
    "v0/bf16/w8a8_c8_asym", "v0/fp16/w8a8_per_tensor", "v0/fp16/w8a8s", "v0/fp16/w8a8s_lowbit_sigma", "v0/bf16/w8a8s",
    "v0/fp16/ascendv1_w4a16_packed",
    "v0/fp16/ascendv1_w4a16_g32_packed", "v0/fp16/ascendv1_w8a8_mix", "v1/bf16/w8a16", "v1/bf16/w8a8_static",
    "v1/bf16/w8a8_dynamic",
    "v1/bf16/w8a8_mix", "v1/bf16/w4a8_dynamic",
]  # fmt: skip
"""Vectors whose weights are those of a float model, unsmoothed."""
TIES = {"v0/bf16/w8a8s": 1}
"""Codes that are off by one: outliers of W8A8S near a tie."""
STATIC_PARTS = ("input_scale", "input_offset", "deq_scale", "quant_bias")


def layers(run):
    """(quantized weight of the tool, float weight, float bias or None, the tool's input range or None, model dtype)."""
    source, word = SOURCES["v1" if run.startswith("v1") else run.split("/")[1]]
    floats, folder = open_checkpoint(ROOT / "models" / source), ROOT / run
    stats = folder / "calib_stats.json"
    ranges = json.loads(stats.read_text()) if stats.exists() else {}
    for name, weight in open_checkpoint(folder).items():
        if isinstance(weight.codec, MsModelSlim):
            if run.endswith("asym") and "weight_offset" in weight.parts and weight.parts["weight_offset"].any():
                weight = replace(weight, codec=weight.codec.configure(asymmetric=True))  # files do not record it
            module = name.removesuffix(".weight")
            seen = ranges.get(module)
            bias = floats.weights.get(f"{module}.bias")
            yield (
                weight,
                floats[name].dequantize(),
                None if bias is None else bias.dequantize(),
                None if seen is None else (seen["observed_min"], seen["observed_max"]),
                NUMPY[word],
            )


def outliers(run):
    """The outlier rule of the run for W8A8S."""
    return "sigma" if run.endswith("sigma") else "fraction"


@pytest.mark.parametrize("run", EXACT)
def test_integers_and_scales_equal_the_tools(run):
    off = checked = 0
    for weight, w, bias, seen, dtype in layers(run):
        unknown = weight.codec.static and seen is None  # v1 tells no ranges: the weights only
        found = quantize_linear(
            weight.codec, w, input_range=(-1, 1) if unknown else seen, bias=bias, exact=dtype, outliers=outliers(run)
        )
        parts = weight.codec.pack(found)
        differ = parts["weight"] != weight.parts["weight"]
        off += np.count_nonzero(differ)
        checked += differ.size
        assert np.abs(parts["weight"].astype(int) - weight.parts["weight"])[differ].max(initial=0) <= 1
        for part in parts.keys() - {"weight"} - (set(STATIC_PARTS) if unknown or differ.any() else set()):
            np.testing.assert_array_equal(parts[part], weight.parts[part], err_msg=f"{weight.name} {part}")
    assert checked > 70_000
    assert off == TIES.get(run, 0)


@pytest.mark.parametrize("run", [*EXACT, "v0/fp16/ascendv1_w4a8_dynamic_g32"])
def test_our_mean_error_is_at_most_the_tools(run):
    ours = theirs = 0.0
    for weight, w, bias, seen, _ in layers(run):
        seen = seen or (weight.codec.static and (-1.0, 1.0)) or None
        parts = weight.codec.pack(quantize_linear(weight.codec, w, input_range=seen, bias=bias, outliers=outliers(run)))
        ours += error_sums(w, weight.codec.dequantize(parts, w.shape)).dd
        theirs += error_sums(w, weight.dequantize()).dd
    assert 0 < ours <= theirs


@pytest.mark.parametrize("run", ["v0/fp16/w8a8_c8_sharded", "v0/fp16/w8a16_c8_asym", "v0/bf16/w8a8_c8_asym"])
def test_cache_codes_equal_the_tools(run):
    tensors = open_checkpoint(ROOT / run)
    forward = stored(ROOT / run / "tool_forward.safetensors")
    modules = [key.removesuffix(".kv_in") for key in forward if key.endswith(".kv_in")]
    assert modules
    for module in modules:
        x, expected = forward[f"{module}.kv_in"], forward[f"{module}.kv_int"]
        scale, offset = (
            tensors[f"{module}.kv_cache_{part}"].dequantize().astype(x.dtype) for part in ("scale", "offset")
        )
        np.testing.assert_array_equal(exact_codes(x, scale, offset, 8, narrow=False), expected)


def stored(path):
    """All arrays of a safetensors file."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    spans = {name: (NUMPY[t["dtype"]], 8 + size + t["data_offsets"][0], t["shape"]) for name, t in header.items()}
    return {
        n: np.frombuffer(raw, dtype, math.prod(shape), at).reshape(shape) for n, (dtype, at, shape) in spans.items()
    }


def test_nan_and_missing_ranges_are_refused():
    w = np.ones((4, 32), np.float32)
    with pytest.raises(CodecError, match="input range of the layer"):
        quantize_linear(MsModelSlim("w8a8"), w, exact=np.dtype(np.float16))
    w[1, 2] = np.nan
    with pytest.raises(CodecError, match="NaN or infinity"):
        quantize_linear(MsModelSlim("w8a16"), w, exact=np.dtype(np.float16))
