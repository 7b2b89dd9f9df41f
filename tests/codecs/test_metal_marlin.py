import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from contract import same_floats
from golden import VECTORS
from polyquant import codec
from polyquant.errors import CodecError, UnknownNameError
from polyquant.ops.trellis import unpack_bits

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


@pytest.mark.parametrize(("bits", "parts", "shape", "expected"), golden())
def test_decodes_as_metal_marlin_does(bits, parts, shape, expected, engine):
    found = codec(f"metal_marlin.{bits}")
    same_floats(found.dequantize(parts, shape), expected.astype(np.float32))
    same_floats(found.dequantize(parts, shape, rows=slice(3, 9)), expected[3:9].astype(np.float32))
    out = np.empty(shape, np.float32)
    assert found.dequantize(parts, shape, out=out) is out


@pytest.mark.parametrize(("bits", "parts", "shape", "expected"), golden())
def test_becomes_trellis_without_a_change_of_value(bits, parts, shape, expected):
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
def test_names_say_everything(name):
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
    with pytest.raises(UnknownNameError, match="no codec is called"):
        codec(name)


@pytest.mark.parametrize("shape", [(17, 40), (32, 32), (5, 130)])
def test_quantize_takes_the_nearest_number(shape):
    found = codec("metal_marlin.4")
    w = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    parts = found.pack(found.quantize(w))
    near = found.dequantize(parts, shape)
    step = np.float32(1.24371088) * np.repeat(parts["scales"], -(-shape[1] // len(parts["scales"])), 0)[: shape[1]].T
    inside = np.abs(w) < 7 * step
    assert (np.abs(w - near)[inside] <= (step / 2)[inside] * 1.01).all()
    assert inside.mean() > 0.9


def test_rotated_flavour_rotates_inputs_only():
    found = codec("metal_marlin.8.h128")
    w = np.random.default_rng(2).standard_normal((16, 256)).astype(np.float32)
    parts = found.pack(found.quantize(w))
    assert np.square(found.dequantize(parts, w.shape) - w).mean() < 1e-2
    plain = codec("metal_marlin.8.g2")
    unrotated = plain.dequantize({**parts, "scales": np.repeat(parts["scales"], 2, 0)}, w.shape)
    assert np.square(unrotated - w).mean() > 0.5


def test_what_does_not_fit_is_refused():
    found = codec("metal_marlin.4")
    parts = found.pack(found.quantize(np.ones((16, 32), np.float32)))
    with pytest.raises(CodecError, match="takes matrices"):
        found.specs((4,))
    with pytest.raises(CodecError, match="'indices' do not fit"):
        found.dequantize({**parts, "indices": parts["indices"][:1, :1]}, (16, 32))
    with pytest.raises(CodecError, match="'scales' does not fit"):
        found.dequantize({**parts, "scales": parts["scales"].astype(np.float64)}, (16, 32))
    with pytest.raises(CodecError, match="a part is missing"):
        found.dequantize({k: v for k, v in parts.items() if k != "su"}, (16, 32))
    with pytest.raises(CodecError, match="do not divide"):
        codec("metal_marlin.4.h128").specs((16, 100))
    with pytest.raises(CodecError, match="codes that are not"):
        codec("metal_marlin.3").pack(found.unpack(parts, (16, 32)))


def test_packing_is_the_documented_one():
    """packing_vectors: every width, and what a padding packer appends."""
    vectors = load_file(TRELLIS / "packing_vectors.safetensors")
    names = [n.removesuffix("_indices") for n in vectors if n.endswith("_indices")]
    assert len(names) == 28
    for name in names:
        bits, codes = int(name[1]), vectors[f"{name}_indices"]
        for packed in (vectors[f"{name}_packed"], vectors[f"{name}_packed_vectorized"]):
            assert np.array_equal(unpack_bits(packed.reshape(-1), bits, codes.size), codes.reshape(-1))
