"""Conversions to, from and between Trellis folders: which tensors are quantized, their codes, the reported figures."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.errors import PlanError, PolyquantError
from polyquant.formats.trellis.target import is_linear
from polyquant.opening import open_checkpoint
from polyquant.ops import native
from polyquant.storage.safetensors import header_bytes

DIALECTS = VECTORS / "trellis"
LLAMA = VECTORS / "models/tiny-llama-untied/hf"
SHAPES = {
    "lm_head.weight": (48, 32),
    "model.embed_tokens.weight": (48, 32),
    "model.layers.0.input_layernorm.weight": (32,),
    "model.layers.0.mlp.down_proj.weight": (32, 64),
    "model.layers.0.mlp.gate.weight": (4, 32),
    "model.layers.0.mlp.up_proj.weight": (64, 32),
    "model.layers.0.self_attn.q_proj.bias": (32,),
    "model.layers.0.self_attn.q_proj.weight": (17, 33),
}
LINEAR = [
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.self_attn.q_proj.weight",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder of float32 weights, a part of one layer."""
    path = tmp_path_factory.mktemp("source")
    rng = np.random.default_rng(0)
    header, entries = header_bytes([(n, "F32", s) for n, s in SHAPES.items()], {"format": "pt"})
    data = b"".join(rng.standard_normal(e.shape).astype(np.float32).tobytes() for e in entries)
    (path / "model.safetensors").write_bytes(header + data)
    (path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    return path


def metadata(path):
    return json.loads((path / "quantization_config.json").read_text())


def same_values(a, b, names=None):
    for name in names or a:
        np.testing.assert_array_equal(a[name].dequantize(), b[name].dequantize(), err_msg=name)


# ---------------------------------------------------------------- from floats


def test_only_linear_layers_are_quantized(folder, tmp_path):
    pq.quantize(folder, tmp_path / "out", bits=3, effort="fast")
    found = pq.open(tmp_path / "out")
    assert found.format == "trellis-v3"
    assert set(found) == set(SHAPES)
    assert sorted(n for n, w in found.items() if w.codec.name.startswith("trellis.3")) == LINEAR
    same_values(pq.open(folder), found, set(SHAPES) - set(LINEAR))
    # the fixture is a part of a model without model_type
    assert {f.code for f in pq.validate(tmp_path / "out") if f.severity.value != "note"} == {"TRL003"}


def test_reported_figures_are_correct(folder, tmp_path):
    report = pq.quantize(folder, tmp_path / "out", bits=2, effort="fast", measure=False)
    source, found, told = pq.open(folder), pq.open(tmp_path / "out"), metadata(tmp_path / "out")
    assert set(told["tensor_metadata"]) == set(LINEAR)
    for name, entry in told["tensor_metadata"].items():
        w = source[name].dequantize()
        miss = found[name].dequantize().astype(np.float64) - w
        assert entry["mse"] == pytest.approx((miss**2).mean(), rel=1e-6)
        assert 0 < entry["mse"] < w.var()
        assert entry["original_bytes"] == w.nbytes
        assert entry["original_dtype"] == "f32"
        assert entry["compressed_bytes"] == found[name].nbytes
        assert entry["shape"] == list(w.T.shape)
    stored, weights = (sum(f(found[n]) for n in LINEAR) for f in (lambda w: w.nbytes, lambda w: math.prod(w.shape)))
    assert told["global_config"]["average_bits_per_weight"] == pytest.approx(8 * stored / weights, abs=1e-6)
    assert told["layer_allocation"] == {"0": {"mlp.down_proj": 2, "mlp.up_proj": 2, "self_attn.q_proj": 2}}
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == found.nbytes
    assert sum(f.stat().st_size for f in (tmp_path / "out").iterdir()) == report.nbytes


@pytest.mark.parametrize(
    "options, codec",
    [
        ({"bits": 3}, "trellis.3"),
        ({"bits": 4, "effort": "fast"}, "trellis.4.mul1.12"),
        ({"bits": 4, "effort": "max", "codebook": "mcg"}, "trellis.4.mcg.16"),
        ({"bits": 5, "codebook": "grid"}, "trellis.5.grid"),
        ({"codec": "trellis.2.mul1.16"}, "trellis.2.mul1.16"),
        ({"bits": 2, "effort": "max", "rules": ["*up_proj*=trellis.6"]}, "trellis.6.mul1.16"),
        ({"bits": 2, "effort": "max", "rules": ["*up_proj*=trellis.6.mul1.12"]}, "trellis.6.mul1.12"),
        ({"bits": 2, "rules": ["*up_proj*=bf16"]}, "bf16"),
        ({"effort": "fast", "rules": ["*up_proj*=trellis.6"]}, "trellis.6.mul1.12"),
    ],
)
def test_effects_of_the_options(folder, options, codec):
    plan = pq.plan(folder, "trellis-v3", **options)
    assert [str(s.target) for s in plan.steps if "up_proj" in s.map.target] == [codec]


def test_a_rule_may_name_the_head(folder):
    plan = pq.plan(folder, "trellis-v3", bits=3, rules=["lm_head.*=trellis.6"])
    assert {str(s.target) for s in plan.steps if "lm_head" in s.map.target} == {"trellis.6"}


@pytest.mark.parametrize(
    "name, linear",
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.0.mlp.gate_proj.weight", True),
        ("model.layers.0.mlp.experts.3.w1.weight", True),
        ("transformer.encoder.layers.0.mlp.dense_h_to_4h.weight", True),
        ("encoder.layer.0.attention.output.dense.weight", True),
        ("model.layers.0.mlp.gate.weight", False),
        ("model.layers.0.block_sparse_moe.router.layer.weight", False),
        ("model.embed_tokens.weight", False),
        ("transformer.wte.weight", False),
        ("transformer.output_layer.weight", False),
        ("lm_head.weight", False),
        ("output.weight", False),
        ("token_embd.weight", False),
        ("model.layers.0.self_attn.q_norm.weight", False),
        ("model.layers.0.self_attn.q_proj.bias", False),
    ],
)
def test_linear_layers_are_recognised(name, linear):
    assert is_linear(name, (32, 32)) is linear


@pytest.mark.parametrize(
    "options, what",
    [
        ({}, "choose the bits"),
        ({"effort": "max"}, "add --bits"),
        ({"bits": 3, "codec": "trellis.4"}, "omit --bits"),
        ({"bits": 3, "codebook": "grid", "effort": "max"}, "omit --effort"),
        ({"bits": 3, "codebook": "gird"}, "did you mean grid"),
        ({"bits": 9}, "2 to 8"),
        ({"codec": "q4_k"}, "--bits 2"),
        ({"codec": "bf16"}, "choose the bits"),
        ({"bits": 3, "rules": ["lm_head*=q6_k"]}, "--rule"),
        ({"bits": 3, "architecture": "llama"}, "architecture"),
    ],
)
def test_refused_inputs(folder, options, what):
    with pytest.raises(PolyquantError, match=what):
        pq.plan(folder, "trellis-v3", **options)


def test_options_of_trellis_folders_are_refused_for_other_targets(folder):
    with pytest.raises(PlanError, match="--to trellis-v3"):
        pq.plan(folder, "hf", bits=3)


def test_not_finite_weights_are_refused(folder, tmp_path):
    source = shutil.copytree(folder, tmp_path / "in")
    path = source / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-4:] = np.float32(np.nan).tobytes()
    path.write_bytes(raw)
    with pytest.raises(PolyquantError, match="NaN"):
        pq.convert(source, tmp_path / "out", bits=3, effort="fast")
    assert not (tmp_path / "out").exists()


def test_bytes_do_not_depend_on_threads(folder, tmp_path):
    for threads in (1, 3):
        pq.convert(folder, tmp_path / str(threads), bits=3, effort="fast", threads=threads, shard_bytes=9000)
    for file in (tmp_path / "1").iterdir():
        assert file.read_bytes() == (tmp_path / "3" / file.name).read_bytes()
    assert len(list((tmp_path / "1").glob("model-*.safetensors"))) > 1


# ---------------------------------------------------------------- trellis to trellis


@pytest.mark.parametrize(
    "dialect",
    ["v2_cuda", "v2_exl3", "v2_odd", "v3_cuda_consolidated", "v3_migrated", "v3_shard_writer", "v3_seed_kn",
        "v3_seed_mm_headers"]
)  # fmt: skip
@pytest.mark.parametrize("repair", [False, True])
def test_every_dialect_becomes_v3_with_equal_values(dialect, repair, tmp_path):
    pq.convert(DIALECTS / dialect, tmp_path / "out", repair=repair, allow_unknown=True)  # some lack layers
    source = open_checkpoint(DIALECTS / dialect, repair=repair)
    found = pq.open(tmp_path / "out")
    assert found.format == "trellis-v3"
    same_values(source, found)
    assert all(w.codec.name.startswith("trellis.") for w in found.values() if len(w.shape) == 2 and "proj" in w.name)


def test_recorded_errors_are_kept(tmp_path):
    pq.convert(DIALECTS / "v2_cuda", tmp_path / "out")
    index = json.loads((DIALECTS / "v2_cuda/layer_0000/index.json").read_text())
    entries = metadata(tmp_path / "out")["tensor_metadata"]
    assert len(index["tensors"]) == 7
    for said in index["tensors"]:
        assert entries[said["name"]]["mse"] == pytest.approx(said["mse"], rel=1e-8)
        assert entries[said["name"]]["bits"] == said["bits"]
        assert entries[said["name"]]["shape"] == said["shape"][::-1]


def test_exl3_round_trips_through_trellis_with_equal_bytes(tmp_path):
    golden = DIALECTS / "exl3_tensors.safetensors"
    pq.convert(golden, tmp_path / "t", to="trellis-v3")
    report = pq.convert(tmp_path / "t", tmp_path / "x", to="hf")
    source, trellis, back = pq.open(golden), pq.open(tmp_path / "t"), pq.open(tmp_path / "x/model.safetensors")
    quantized = [n for n, w in source.items() if w.codec.name.startswith("exl3")]
    assert len(quantized) == 12
    assert {s.action for s in report.steps} == {"transcode"}
    same_values(source, trellis)
    for name in quantized:
        assert back[name].codec.name == source[name].codec.name
        for part, array in source[name].parts.items():
            np.testing.assert_array_equal(array, back[name].parts[part], err_msg=name)
    expected = np.load(DIALECTS / "exl3_expected.npz")
    for key in (k for k in expected if k.endswith("weight_f32")):
        name = next(n for n in quantized if n.startswith(key.removesuffix("weight_f32")))
        np.testing.assert_allclose(trellis[name].dequantize().T, expected[key], atol=2e-6)


def test_v3_to_v3_copies_bytes(folder, tmp_path):
    pq.convert(folder, tmp_path / "a", bits=3, effort="fast", rules=["*up*=trellis.5.mul1.14"])
    pq.convert(tmp_path / "a", tmp_path / "b", shard_bytes=9000)
    pq.convert(tmp_path / "b", tmp_path / "c")
    assert {s.action for s in pq.convert(tmp_path / "a", tmp_path / "d").steps} == {"copy"}
    a, c = pq.open(tmp_path / "a"), pq.open(tmp_path / "c")
    for name, w in a.items():
        for part, array in w.parts.items():
            np.testing.assert_array_equal(array, c[name].parts[part])
    assert metadata(tmp_path / "a")["tensor_metadata"] == metadata(tmp_path / "c")["tensor_metadata"]


def test_equal_options_copy_without_a_search(folder, tmp_path):
    pq.convert(folder, tmp_path / "a", bits=3, effort="fast")
    plan = pq.plan(tmp_path / "a", "trellis-v3", bits=3, effort="fast")
    assert not [s for s in plan.steps if s.searches]


def test_different_options_are_a_requantization(folder, tmp_path):
    pq.convert(folder, tmp_path / "a", bits=3, effort="fast")
    with pytest.raises(PlanError, match="--requantize"):
        pq.plan(tmp_path / "a", "trellis-v3", bits=2, effort="fast")
    pq.convert(tmp_path / "a", tmp_path / "b", bits=2, effort="fast", requantize=True)
    assert metadata(tmp_path / "b")["global_config"]["target_bits"] == 2


# ---------------------------------------------------------------- from Trellis


@pytest.mark.parametrize("codec", ["f32", "bf16", None])
def test_to_a_folder_of_floats(folder, tmp_path, codec):
    pq.convert(folder, tmp_path / "a", bits=3, effort="fast")
    pq.convert(tmp_path / "a", tmp_path / "b", to="hf", codec=codec)
    a, b = pq.open(tmp_path / "a"), pq.open(tmp_path / "b")
    assert b.format == "hf"
    assert "quantization_config" not in b.config
    assert not (tmp_path / "b/quantization_config.json").exists()
    for name, w in a.items():
        exact = codec == "f32" or name not in LINEAR
        np.testing.assert_allclose(w.dequantize(), b[name].dequantize(), rtol=0 if exact and codec != "bf16" else 2**-8)


def test_the_plain_grid_becomes_half_precision_exactly(tmp_path):
    pq.convert(DIALECTS / "v2_cuda", tmp_path / "out", to="hf")
    same_values(pq.open(DIALECTS / "v2_cuda"), pq.open(tmp_path / "out"))


@pytest.mark.skipif(native.lib() is None, reason="slow in numpy")
def test_to_gguf_and_from_gguf(tmp_path):
    pq.quantize(LLAMA, tmp_path / "t", to="trellis-v3", bits=4, effort="fast")
    pq.convert(tmp_path / "t", tmp_path / "m.gguf", codec="f32")
    pq.quantize(tmp_path / "t", tmp_path / "q.gguf", requantize=True)
    pq.convert(tmp_path / "m.gguf", tmp_path / "back", to="hf")
    same_values(pq.open(tmp_path / "t"), pq.open(tmp_path / "back"))
    assert {str(w.codec) for w in pq.open(tmp_path / "q.gguf").values()} == {"q4_k", "q6_k", "f32"}
    pq.quantize(tmp_path / "m.gguf", tmp_path / "again", to="trellis-v3", bits=4, effort="fast")
    direct, again = pq.open(tmp_path / "t"), pq.open(tmp_path / "again")
    assert {n: str(w.codec) for n, w in direct.items() if "proj" in n} == {
        n: str(w.codec) for n, w in again.items() if "proj" in n
    }
