"""Statistics of a float model on calibration text, compared with the tool's on the same tokens."""

import json
from dataclasses import replace

import numpy as np
import pytest

from golden import VECTORS
from polyquant.analysis.demo import demo_model
from polyquant.calibration.stages import calibration_stages
from polyquant.codecs.msmodelslim import MsModelSlim, msmodelslim_named
from polyquant.errors import InputError, UnsupportedError
from polyquant.formats.msmodelslim.options import MsModelSlimOptions
from polyquant.formats.msmodelslim.prepare import derived, prepare
from polyquant.formats.msmodelslim.sensitivity import propose_keep
from polyquant.formats.trellis.target import is_linear
from polyquant.opening import open_checkpoint
from polyquant.quantizers.affine import quantize_linear

ROOT = VECTORS / "msmodelslim"
QWEN2, CHATGLM = ROOT / "models/qwen2_fp16", ROOT / "chatglm2/float"
IDS = str(QWEN2 / "calib_ids.json")


def targets(source, name="w8a8"):
    return {n: msmodelslim_named(name) for n, w in source.items() if is_linear(n, w.shape)}


def run(**options):
    source = open_checkpoint(QWEN2)
    told = []
    asked = MsModelSlimOptions(calibration=IDS, **options)
    found = prepare(source, asked, targets(source).items(), told.append)
    assert told == sorted(told)
    assert found.values.keys() >= derived(source, asked, targets(source)).keys()
    return source, found, told


def test_ranges_equal_the_tools():
    """Only the first layer's q, k, v: the tool quantizes earlier layers first, and attention amplifies that."""
    seen = json.loads((ROOT / "v0/fp16/w8a8/calib_stats.json").read_text())
    source, mean, told = run(dialect="v0")
    _, most, _ = run()
    assert told[-1] == 1
    for part in "qkv":
        name = f"model.layers.0.self_attn.{part}_proj"
        stats = seen[name]
        expected = (stats["observed_min"], stats["observed_max"])
        np.testing.assert_allclose(mean.input_range(f"{name}.weight"), expected, rtol=5e-4)
        samples = np.array(stats["per_sample_min_max"])
        np.testing.assert_allclose(
            most.input_range(f"{name}.weight"), (samples[:, 0].min(), samples[:, 1].max()), rtol=5e-4
        )
    for name, stats in seen.items():
        if f"{name}.weight" in source and is_linear(f"{name}.weight", (1, 1)):
            low, high = mean.input_range(f"{name}.weight")
            span = stats["observed_max"] - stats["observed_min"]
            assert abs(low - stats["observed_min"]) + abs(high - stats["observed_max"]) < 0.25 * span


@pytest.mark.parametrize(("vector", "kv"), [("w8a8_c8_sharded", "c8"), ("w8a16_c8_asym", "c8.asym")])
def test_grid_of_the_cache_equals_the_tools(vector, kv):
    _, found, _ = run(dialect="v0", kv=kv, dtype="f16")
    theirs = open_checkpoint(ROOT / "v0/fp16" / vector)
    names = [n for n in theirs if "kv_cache" in n]
    assert len(names) == 8
    for name in names:
        expected = theirs[name].dequantize()
        if name.endswith("scale"):
            np.testing.assert_allclose(found.values[name], expected, rtol=1.5e-3)  # float16 arithmetic on their side
        else:
            assert np.abs(found.values[name] - expected).max() <= 1


def test_names_and_types_of_extra_tensors():
    source, glm = open_checkpoint(QWEN2), open_checkpoint(CHATGLM)
    quantized = set(targets(source)) - {"model.layers.1.mlp.up_proj.weight"}

    def listed(checkpoint, **options):
        return {
            n: (s.codec.name, s.shape) for n, s in derived(checkpoint, MsModelSlimOptions(**options), quantized).items()
        }

    assert not listed(source)
    assert not listed(source, smooth="m4", dtype="f16")
    kv = listed(source, kv="c8", dialect="v0", dtype="f16")
    assert kv["model.layers.1.self_attn.v_proj.kv_cache_offset"] == ("f16", (48,))
    assert len(kv) == 8
    fused = listed(glm, kv="c8")
    assert fused["transformer.encoder.layers.0.self_attention.query_key_value.k_proj.kv_cache_scale"] == ("f32", (32,))
    zeros = listed(source, smooth="m1", dialect="ascendv1", dtype="f16")
    assert zeros == dict.fromkeys(
        [
            *(f"model.layers.{i}.{n}layernorm.bias" for i in (0, 1) for n in ("input_", "post_attention_")),
            "model.norm.bias",
        ],
        ("f32", (96,)),
    )
    shifted = listed(source, smooth="shift")
    assert shifted["model.layers.0.mlp.gate_proj.bias"] == ("f32", (160,))
    assert shifted["model.layers.1.mlp.up_proj.bias"] == ("f16", (160,))  # stays float: as its weight
    assert shifted["model.layers.0.input_layernorm.bias"] == ("f16", (96,))
    assert len(shifted) == 4 + 4  # q, k, v have biases already
    with pytest.raises(UnsupportedError, match="--kv"):
        listed(open_checkpoint(VECTORS / "models/tiny-llama-tied/tiny-llama-tied-Q4_K_M-bigendian.gguf"), kv="c8")


@pytest.mark.parametrize("smooth", [None, "m4", "shift"])
def test_hessians_use_the_smoothed_inputs(smooth):
    source, found, _ = run(smooth=smooth, effort="max")
    stages = calibration_stages(QWEN2, IDS)
    inputs = {}

    class Kept:
        def __init__(self, k):
            self.x = []

        def add(self, x):
            self.x.append(x.copy())

    for i in range(2):
        inputs |= stages.gather(i, frozenset(targets(source)), lambda _: None, Kept)
    for name in sorted(targets(source), key=found.order):
        x = np.concatenate(inputs[name].x).astype(np.float64)
        if found._smoothing is not None and name in found._smoothing.columns:
            x = (x - found._smoothing.shift.get(name, 0)) / found._smoothing.columns[name]
        h = found.hessian(name)
        np.testing.assert_allclose(h, x.T @ x / len(x), atol=2e-4 * np.abs(x).max() ** 2)
        low, high = found.input_range(name)
        np.testing.assert_allclose((low, high), (x.min(), x.max()), rtol=1e-4)


def test_effort_max_lowers_the_output_error_of_every_layer(tmp_path):
    """The bar is a fifth on w8a16.g128; the demonstration's model, calibrated with text that it was not trained on."""
    folder = demo_model("llama")
    text = tmp_path / "text.txt"
    text.write_text((folder.parent / "held-out.txt").read_text()[:20000])
    source, codec = open_checkpoint(folder), MsModelSlim("w8a16", group=128)
    names = [n for n in source if is_linear(n, source[n].shape) and ".layers.1." in n]
    found = prepare(
        source, MsModelSlimOptions(effort="max", calibration=str(text)), [(n, codec) for n in names], lambda _: None
    )
    for name in sorted(names, key=found.order):
        w, h = source[name].dequantize(), found.hessian(name)
        plain, best = (
            codec.dequantize(codec.pack(quantize_linear(codec, w, hessian=h, effort=effort)), w.shape) - w
            for effort in ("default", "max")
        )
        before, after = (np.sqrt(np.einsum("nk,kl,nl->", d, h, d, optimize=True)) for d in (plain, best))
        assert after < 0.8 * before, name


def test_a_layer_without_inputs_is_named(tmp_path):
    source = open_checkpoint(QWEN2)
    wanted = targets(source) | {"model.layers.0.mlp.spare.weight": MsModelSlim("w8a8")}
    with pytest.raises(InputError, match=r"no inputs.*--keep 'model\.layers\.0\.mlp\.spare'"):
        prepare(source, MsModelSlimOptions(calibration=IDS), wanted.items(), lambda _: None)
    tower = {**source.weights, "vision.0.self_attn.k_proj.weight": source["model.layers.0.self_attn.k_proj.weight"]}
    with pytest.raises(InputError, match=r"vision\.0\.self_attn\.k_proj.*does not reach this cache"):
        prepare(
            replace(source, weights=tower),
            MsModelSlimOptions(calibration=IDS, kv="c8"),
            targets(source).items(),
            lambda _: None,
        )


@pytest.mark.parametrize("codec", ["w4a16", "w8a8", "w8a8.dynamic"])
def test_keep_selects_the_worst_layers_until_the_rest_is_below_the_limit(codec):
    source = open_checkpoint(QWEN2)
    asked, codecs = MsModelSlimOptions(calibration=IDS), targets(source, codec)
    free = propose_keep(source, codecs, asked, limit=100)
    assert free.keep == ()
    assert free.before == free.after
    assert len(free.alone) == len(codecs)
    some = propose_keep(source, codecs, asked, limit=free.before / 3)
    assert 0 < len(some.keep) < len(codecs)
    assert some.after <= free.before / 3
    for family in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for i in (0, 1):
            assert (
                len({any(k.endswith(f"{i}.{m}.{f}") for k in some.keep for m in ("self_attn", "mlp")) for f in family})
                == 1
            )
    assert len(propose_keep(source, codecs, asked, limit=1e-30).keep) == len(codecs)
