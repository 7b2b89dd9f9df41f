"""Static W8A8: the grid of the inputs is kept between msModelSlim and compressed-tensors."""

import json
import shutil

import numpy as np
import pytest

import hub_vectors
import polyquant
from golden import VECTORS
from polyquant.errors import CodecError, UnsupportedError
from polyquant.runtime.load import load
from polyquant.types import Activation, Affine

MSMODELSLIM = VECTORS / "msmodelslim"
GENUINE = [("v1/bf16/w8a8_static", "qwen3_bf16"), ("v0/bf16/w8a8", "qwen2_bf16"), ("v0/fp16/w8a8s", "qwen2_fp16")]
IDS = [5, 17, 3, 99, 42, 8, 77, 120]


def model_folder(path, mode, model):
    shutil.copytree(MSMODELSLIM / mode, path, copy_function=shutil.copyfile)
    shutil.copyfile(MSMODELSLIM / "models" / model / "config.json", path / "config.json")
    return path


def grids(path):
    """Layer -> scale and zero point of its inputs, and the codes, of either format."""
    out = {}
    for name, weight in polyquant.open(path).items():
        parts = {key: np.asarray(part) for key, part in weight.read().items()}
        if "input_scale" in parts:
            zero = parts.get("input_offset", parts.get("input_zero_point", np.zeros(1)))
            out[name] = (np.float32(parts["input_scale"][0]), int(zero[0]), parts["weight"].tobytes())
    return out


@pytest.mark.parametrize(("mode", "model"), GENUINE)
def test_folders_of_the_tool(tmp_path, mode, model):
    source = model_folder(tmp_path / "source", mode, model)
    report = polyquant.convert(source, tmp_path / "ct", to="compressed-tensors", allow_unknown=True)
    assert grids(tmp_path / "ct") == grids(source) and grids(source)
    assert all(s.error is None or s.error.rrmse < 1e-6 for s in report.steps)
    group = json.loads((tmp_path / "ct/config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert (group["format"], group["weights"]["strategy"]) == ("int-quantized", "channel")
    inputs = group["input_activations"]
    assert (inputs["dynamic"], inputs["symmetric"], inputs["strategy"]) == (False, False, "tensor")
    polyquant.convert(tmp_path / "ct", tmp_path / "back", to="msmodelslim", allow_unknown=True)
    before, after = polyquant.open(source), polyquant.open(tmp_path / "back")
    for name, grid in grids(source).items():
        biased = f"{name.removesuffix('weight')}bias" in before  # quant_bias holds it, so the grid is not written
        assert after[name].codec.name.startswith("w8a16" if biased else "w8a8")
        assert biased or grids(tmp_path / "back")[name] == grid


def test_folder_of_llm_compressor(tmp_path):
    """Complete round trip; msModelSlim's products are on the grid, so they are closer to the library's logits."""
    source = hub_vectors.folder("ct-w8a8-int-static-asym")
    polyquant.convert(source, tmp_path / "ms", to="msmodelslim", allow_unknown=True)
    assert grids(tmp_path / "ms") == grids(source)
    assert not [f for f in polyquant.validate(tmp_path / "ms") if f.severity.name == "ERROR"]
    polyquant.convert(tmp_path / "ms", tmp_path / "ct", to="compressed-tensors", allow_unknown=True)
    have, want = polyquant.open(tmp_path / "ct"), polyquant.open(source)
    for name in grids(source):
        for part, array in want[name].read().items():
            np.testing.assert_array_equal(
                np.asarray(have[name].read()[part], np.float32), np.asarray(array, np.float32)
            )


def test_products_use_the_grid(tmp_path):
    source = model_folder(tmp_path / "source", *GENUINE[0])
    polyquant.convert(source, tmp_path / "ct", to="compressed-tensors", allow_unknown=True)
    polyquant.convert(tmp_path / "ct", tmp_path / "back", to="msmodelslim", allow_unknown=True)
    want, got = load(source).logits(IDS), load(tmp_path / "back").logits(IDS)
    assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("codec", "offset", "error"),
    [
        ("compressed.i8.f32.static", 3, CodecError), ("compressed.i8.f32.szp", 0.5, CodecError),
        ("compressed.i8.f32.szp", 200, CodecError), ("compressed.i8.f32.szp", None, UnsupportedError),
        ("compressed.i8.f32.szp", -128, None), ("compressed.i8.f32.static", 0, None),
    ],
)  # fmt: skip
def test_zero_points_that_fit(codec, offset, error):
    one = np.ones((2, 1), np.float32)
    grid = None
    if offset is not None:
        grid = Activation(one[0], np.float32([offset]), one[:, 0], np.zeros(2, np.int32))
    codes = Affine(8, np.ones((2, 4), np.int8), one, one * 0, grid)
    if error is not None:
        with pytest.raises(error):
            polyquant.codec(codec).pack(codes)
        return
    parts = polyquant.codec(codec).pack(codes)
    again = polyquant.codec(codec).input_grid(parts, codes)
    assert again is not None and again.offset == offset and again.scale == 1
    np.testing.assert_array_equal(again.quant_bias, [-4 * offset, -4 * offset])
