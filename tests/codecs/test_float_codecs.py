"""Codecs of small floats: the contract, errors against the libraries' rules, and codes kept between codecs."""

import ml_dtypes
import numpy as np
import pytest

import polyquant
from polyquant.ops import small_floats as sf
from polyquant.testing.codecs import check_codec, check_registered

ERRORS = {
    "hf_mxfp4": 0.02, "hf_mxfp8": 0.002, "hf_nvfp4": 0.012, "hf_nvfp4.div": 0.012, "hf_nvfp4.plain": 0.02,
    "fp8.e4m3": 0.002, "fp8.e4m3.tensor.f32": 0.002, "fp8.e5m2.b128": 0.01, "fp8.e4m3.b128.inv.e8m0": 0.002,
}  # fmt: skip


def gaussians(rows, k, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)


@pytest.mark.parametrize("name", ERRORS)
def test_contract(name, engine):
    codec = polyquant.codec(name)
    check_codec(codec, gaussians(16, 256), error=ERRORS[name], weighted=True)
    check_registered(codec)


def library_error(name, w):
    """Squared error with the scale that the libraries take, per block."""
    if name.startswith("hf_mxfp"):
        element, group = ("e2m1", 32) if name == "hf_mxfp4" else ("e4m3", 32)
        top = np.abs(w).reshape(len(w), -1, group).max(2)
        rules = [np.floor(np.log2(top)) - (2 if element == "e2m1" else 8),
                 np.ceil(np.log2(top / np.float32(sf.ELEMENTS[element].largest)))]  # fmt: skip
        return [sf.errors(w, element, np.exp2(rule)[:, :, None].astype(np.float32), group).sum() for rule in rules]
    if name.startswith("hf_nvfp4"):
        tensor = np.float32(np.abs(w).max() / np.float32(2688)) if name != "hf_nvfp4.plain" else np.float32(1)
        top = np.abs(w).reshape(len(w), -1, 16).max(2)
        scale = (
            np.minimum(top / np.float32(6) / tensor, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * tensor
        )
        return [sf.errors(w, "e2m1", scale[:, :, None], 16).sum()]
    block = {"fp8.e4m3": (1, 256), "fp8.e4m3.tensor.f32": (64, 256), "fp8.e4m3.b32.inv.f32": (32, 32)}[name]
    cells = w.reshape(64 // block[0], block[0], 256 // block[1], block[1])
    scale = np.abs(cells).max((1, 3)) / np.float32(448)
    scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32) if name == "fp8.e4m3" else scale
    rows = np.ascontiguousarray(np.repeat(scale, block[0], 0)[:, :, None])
    return [sf.errors(w, "e4m3", rows, block[1]).sum()]


@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize(
    "name",
    ["hf_mxfp4", "hf_mxfp8", "hf_nvfp4", "hf_nvfp4.div", "hf_nvfp4.plain", "fp8.e4m3", "fp8.e4m3.tensor.f32",
     "fp8.e4m3.b32.inv.f32"],
)  # fmt: skip
def test_never_worse_than_the_scale_of_the_libraries(name, spread):
    rng = np.random.default_rng(1)
    w = (rng.standard_normal((64, 256)) * np.exp(spread * rng.standard_normal((64, 256)))).astype(np.float32)
    codec = polyquant.codec(name)
    back = codec.dequantize(codec.pack(codec.quantize(w)), w.shape)
    error = ((back.astype(np.float64) - w) ** 2).sum()
    assert error <= min(library_error(name, w)) * (1 + 1e-5)


@pytest.mark.parametrize("name", ["hf_nvfp4", "fp8.e4m3.tensor.f32", "fp8.e4m3.b32.inv.f32", "hf_mxfp8"])
def test_blocks_of_rows_quantize_as_the_whole(name):
    w, codec = gaussians(96, 64, seed=5), polyquant.codec(name)
    whole = codec.pack(codec.quantize(w))
    peak = float(np.abs(w).max())
    pieces = [codec.pack(codec.quantize(w[a : a + 32], peak=peak)) for a in (0, 32, 64)]
    for part, line in codec.lines.items():
        joined = pieces[0][part] if line == 0 else np.concatenate([p[part] for p in pieces])
        np.testing.assert_array_equal(joined.view(np.uint8), whole[part].view(np.uint8))
