"""ModelOpt folders that we write give the same weights in ModelOpt's own tensor classes, on a CPU.

Skipped where nvidia-modelopt is not installed. It has no reader of its own exports, so the classes get the tensors.
"""

import importlib.util

import numpy as np
import pytest

import polyquant
from golden import VECTORS
from hub_vectors import HUB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="nvidia-modelopt is not installed"),
]
MODEL = VECTORS / "models" / "tiny-llama-untied" / "hf"
WRITTEN = [
    (MODEL, "hf_nvfp4", "nvfp4"), (MODEL, "hf_mxfp4", "mxfp4"), (MODEL, "hf_mxfp8", "mxfp8"),
    (MODEL, "fp8.e4m3.tensor.f32", "fp8"), (MODEL, "modelopt.int4.g32", "int4"),
    (HUB / "ct-nvfp4", None, "nvfp4"), (HUB / "mlx-mxfp8", None, "mxfp8"),
]  # fmt: skip


def floats_of(kind, parts, shape):
    """The values by ModelOpt; for int4, of which it has only the packing, None."""
    import torch
    from modelopt.torch.quantization import qtensor

    weight, scale = parts["weight"], parts["weight_scale"]
    if kind == "nvfp4":
        made = qtensor.NVFP4QTensor(shape, torch.float32, weight)
        return made.dequantize(scale=scale, double_scale=parts["weight_scale_2"], block_sizes={-1: 16})
    if kind == "mxfp4":
        return qtensor.MXFP4QTensor(shape, torch.float32, weight).dequantize(scale=scale, block_sizes={-1: 32})
    if kind == "mxfp8":
        return qtensor.MXFP8QTensor(shape, torch.float32, weight).dequantize(scale=scale)
    return qtensor.FP8QTensor(shape, torch.float32, weight).dequantize(scale=scale)


@pytest.mark.parametrize(("source", "codec", "kind"), WRITTEN)
def test_modelopt_dequantizes_to_our_weights(source, codec, kind, tmp_path):
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    out = tmp_path / "out"
    if codec is None:
        polyquant.convert(source, out, to="modelopt", allow_unknown=True)
    else:
        polyquant.quantize(source, out, to="modelopt", codec=codec)
    stored = {n: t for path in sorted(out.glob("*.safetensors")) for n, t in safetensors.load_file(path).items()}
    modules = [name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")]
    ours = polyquant.open(out)
    assert modules
    for module in modules[:7]:
        want = ours[f"{module}.weight"].dequantize()
        parts = {p: stored[f"{module}.{p}"] for p in ("weight", "weight_scale", "weight_scale_2")
                 if f"{module}.{p}" in stored}  # fmt: skip
        if kind == "int4":
            from modelopt.torch.export.quant_utils import pack_int4_in_uint8

            packed = pack_int4_in_uint8(torch.from_numpy(want), parts["weight_scale"], 32)
            assert torch.equal(packed, parts["weight"])
            continue
        theirs = floats_of(kind, parts, torch.Size(want.shape)).to(torch.float32).numpy()
        np.testing.assert_array_equal(theirs + np.float32(0), want + np.float32(0))
