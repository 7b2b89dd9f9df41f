import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from golden import VECTORS
from polyquant import codec
from polyquant.codecs.trellis import tile_values
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops import trellis as ops
from polyquant.ops.hadamard import hadamard_reference
from polyquant.testing.codecs import same_floats

TRELLIS = VECTORS / "trellis"
FOLDERS = ("v2_cuda", "v2_exl3", "v2_odd")


def golden():
    """(folder, name, bits, parts, shape, expected) of every tensor that Metal Marlin wrote."""
    for folder in FOLDERS:
        listed = json.loads((TRELLIS / folder / "quantization_index.json").read_text())["layers"]
        tensors = {}
        for path in (TRELLIS / folder).glob("layer_*/*.safetensors"):
            tensors |= load_file(path)
        expected = np.load(TRELLIS / f"expected_{folder}_f16.npz")
        for entry in listed:
            flat = entry["name"].replace(".", "__")
            parts = {c: tensors[f"{flat}__{c}"] for c in ("indices", "scales", "su", "sv")}
            assert parts["indices"][0] == entry["bits"]
            parts["indices"] = parts["indices"][1:]
            yield pytest.param(
                entry["bits"], parts, tuple(entry["shape"]), expected[entry["name"]], id=f"{folder}-{entry['name']}"
            )


@pytest.mark.parametrize(("bits", "parts", "shape", "expected"), [*golden()])
def test_decodes_as_metal_marlin_does(bits, parts, shape, expected, engine):
    found = codec(f"metal_marlin.{bits}")
    same_floats(found.dequantize(parts, shape), expected.astype(np.float32))
    same_floats(found.dequantize(parts, shape, rows=slice(3, 9)), expected[3:9].astype(np.float32))
    out = np.empty(shape, np.float32)
    assert found.dequantize(parts, shape, out=out) is out


@pytest.mark.parametrize(("bits", "parts", "shape", "expected"), [*golden()])
def test_becomes_trellis_with_equal_values(bits, parts, shape, expected):
    found = codec(f"metal_marlin.{bits}")
    target = found.trellis(shape)
    assert codec(target.name).name == target.name
    moved = target.pack(found.unpack(parts, shape))
    same_floats(target.dequantize(moved, shape), expected.astype(np.float32))
    back = found.pack(target.unpack(moved, shape))
    assert all(np.array_equal(back[key].reshape(-1), parts[key].reshape(-1)) for key in parts)
    specs = found.specs(shape)
    assert {k: (v.shape, v.dtype) for k, v in back.items()} == {k: (s.shape, s.dtype) for k, s in specs.items()}


@pytest.mark.parametrize(
    "name", ["metal_marlin.2", "metal_marlin.8", "metal_marlin.4.h128", "metal_marlin.5.g7", "metal_marlin.3.h128.g1"]
)
def test_names_contain_every_option(name):
    assert codec(name).name == name == str(codec(name))


@pytest.mark.parametrize(
    "name",
    [
        "metal_marlin.1",
        "metal_marlin.9",
        "metal_marlin.4.h64",
        "metal_marlin.4.x",
        "metal_marlin.4.g0",
        "metal_marlin.",
        "metal_marlin.04",
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(UnknownNameError, match="no codec is named"):
        codec(name)


@pytest.mark.parametrize("shape", [(17, 40), (32, 32), (5, 130)])
def test_quantizes_like_the_grid_of_trellis(shape):
    found = codec("metal_marlin.4")
    w = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    parts, grid = found.pack(found.quantize(w)), codec("trellis.4.grid")
    same_floats(found.dequantize(parts, shape), grid.dequantize(grid.pack(grid.quantize(w)), shape))


@pytest.mark.parametrize("shape", [(16, 256), (128, 128)])
def test_rotated_flavour_rotates_inputs_only(shape):
    rng = np.random.default_rng(2)
    n, k = shape
    parts = {
        "indices": rng.integers(0, 256, (n // 16, k // 16, 96), np.uint8),
        "scales": rng.random((1, n), np.float32),
        "su": rng.choice(np.array([-1, 1], np.float32), k),
        "sv": rng.choice(np.array([-1, 1], np.float32), n),
    }
    ones = {"su": np.ones(k, np.float32), "sv": np.ones(n, np.float32)}
    codes = codec("metal_marlin.3.g1").unpack({**parts, **ones}, shape)
    plain = tile_values(codes, ops.codebook("grid", 3)).T * parts["scales"].T * parts["sv"][:, None]
    expected = hadamard_reference(np.ascontiguousarray(plain), 128) * parts["su"]
    found = codec("metal_marlin.3.h128.g1").dequantize(parts, shape)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_mismatched_parts_are_refused():
    found = codec("metal_marlin.4")
    parts = found.pack(found.quantize(np.ones((16, 32), np.float32)))
    with pytest.raises(CodecError, match="'indices' do not fit"):
        found.dequantize({**parts, "indices": parts["indices"][:1, :1]}, (16, 32))
    with pytest.raises(CodecError, match="'scales' does not fit"):
        found.dequantize({**parts, "scales": parts["scales"].astype(np.float64)}, (16, 32))
    with pytest.raises(CodecError, match="a part is missing"):
        found.dequantize({k: v for k, v in parts.items() if k != "su"}, (16, 32))
    with pytest.raises(CodecError, match="do not divide"):
        codec("metal_marlin.4.h128").specs((16, 100))
    with pytest.raises(CodecError, match="codes do not belong to"):
        codec("metal_marlin.3").pack(found.unpack(parts, (16, 32)))


def test_packing_follows_the_document():
    """packing_vectors: every width, and the padding that a packer appends."""
    vectors = load_file(TRELLIS / "packing_vectors.safetensors")
    names = [n.removesuffix("_indices") for n in vectors if n.endswith("_indices")]
    assert len(names) == 28
    for name in names:
        bits, codes = int(name[1]), vectors[f"{name}_indices"]
        for packed in (vectors[f"{name}_packed"], vectors[f"{name}_packed_vectorized"]):
            assert packed[0] == bits  # the header
            assert np.array_equal(ops.unpack_bits(packed[1:], bits, codes.size), codes.reshape(-1))
