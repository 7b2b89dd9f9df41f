"""Quantizing to msModelSlim: the tool's files with --exact-tool, no larger error without, and dialect conversion."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import polyquant as pq
from formats.msmodelslim_folders import MSMODELSLIM, load, save
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import InputError, PlanError
from polyquant.formats import steps
from polyquant.formats.msmodelslim.ranges import read_ranges
from polyquant.types import Action

MODELS = MSMODELSLIM / "models"
FALLBACK = {"keep": ["*layers.1.mlp.down_proj"]}
ALONE = [
    ("v0/bf16/w8a16", "w8a16", {}),
    ("v0/fp16/w8a16", "w8a16", {}),
    ("v0/bf16/w8a16_asym", "w8a16.asym", {}),
    ("v0/fp16/w8a16_asym", "w8a16.asym", {}),
    ("v0/fp16/w8a16_g32", "w8a16.g32", {}),
    ("v0/fp16/w8a16_g32_asym", "w8a16.g32.asym", {}),
    ("v0/fp16/w4a16_g32", "w4a16.g32", {}),
    ("v0/bf16/w8a8_dynamic", "w8a8.dynamic", {}),
    ("v0/fp16/w8a8_dynamic", "w8a8.dynamic", {}),
    ("v0/fp16/ascendv1_w4a16_packed", "w4a16", {}),
    ("v0/fp16/ascendv1_w4a16_g32_packed", "w4a16.g32", {}),
    ("v1/bf16/w8a16", "w8a16", {}),
    ("v1/bf16/w8a8_dynamic", "w8a8.dynamic", FALLBACK),
    ("v1/bf16/w4a8_dynamic", "w4a8.dynamic", FALLBACK),
]
"""Modes that need only the weights: golden folder, codec, options."""
RANGED = [
    ("v0/fp16/w8a8", "w8a8"),
    ("v0/bf16/w8a8", "w8a8"),
    ("v0/fp16/w8a8_per_tensor", "w8a8.tensor"),
    ("v0/fp16/w8a8s", "w8a8s"),
    ("v0/fp16/ascendv1_w8a8_mix", "w8a8.mix"),
]
"""Modes with ranges of inputs, which the golden folder has as the tool saw them."""
CALIBRATED = [
    ("v0/fp16/w8a8", {}),
    ("v0/bf16/w8a8_c8_asym", {"kv": "c8.asym"}),
    ("v0/fp16/w8a8_m1", {"smooth": "m1"}),
    ("v0/bf16/w8a8_m4", {"smooth": "m4"}),
    ("v0/fp16/w8a8_m4_fallback", {"smooth": "m4", **FALLBACK}),
    ("v0/fp16/ascendv1_w8a8_m4", {"smooth": "m4"}),
    ("v0/fp16/w8a8_c8_sharded", {"kv": "c8", "shard_bytes": 96 << 10}),
    ("v1/bf16/w8a8_static", FALLBACK),
]


def model_of(mode: str) -> Path:
    return MODELS / ("qwen3_bf16" if mode.startswith("v1") else f"qwen2_{mode.split('/')[1]}")


def dialect_of(mode: str) -> str:
    return "v1" if mode.startswith("v1") else "ascendv1" if "ascendv1" in mode else "v0"


def weights(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.glob("quant_model_*")}


def headers(folder: Path) -> dict[str, bytes]:
    """Files of a folder; of safetensors the header only."""
    files = weights(folder)
    return {n: b[: 8 + int.from_bytes(b[:8], "little")] if n.endswith(".safetensors") else b for n, b in files.items()}


def made(mode: str, codec: str, out: Path, **options: object) -> Path:
    pq.quantize(model_of(mode), out, to="msmodelslim", codec=codec, dialect=dialect_of(mode), **options)
    return out


def error(folder: Path, source: Path) -> float:
    """Sum of squared differences of all quantized weights."""
    found, wanted = pq.open(folder), pq.open(source)
    total = 0.0
    for w in found.values():
        if isinstance(w.codec, MsModelSlim):
            floats = wanted[w.name]
            total += float(((w.dequantize() - floats.dequantize()).astype(np.float64) ** 2).sum())
    return total


# ---------------------------------------------------------------- against the genuine tool


@pytest.mark.parametrize("mode, codec, options", ALONE)
def test_exact_tool_writes_equal_bytes(tmp_path, mode, codec, options):
    assert weights(made(mode, codec, tmp_path / "out", exact_tool=True, **options)) == weights(MSMODELSLIM / mode)


@pytest.mark.parametrize("mode, codec", RANGED)
def test_static_types_with_the_tools_ranges_are_equal_bytes(tmp_path, mode, codec):
    out = made(mode, codec, tmp_path / "out", exact_tool=True, ranges=MSMODELSLIM / mode / "calib_stats.json")
    assert weights(out) == weights(MSMODELSLIM / mode)


@pytest.mark.parametrize("mode, codec, options", ALONE)
def test_float32_arithmetic_has_at_most_the_tools_error(tmp_path, mode, codec, options):
    out = made(mode, codec, tmp_path / "out", **options)
    assert headers(out) == headers(MSMODELSLIM / mode)
    assert error(out, model_of(mode)) <= error(MSMODELSLIM / mode, model_of(mode)) * (1 + 1e-6)


@pytest.mark.parametrize("mode, options", CALIBRATED)
def test_calibrated_folders_have_every_tensor_of_the_tools(tmp_path, mode, options):
    text = model_of(mode) / "calib_ids.json"
    out = made(mode, "w8a8", tmp_path / "out", calibration=text, **options)
    assert headers(out) == headers(MSMODELSLIM / mode)
    assert {p.name for p in model_of(mode).glob("*.json")} - {"calib_ids.json"} <= {p.name for p in out.iterdir()}
    assert not [f for f in pq.validate(out) if f.severity.value == "error"]


def test_v0_stores_a_smoothed_norm_twice_and_v1_once(tmp_path):
    options = {
        "codec": "w8a8",
        "to": "msmodelslim",
        "smooth": "m1",
        "calibration": MODELS / "qwen2_fp16/calib_ids.json",
    }
    for dialect in ("v0", "v1"):
        pq.quantize(MODELS / "qwen2_fp16", tmp_path / dialect, dialect=dialect, **options)
    old, new = load(tmp_path / "v0"), load(tmp_path / "v1")
    norm = "model.layers.0.input_layernorm"
    assert (old[f"{norm}.module.weight"] == old[f"{norm}.weight"]).all()
    assert (old[f"{norm}.weight"] != pq.open(MODELS / "qwen2_fp16")[f"{norm}.weight"].dequantize()).any()
    assert not [n for n in new if ".module." in n]


def test_a_float_layer_after_a_smoothed_norm_is_smoothed_too(tmp_path):
    text = MODELS / "qwen2_fp16/calib_ids.json"
    pq.quantize(MODELS / "qwen2_fp16", tmp_path / "out", codec="w8a8", smooth="m1", calibration=text, keep=["*q_proj"])
    name, norm = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"
    found, source = load(tmp_path / "out"), pq.open(MODELS / "qwen2_fp16")
    divided = source[norm].dequantize() / found[norm].astype(np.float32)
    np.testing.assert_allclose(
        found[name].astype(np.float32), source[name].dequantize() * divided, rtol=2e-3, atol=1e-4
    )


# ---------------------------------------------------------------- the conversion


def static(out: Path, **options: object) -> Path:
    pq.quantize(
        MODELS / "qwen2_fp16", out, codec="w8a8", ranges=MSMODELSLIM / "v0/fp16/w8a8/calib_stats.json", **options
    )
    return out


@pytest.mark.parametrize("codec", ["w8a8", "w8a8.mix", "w4a8.dynamic", "w8a16.g32", "w8a8s"])
def test_row_blocks_give_the_bytes_of_whole_tensors(tmp_path, monkeypatch, codec):
    ranges = MSMODELSLIM / "v0/fp16/w8a8/calib_stats.json"
    options = {
        "codec": codec,
        "to": "msmodelslim",
        "ranges": ranges if codec in ("w8a8", "w8a8.mix", "w8a8s") else None,
    }
    pq.quantize(MODELS / "qwen2_fp16", tmp_path / "whole", **options)
    monkeypatch.setattr(steps, "BLOCK_WEIGHTS", 1000)
    pq.quantize(MODELS / "qwen2_fp16", tmp_path / "blocks", **options)
    assert weights(tmp_path / "blocks") == weights(tmp_path / "whole")


class Killed(BaseException):
    pass


def kill(event):
    if event.done > event.total * 3 // 4:
        raise Killed


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "w8a16"},
        {
            "codec": "w8a8",
            "calibration": MODELS / "qwen2_fp16/calib_ids.json",
            "smooth": "m4",
            "kv": "c8",
            "dialect": "v0",
        },
    ],
)
def test_a_killed_run_resumes_to_equal_bytes(tmp_path, options):
    pq.quantize(MODELS / "qwen2_fp16", tmp_path / "whole", to="msmodelslim", **options)
    with pytest.raises(Killed):
        pq.quantize(MODELS / "qwen2_fp16", tmp_path / "out", to="msmodelslim", on_progress=kill, threads=1, **options)
    assert not (tmp_path / "out").exists()
    pq.quantize(MODELS / "qwen2_fp16", tmp_path / "out", to="msmodelslim", resume="required", **options)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


def test_different_options_are_a_different_job(tmp_path):
    def fingerprint(**options: object) -> str:
        return pq.plan(MODELS / "qwen2_fp16", "msmodelslim", codec="w8a8", **options).fingerprint

    low = {f"{w}": (-1.0, 1.0) for w in read_ranges(MSMODELSLIM / "v0/fp16/w8a8/calib_stats.json", "v1")}
    other = {**low, "model.layers.0.self_attn.q_proj": (-1.0, 2.0)}
    text = MODELS / "qwen2_fp16/calib_ids.json"
    jobs = [{"ranges": low}, {"ranges": other}, {"ranges": low, "exact_tool": True}, {"calibration": text}]
    assert len({fingerprint(**job) for job in jobs}) == len(jobs)


def test_rules_and_kept_layers(tmp_path):
    plan = pq.plan(
        MODELS / "qwen2_fp16",
        "msmodelslim",
        codec="w8a16",
        rules=["*down_proj*=w8a8.dynamic", "*layers.1*up_proj*=f16", "lm_head.weight=w8a16.g32"],
        keep=["*o_proj", "model.layers.0.mlp.gate_proj.weight"],
    )
    found = {s.map.target.removesuffix(".weight"): s.target.name for s in plan.steps}
    at = "model.layers.{}.{}".format
    assert found[at(0, "mlp.down_proj")] == "w8a8.dynamic" and found["lm_head"] == "w8a16.g32"
    assert found[at(1, "mlp.up_proj")] == found[at(0, "self_attn.o_proj")] == found[at(0, "mlp.gate_proj")] == "f16"
    assert found[at(0, "mlp.up_proj")] == found[at(1, "mlp.gate_proj")] == "w8a16"
    assert found["model.embed_tokens"] == "f16" and found[at(0, "self_attn.q_proj.bias")] == "f32"
    assert any("model.layers.0.mlp.gate_proj and model.layers.0.mlp.up_proj" in w for w in plan.warnings)


def test_deq_scale_is_stored_for_the_models_dtype(tmp_path):
    old = load(static(tmp_path / "half"))
    assert old["model.layers.0.mlp.up_proj.deq_scale"].dtype == np.int64
    ranges = MSMODELSLIM / "v0/bf16/w8a8/calib_stats.json"
    pq.quantize(MODELS / "qwen2_bf16", tmp_path / "brain", codec="w8a8", ranges=ranges)
    assert load(tmp_path / "brain")["model.layers.0.mlp.up_proj.deq_scale"].dtype == np.float32


def test_the_bias_is_in_quant_bias_once(tmp_path):
    found = load(static(tmp_path / "out"))
    layer = "model.layers.0.self_attn.q_proj."
    deq = found[layer + "deq_scale"].astype(np.uint32).view(np.float32)
    sums = found[layer + "weight"].sum(1, dtype=np.int64)
    wanted = np.rint(found[layer + "bias"] / deq.astype(np.float64) - found[layer + "input_offset"] * sums)
    assert (found[layer + "quant_bias"] == wanted).all()


def test_an_unused_importance_matrix_is_an_error():
    weights_of_columns = {"model.layers.0.mlp.up_proj.weight": np.ones(96, np.float32)}
    with pytest.raises(PlanError, match="--effort max"):
        pq.plan(MODELS / "qwen2_fp16", "msmodelslim", codec="w8a16", importance=weights_of_columns)


def changed(out: Path, name: str, spoil: Callable[[np.ndarray], None]) -> Path:
    """The half-precision model with one tensor spoilt."""
    shutil.copytree(MODELS / "qwen2_fp16", out, copy_function=shutil.copyfile)
    tensors = {n: np.array(w.parts["blocks"]).view(np.float16).reshape(w.shape) for n, w in pq.open(out).items()}
    spoil(tensors[name])
    save(out / "model.safetensors", tensors)
    return out


@pytest.mark.parametrize(
    "tensor, value, codec, what",
    [
        ("mlp.up_proj.weight", np.nan, "w8a16", "NaN"),
        ("mlp.up_proj.weight", np.inf, "w8a8", "NaN or infinity"),
        ("mlp.up_proj.weight", np.inf, "w8a8s", "NaN or infinity"),
        ("self_attn.q_proj.bias", np.nan, "w8a8", "NaN"),
    ],
)
def test_nan_and_infinity_are_refused_by_name(tmp_path, tensor, value, codec, what):
    def spoil(a: np.ndarray) -> None:
        a.flat[3] = value

    name = f"model.layers.1.{tensor}"
    source = changed(tmp_path / "model", name, spoil)
    ranges = None if codec == "w8a16" else MSMODELSLIM / "v0/fp16/w8a8/calib_stats.json"
    with pytest.raises(InputError, match=what) as refused:
        pq.quantize(source, tmp_path / "out", to="msmodelslim", codec=codec, ranges=ranges)
    assert refused.value.tensor is not None and refused.value.tensor.startswith(name.rpartition(".")[0])
    assert not (tmp_path / "out").exists()


def test_a_quant_bias_beyond_32_bits_is_refused_with_a_hint(tmp_path):
    name = "model.layers.0.self_attn.q_proj"

    def shrink(a: np.ndarray) -> None:
        a[2] = 1e-7  # its bias is millions of millions of steps

    source = changed(tmp_path / "model", f"{name}.weight", shrink)
    ranges = dict.fromkeys(read_ranges(MSMODELSLIM / "v0/fp16/w8a8/calib_stats.json", "v1"), (-1.0, 1.0))
    with pytest.raises(InputError, match=r"quant_bias does not fit int32.*--keep") as refused:
        pq.quantize(source, tmp_path / "out", codec="w8a8", ranges=ranges)
    assert refused.value.tensor == f"{name}.weight"
    pq.quantize(source, tmp_path / "out", codec="w8a8", ranges=ranges, keep=[name])


def test_without_a_config_the_floats_determine_the_models_dtype(tmp_path):
    for model, dtype in (("qwen2_fp16", np.int64), ("qwen2_bf16", np.float32)):
        shutil.copytree(MODELS / model, tmp_path / model, copy_function=shutil.copyfile)
        (tmp_path / model / "config.json").unlink()
        ranges = MSMODELSLIM / "v0" / model.split("_")[1] / "w8a8/calib_stats.json"
        report = pq.quantize(tmp_path / model, tmp_path / f"{model}.out", codec="w8a8", ranges=ranges)
        assert load(tmp_path / f"{model}.out")["model.layers.0.mlp.up_proj.deq_scale"].dtype == dtype
        assert any("no config.json" in w for w in report.warnings)


# ---------------------------------------------------------------- ranges


def test_ranges_given_by_hand_and_by_the_tool(tmp_path):
    path = tmp_path / "ranges.json"
    path.write_text(
        '{"a.weight": [1, 2.5], "b": {"per_sample_min_max": [[-3, 1], [-1, 3]], "observed_min": -2, "observed_max": 2}}'
    )
    assert read_ranges(path, "v1") == {"a": (0.0, 2.5), "b": (-3.0, 3.0)}
    assert read_ranges(path, "v0") == {"a": (0.0, 2.5), "b": (-2.0, 2.0)}


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"a": [1]}', '{"a": [2, 1]}', '{"a": ["1", 2]}', '{"a": [true, 2]}', '{"a": {}}', '{"a": [1, NaN]}',
        '{"a": [0, 1e999]}']
)  # fmt: skip
def test_invalid_ranges_are_refused(tmp_path, text):
    path = tmp_path / "ranges.json"
    path.write_text(text)
    with pytest.raises(InputError):
        read_ranges(path, "v1")


# ---------------------------------------------------------------- from dialect to dialect


def with_config(mode: str, out: Path) -> Path:
    shutil.copytree(MSMODELSLIM / mode, out, ignore=shutil.ignore_patterns("run.json", "tool_*", "calib_*"))
    if not (out / "config.json").exists():
        shutil.copyfile(model_of(mode) / "config.json", out / "config.json")
    return out


ROUND = (
    "v0/fp16/w8a16",
    "v0/bf16/w8a16_asym",
    "v0/fp16/w8a16_g32_asym",
    "v0/fp16/w4a16_g32",
    "v0/fp16/w8a16_awq_m3",
    "v0/fp16/w8a8s_lowbit_smooth",
    "v0/bf16/w8a8_dynamic",
    "v0/fp16/ascendv1_w8a8_mix",
    "v0/fp16/ascendv1_w4a16_packed",
    "v1/bf16/w8a16",
    "v1/bf16/w8a8_static",
    "v1/fp32/w8a8_smoothasym_c8",
)


@pytest.mark.parametrize("mode", ROUND)
@pytest.mark.parametrize("other", ["v1", "ascendv1", "v0"])
def test_dialects_round_trip(tmp_path, mode, other):
    start = with_config(mode, tmp_path / "start")
    pq.convert(start, tmp_path / "there", to="msmodelslim", dialect=other)
    report = pq.convert(tmp_path / "there", tmp_path / "back", to="msmodelslim", dialect=dialect_of(mode))
    assert {s.action for s in report.steps} <= {"copy", "transcode"}
    assert weights(tmp_path / "back") == weights(start)


@pytest.mark.parametrize("mode", ["v0/fp16/w8a8_m4", "v0/bf16/w8a8_c8_asym", "v0/fp16/w8a8_per_tensor"])
def test_via_v1_only_weight_scale_is_rounded(tmp_path, mode):
    """v1 has none: it comes back as deq_scale / input_scale, one rounding away. Integer arithmetic reads neither."""
    if not (MSMODELSLIM / mode).exists():
        mode = mode.replace("fp16/w8a8_m4", "fp16/w8a8_m1")
    start = with_config(mode, tmp_path / "start")
    there = pq.convert(start, tmp_path / "there", to="msmodelslim", dialect="v1")
    assert 0 < there.error.rrmse < 2e-3
    pq.convert(tmp_path / "there", tmp_path / "back", to="msmodelslim", dialect="v0")
    old, new = load(start), load(tmp_path / "back")
    assert headers(start) == headers(tmp_path / "back")
    other = {n for n in old if old[n].tobytes() != new[n].tobytes()}
    assert other and all(n.endswith("weight_scale") for n in other)
    for name in other:
        np.testing.assert_allclose(new[name].astype(np.float32), old[name].astype(np.float32), rtol=2**-7)


def test_quantized_layers_copy_of_a_norm_is_kept(tmp_path):
    """As the document specifies: norm.weight is the unscaled one, for layers that stay float."""
    start = with_config("v0/fp16/w8a8_m1", tmp_path / "start")
    (path,) = start.glob("*.safetensors")
    tensors, norm = load(start), "model.layers.0.input_layernorm"
    scaled = tensors[f"{norm}.module.weight"].copy()
    save(path, {**tensors, f"{norm}.weight": scaled * 2})
    plan = pq.plan(start, "msmodelslim")
    assert any(f"{norm}.weight" in w and "1 norms" in w for w in plan.warnings)
    pq.convert(plan, tmp_path / "out")
    found = load(tmp_path / "out")
    assert (found[f"{norm}.weight"] == scaled).all() and not [n for n in found if ".module." in n]


@pytest.mark.parametrize("options", [{}, {"smooth": "m4", "kv": "c8", "codec": "w8a8"}])
def test_chatglm_with_its_fused_layers(tmp_path, options):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([[1, 5, 9, 20, 33, 100, 7, 8] * 4] * 2))
    text = {"calibration": ids} if options else {}
    pq.quantize(MSMODELSLIM / "chatglm2/float", tmp_path / "out", to="msmodelslim", **text, **options)
    said = json.loads((tmp_path / "out/quant_model_description.json").read_text())
    at = "transformer.encoder.layers.1."
    assert said[at + "self_attention.query_key_value.weight"] == said["model_quant_type"] != "FLOAT"
    assert said["transformer.output_layer.weight"] == said[at + "input_layernorm.weight"] == "FLOAT"
    assert ((at + "self_attention.query_key_value.k_proj.kv_cache_scale") in said) == bool(options)
    assert not [f for f in pq.validate(tmp_path / "out") if f.severity.value == "error"]


def test_v0_cannot_store_w4a8(tmp_path):
    start = with_config("v1/bf16/w4a8_dynamic", tmp_path / "start")
    with pytest.raises(PlanError, match="--dialect ascendv1"):
        pq.plan(start, "msmodelslim", dialect="v0")


def test_an_unknown_type_is_copied(tmp_path):
    start = with_config("v1/bf16/w8a16", tmp_path / "start")
    path = start / "quant_model_description.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "model.norm.weight": "W9A9", "metadata": {"who": "us"}}))
    pq.convert(start, tmp_path / "out", to="msmodelslim", dialect="ascendv1")
    found = json.loads((tmp_path / "out/quant_model_description.json").read_text())
    assert found["model.norm.weight"] == "W9A9" and found["model_quant_type"] == "W8A16"


def test_a_different_type_with_the_same_codes_is_not_requantized(tmp_path):
    start = with_config("v1/bf16/w8a16", tmp_path / "start")
    plan = pq.plan(start, "msmodelslim", codec="w8a8.dynamic")
    assert Action.TRANSCODE in plan.actions and Action.REQUANTIZE not in plan.actions
    pq.convert(plan, tmp_path / "out")
    old, new = load(start), load(tmp_path / "out")
    assert all(old[n].tobytes() == new[n].tobytes() for n in old)
    with pytest.raises(PlanError, match="--requantize"):
        pq.plan(start, "msmodelslim", codec="w4a16")
