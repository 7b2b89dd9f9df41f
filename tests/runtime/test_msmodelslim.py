"""msModelSlim folders with the integer arithmetic of the format: as close to the float model as the tool's preview."""

import json
import struct

import numpy as np
import pytest

import polyquant
from msmodelslim_vectors import FOLDERS, ROOT, forward, relative, runnable, source_of
from polyquant.errors import InputError
from polyquant.ops import native
from polyquant.ops.decoder import on_grid
from polyquant.runtime.kv_cache import KVCache
from polyquant.runtime.load import load
from polyquant.runtime.state import StateSpec

RUN = [f for f in FOLDERS if "logits" in forward(f)]
V1 = [f for f in FOLDERS if f.startswith("v1")]
C8 = [f for f in FOLDERS if "c8" in f]


def logits(path, ids, **options):
    model = load(path, **options)
    return model.decoder.logits(model.decoder.hidden(np.asarray(ids, np.int64), model.decoder.cache()))


@pytest.mark.parametrize("folder", RUN)
def test_the_error_matches_the_tools_preview(folder, tmp_path):
    seen = forward(folder)
    ids, tool = seen["input_ids"][0], seen["logits"][0]
    exact = logits(source_of(folder), ids, activations="float")
    ours = logits(runnable(folder, tmp_path), ids)
    if "mix" in folder:  # the tool's preview takes the fixed grid, which hardware takes for decoding only
        assert relative(ours, exact) < 0.07 < relative(tool, exact)
        return
    assert relative(ours, tool) < (0.045 if "a8" in folder else 0.009)
    assert relative(ours, exact) < 1.06 * relative(tool, exact) + 0.01


@pytest.mark.parametrize("folder", RUN[::4] + V1 + C8)
def test_both_engines_give_the_same_text(folder, tmp_path):
    if native.lib() is None:
        pytest.skip("native kernels are not built or switched off")
    path, ids = runnable(folder, tmp_path), np.arange(3, 60) % 130
    with native.engine("numpy"):
        expected = logits(path, ids)
    assert relative(logits(path, ids), expected) < 0.005


@pytest.mark.parametrize("folder", V1)
def test_v1_folders_run_directly(engine, folder):
    ids = np.arange(7, 40)
    exact = logits(source_of(folder), ids, activations="float")
    bounds = {"w8a16": 0.02, "w8a8_dynamic": 0.05, "w8a8_mix": 0.06, "w4a8_dynamic": 0.35}
    bound = bounds.get(folder.split("/")[2], 0.6)  # fixed grids, and tokens that calibration never saw
    assert relative(logits(ROOT / folder, ids), exact) < bound


def test_a_bias_is_counted_once(tmp_path):
    """quant_bias holds it; the float bias next to it is for float runs."""
    path, ids = runnable("v0/fp16/w8a8", tmp_path), np.arange(3, 30)
    model = load(path)
    assert any(b is not None and b.any() for b in model.decoder.layers[0].attention.qkv.bias)
    exact = logits(source_of("v0/fp16/w8a8"), ids, activations="float")
    assert relative(logits(path, ids, activations="float"), exact) < 0.02
    w = model.decoder.layers[0].attention.qkv.weights[1]
    x = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    whole, floats = (
        model.decoder.layers[0].attention.qkv(x)[1],
        load(path, activations="float").decoder.layers[0].attention.qkv(x)[1],
    )
    assert w.codec.static
    assert relative(whole, floats) < 0.1
    assert relative(whole + model.decoder.layers[0].attention.qkv.bias[1], floats) > 2 * relative(whole, floats)


def test_quantized_layers_use_the_norm_in_module(tmp_path):
    """As in the specification: `.weight` of the float model for float layers, `.module.weight` for the others."""
    path, ids = runnable("v0/fp16/w8a8_m1", tmp_path), np.arange(3, 30)
    expected = logits(path, ids)
    checkpoint, source = polyquant.open(path), polyquant.open(source_of("v0/fp16/w8a8_m1"))
    file = next(path.glob("quant_model_weight*.safetensors"))
    data = bytearray(file.read_bytes())
    for name in [n for n in checkpoint if n.endswith("layernorm.weight")]:
        smoothed, plain = checkpoint[name].read()["blocks"].tobytes(), source[name].read()["blocks"].tobytes()
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        at = 8 + struct.unpack("<Q", data[:8])[0] + header[name]["data_offsets"][0]
        assert data[at : at + len(smoothed)] == smoothed != plain
        data[at : at + len(plain)] = plain
    file.write_bytes(data)
    np.testing.assert_array_equal(logits(path, ids), expected)


# ---------------------------------------------------------------- C8


@pytest.mark.parametrize("folder", [f for f in C8 if f.startswith("v0")])
def test_the_cache_rounds_like_the_tool(engine, folder):
    checkpoint, seen = polyquant.open(ROOT / folder), forward(folder)
    names = [n.removesuffix(".kv_in") for n in seen if n.endswith(".kv_in")]
    assert names
    for name in names:
        scale, offset = (checkpoint[f"{name}.kv_cache_{p}"].dequantize() for p in ("scale", "offset"))
        x = seen[f"{name}.kv_in"].reshape(-1, scale.size)
        got = on_grid(x, scale, offset)
        codes = np.rint(got / scale + offset)
        away = np.abs(codes - seen[f"{name}.kv_int"].reshape(codes.shape))
        assert away.max() <= 1  # the tool divides in half precision (like quantizers/exact_tool.py)
        assert (away > 0).mean() < (0.03 if "fp16" in folder else 0.15)
        levels = (seen[f"{name}.kv_int"].reshape(codes.shape) - offset) * scale
        atol = (0.06 if "fp16" in folder else 0.4) * scale.max()  # half a unit in the last place of the tool's dtype
        np.testing.assert_allclose(levels, seen[f"{name}.kv_deq"].reshape(codes.shape), atol=atol)


@pytest.mark.parametrize("folder", C8)
def test_c8_is_used_if_the_folder_has_it(folder, tmp_path):
    path, ids = runnable(folder, tmp_path), np.arange(3, 80)
    model = load(path)
    turned = folder.startswith("v1")
    assert (model.decoder.cache_type == "c8") == turned
    assert (model.decoder.layers[0].attention.c8 is None) == turned
    with_it, without = logits(path, ids), logits(path, ids, cache="f32")
    assert 1e-4 < relative(with_it, without) < 0.2
    assert load(path, activations="float").decoder.cache_type == "f32"


def test_c8_needs_its_scales(tmp_path):
    with pytest.raises(InputError, match="no scales for a C8 cache"):
        load(runnable("v0/fp16/w8a16", tmp_path), cache="c8")


def test_cache_scales_are_positive(tmp_path):
    path = runnable("v0/fp16/w8a16_c8_asym", tmp_path)
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    where = json.loads(data[8 : 8 + size])["model.layers.1.self_attn.v_proj.kv_cache_scale"]["data_offsets"][0]
    data[8 + size + where : 8 + size + where + 2] = b"\0\0"
    file.write_bytes(data)
    with pytest.raises(InputError, match="positive and finite"):
        load(path)


def grid(groups, size, seed=0):
    rng = np.random.default_rng(seed)
    out = np.empty((groups, 4, size), np.float32)
    out[:, ::2] = rng.uniform(0.01, 0.03, (groups, 2, size))
    out[:, 1::2] = rng.integers(-40, 40, (groups, 2, size))
    return out


@pytest.mark.parametrize("steps", [[100], [1] * 100, [31, 1, 1, 67]], ids=len)
def test_a_cache_on_a_grid_is_attention_over_rounded_keys(engine, steps):
    groups, heads, size = 2, 4, 16
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((100, n, size)).astype(np.float32) for n in (heads, groups, groups))
    levels = grid(groups, size)
    rounded = [
        on_grid(k, levels[:, 0].copy(), levels[:, 1].copy()),
        on_grid(v, levels[:, 2].copy(), levels[:, 3].copy()),
    ]
    plain = KVCache([StateSpec((groups, size))], "f32")
    expected = plain.attend(0, q, *rounded, scale=0.25)
    cache, out, at = KVCache([StateSpec((groups, size))], "c8", [levels]), [], 0
    for n in steps:
        out.append(cache.attend(0, *(x[at : at + n].copy() for x in (q, k, v)), scale=0.25))
        at += n
        cache.length = at
    np.testing.assert_allclose(np.concatenate(out), expected, atol=2e-5)
    assert cache.nbytes < 0.6 * plain.nbytes
