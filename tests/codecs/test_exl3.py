import numpy as np
import pytest
from safetensors.numpy import load_file

from golden import VECTORS
from polyquant import codec
from polyquant.codecs.trellis import tile_values
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import native
from polyquant.ops import trellis as ops
from polyquant.testing.codecs import same_floats

TRELLIS = VECTORS / "trellis"
TENSORS = load_file(TRELLIS / "exl3_tensors.safetensors")
EXPECTED = np.load(TRELLIS / "exl3_expected.npz")
MODULES = sorted({n.split(".")[0] for n in TENSORS})


def golden(module):
    """codec, parts, shape [N, K]."""
    codebook, bits = module.split("_k")
    parts = {n.split(".", 1)[1]: v for n, v in TENSORS.items() if n.startswith(f"{module}.")}
    return codec(f"exl3.{bits}.{codebook}"), parts, (len(parts["svh"]), len(parts["suh"]))


@pytest.mark.parametrize("module", MODULES)
def test_inner_weights_are_bit_exact(module, engine):
    found, parts, shape = golden(module)
    codes = found.unpack(parts, shape)
    inner = tile_values(codes, ops.codebook(found.codebook, 16))  # [K, N]
    same_floats(inner, EXPECTED[f"{module}.inner_f16"].astype(np.float32))


@pytest.mark.parametrize("module", [m for m in MODULES if f"{m}.weight_f32" in EXPECTED.files])
def test_weights_equal_exllama(module, engine):
    found, parts, shape = golden(module)
    expected = EXPECTED[f"{module}.weight_f32"].T
    np.testing.assert_allclose(found.dequantize(parts, shape), expected, atol=4e-7 * np.abs(expected).max())


@pytest.mark.parametrize("module", MODULES)
def test_becomes_trellis_and_round_trips(module):
    found, parts, shape = golden(module)
    target = found.trellis(shape)
    assert codec(target.name).name == target.name
    moved = target.pack(found.unpack(parts, shape))
    same_floats(target.dequantize(moved, shape), found.dequantize(parts, shape))
    back = found.pack(target.unpack(moved, shape))
    assert set(back) == set(parts)
    for key, array in parts.items():
        assert back[key].dtype == array.dtype
        assert np.array_equal(back[key], array)
    specs = found.specs(shape)
    assert {k: (v.shape, v.dtype) for k, v in back.items()} == {k: (s.shape, s.dtype) for k, s in specs.items()}


def test_scales_are_folded_into_svh():
    found, parts, shape = golden("mul1_k3")
    target = found.trellis(shape)
    moved = target.pack(found.unpack(parts, shape))
    doubled = found.pack(target.unpack({**moved, "scales": moved["scales"] * 2}, shape))
    assert np.array_equal(doubled["svh"], parts["svh"] * np.float16(2))
    with pytest.raises(CodecError, match="svh does not fit half precision"):
        found.pack(target.unpack({**moved, "scales": moved["scales"] * 1e9}, shape))
    uneven = moved["scales"] * np.linspace(1, 2, shape[0], dtype=np.float32)
    with pytest.raises(CodecError, match="no per-output scale inside its rotation"):
        found.pack(target.unpack({**moved, "scales": uneven}, shape))


@pytest.mark.skipif(native.lib() is None, reason="65,536 states a step are too many for the reference")
@pytest.mark.parametrize(("bits", "most"), [(2, 0.08), (3, 0.021)])
def test_quantizes_outputs_of_all_sizes(bits, most):
    rng = np.random.default_rng(3)
    size = np.exp(rng.standard_normal(128))[:, None]
    w = (rng.standard_normal((128, 256)) * size).astype(np.float32)
    w[5] = 0
    found = codec(f"exl3.{bits}.mul1")
    parts = found.pack(found.quantize(w))
    error = (found.dequantize(parts, w.shape) - w) / size
    assert np.square(error).mean() < most
    assert np.abs(error[5]).max() < 1  # no division by zero scales


@pytest.mark.parametrize("name", ["exl3.0.mul1", "exl3.9.mul1", "exl3.3", "exl3.3.grid", "exl3.3.mul1.x"])
def test_other_names_are_refused(name):
    with pytest.raises(UnknownNameError, match="no codec is named"):
        codec(name)


def test_mismatched_parts_are_refused():
    found, parts, shape = golden("mul1_k2")
    with pytest.raises(CodecError, match="multiples of 128"):
        found.specs((128, 64))
    with pytest.raises(CodecError, match="wrong multiplier"):
        found.dequantize({**parts, "mul1": np.array([5], np.int32)}, shape)
    with pytest.raises(CodecError, match="'trellis' does not fit"):
        found.dequantize({**parts, "trellis": parts["trellis"][:1]}, shape)
    with pytest.raises(CodecError, match="a part is missing"):
        found.dequantize({k: v for k, v in parts.items() if k != "mul1"}, shape)
    other = codec("trellis.2.grid")
    codes = other.unpack(other.pack(other.quantize(np.ones((128, 128), np.float32))), (128, 128))
    with pytest.raises(CodecError, match="codes do not belong to"):
        found.pack(codes)
