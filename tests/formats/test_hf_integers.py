"""Folders of compressed-tensors, gptqmodel and AutoAWQ: read bit for bit, written back with the same bytes, converted
into each other with the same weights, and refused where they contradict themselves."""

import hashlib
import json
import shutil

import ml_dtypes
import numpy as np
import pytest

import polyquant
from folders import read_safetensors, safetensors_bytes
from hub_vectors import HUB, hashes, logits
from polyquant import load
from polyquant.analysis.demo import demo_model
from polyquant.errors import PlanError, PolyquantError
from polyquant.types import Action

CASES = sorted(hashes("ints"))
SCHEME = {"ct": "compressed-tensors", "gptq": "gptq", "awq": "awq"}


def scheme_of(case):
    return SCHEME[case.partition("-")[0]]


def settings(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]


def as_library(case, weight):
    """The library's own values, as bytes: gptqmodel rounds scales to bfloat16 first."""
    values = weight.dequantize()
    if case.startswith("gptq"):
        scale, offset, _, index = weight.codec.group_tables(weight.parts, weight.shape)
        scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
        n, k = weight.shape
        index = np.arange(k) // (k // scale.shape[1]) if index is None else index
        codes = weight.codec.codes_of(weight.parts, weight.shape, slice(0, n)).astype(np.float32)
        values = (codes - offset[:, index]) * scale[:, index]
    return values.astype(np.float16 if case.startswith("awq") else ml_dtypes.bfloat16).tobytes()


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_library(case):
    source = polyquant.open(HUB / case)
    for name, digest in hashes("ints")[case].items():
        assert hashlib.sha256(as_library(case, source[name])).hexdigest() == digest, name


@pytest.mark.parametrize("case", CASES)
def test_written_back_with_the_same_bytes(case, tmp_path):
    report = polyquant.convert(HUB / case, tmp_path / "out", to=scheme_of(case))
    assert {s.action for s in report.steps} == {Action.COPY.value}
    assert read_safetensors(tmp_path / "out") == read_safetensors(HUB / case)
    was, now = settings(HUB / case), settings(tmp_path / "out")
    for free in ("meta", "version", "dynamic", "modules_to_not_convert"):  # other words for the same modules
        was.pop(free, None)
        now.pop(free, None)
    for group in was.get("config_groups", {}).values():  # codes do not record the source's observer
        group["weights"]["observer"] = "memoryless_minmax"
    assert was == now


@pytest.mark.parametrize(
    ("case", "to", "codec"),
    [
        ("gptq-v1-b4-g32-asym", "compressed-tensors", "compressed.p4.g32.zpp.f16"),
        ("gptq-v1-b4-g32-asym", "awq", "awq.4.g32"),
        ("gptq-v1-b3-g32", "compressed-tensors", "compressed.p4.g32.f16"),
        ("gptq-v1-b8-g32", "compressed-tensors", "compressed.p8.g32.f16"),
        ("gptq-v1-b4-channel-odd", "awq", "awq.4"),
        ("gptq-v2-b2-g32-asym", "compressed-tensors", "compressed.p4.g32.zpp.f16"),
        ("gptq-v2-b4-g32-actorder-asym", "compressed-tensors", "compressed.p4.g32.zpp.act.f16"),
        ("awq-gemm-g32-odd", "compressed-tensors", "compressed.p4.g32.zpp.f16"),
        ("awq-gemm-g32-odd", "gptq", "gptq.4.g32"),
        ("ct-int4-g32-asym-odd", "gptq", "gptq.4.g32"),
        ("ct-int4-g32-asym-odd", "awq", "awq.4.g32"),
        ("ct-int4-g32-asym-gptq-actorder-group-odd", "gptq", "gptq.4.g32.act"),
        ("ct-int4-g32-kvfp8", "gptq", "gptq.4.g32.sym"),
    ],
)
def test_codes_are_kept(case, to, codec, tmp_path):
    report = polyquant.convert(HUB / case, tmp_path / "out", to=to)
    moved = [s for s in report.steps if s.action == "transcode"]
    assert {s.target for s in moved} == {codec}
    one, two = polyquant.open(HUB / case), polyquant.open(tmp_path / "out")
    for step in moved:
        np.testing.assert_array_equal(one[step.tensor].dequantize(), two[step.tensor].dequantize(), err_msg=step.tensor)
    again = polyquant.convert(tmp_path / "out", tmp_path / "back", to=scheme_of(case))
    assert {s.action for s in again.steps if s.shape[1:] and "lm_head" not in s.tensor} <= {"transcode", "copy"}


@pytest.mark.parametrize("case", ["gptq-v1-b4-g32-asym", "ct-int4-g32-asym-odd", "awq-gemm-g32-odd"])
def test_small_tiles_give_the_same_bytes(case, tmp_path, monkeypatch):
    """A tile of few weights is what a large tensor has."""
    for to in set(SCHEME.values()) - {scheme_of(case)}:
        polyquant.convert(HUB / case, tmp_path / to, to=to)
        monkeypatch.setattr("polyquant.conversion.tiles.TILE_WEIGHTS", 3000)
        polyquant.convert(HUB / case, tmp_path / f"{to} in tiles", to=to)
        monkeypatch.undo()
        assert read_safetensors(tmp_path / to) == read_safetensors(tmp_path / f"{to} in tiles"), to


@pytest.mark.parametrize("case", [c for c in CASES if (HUB / c / "logits.npz").exists()])
def test_logits(case):
    tokens, wanted = logits(case)
    got = load(HUB / case, activations="float").logits(tokens)
    error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    assert error < (0.05 if "w8a8" in case else 0.02), error  # the library computes in bfloat16, W8A8 rounds its inputs


# ---------------------------------------------------------------- contradictions


def without(name):
    return lambda tensors, config: tensors.pop(name)


def other(name, dtype, shape):
    size = int(np.prod(shape)) * {"I32": 4, "F16": 2, "BF16": 2, "I64": 8, "I8": 1}[dtype]

    def change(tensors, config):
        assert name in tensors
        tensors[name] = (dtype, shape, bytes(size))

    return change


def said(**entries):
    return lambda tensors, config: config["quantization_config"].update(entries)


Q = "model.layers.0.self_attn.q_proj."
HOSTILE = [
    ("ct-int4-g32-asym-odd", without(Q + "weight_scale"), "lacks weight_scale"),
    ("ct-int4-g32-asym-odd", without(Q + "weight_shape"), "lacks weight_shape"),
    ("ct-int4-g32-asym-odd", other(Q + "weight_shape", "I64", (3,)), "weight_shape has an unexpected shape"),
    ("ct-int4-g32-asym-odd", other(Q + "weight_packed", "I32", (96, 11)), "does not fit weight_shape"),
    ("ct-int4-g32-asym-odd", other(Q + "weight_scale", "BF16", (96, 7)), "groups do not divide"),
    ("ct-int4-g32-asym-odd", other(Q + "weight_zero_point", "I32", (11, 3)), "weight_zero_point does not fit"),
    ("ct-int4-g32-asym-odd", said(format="pack-quantised", config_groups={}), "pack-quantised"),
    ("gptq-v1-b4-g32-asym", other(Q + "qweight", "I32", (15, 128)), "unsupported GPTQ weight"),
    ("gptq-v1-b4-g32-asym", other(Q + "qzeros", "I32", (4, 15)), "qzeros does not fit"),
    ("gptq-v1-b4-g32-asym", other(Q + "scales", "F16", (5, 128)), "groups do not divide"),
    ("gptq-v1-b4-g32-asym", other(Q + "g_idx", "I32", (128, 1)), "g_idx has an unexpected shape"),
    ("gptq-v1-b4-g32-asym", said(checkpoint_format="marlin"), "kernel-specific order"),
    ("gptq-v1-b4-g32-asym", said(sym=True), "zero points say otherwise"),
    ("awq-gemm-g32-odd", other(Q + "qzeros", "I32", (3, 11)), "qzeros does not fit"),
    ("awq-gemm-g32-odd", other(Q + "scales", "F16", (7, 96)), "groups do not divide"),
    ("awq-gemm-g32-odd", said(version="gemv"), "variant of AWQ"),
    ("awq-gemm-g32-odd", said(bits=8), "variant of AWQ"),
]


@pytest.mark.parametrize(("case", "change", "message"), HOSTILE, ids=[f"{c}: {m}" for c, _, m in HOSTILE])
def test_contradictions_are_one_line(case, change, message, tmp_path):
    source = tmp_path / "bad"
    shutil.copytree(HUB / case, source)
    tensors = read_safetensors(source)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    change(tensors, config)
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (source / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    for to in ("compressed-tensors", "hf", "awq"):
        with pytest.raises(PolyquantError, match=message) as refused:
            polyquant.convert(source, tmp_path / "out", to=to)
        assert "\n" not in str(refused.value).strip()
        assert [p.name for p in tmp_path.iterdir()] == ["bad"], "unexpected files remain"


@pytest.mark.parametrize("case", ["gptq-v2-b4-g32-actorder-asym", "ct-int4-g32-asym-gptq-actorder-group-odd"])
def test_act_order_cannot_become_awq(case, tmp_path):
    with pytest.raises(PolyquantError, match=r"requantiz|do not divide"):
        polyquant.convert(HUB / case, tmp_path / "out", to="awq")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("codec", ["gptq.4.g33.sym", "gptq.4.g512.sym"])
def test_a_group_that_divides_no_row(tmp_path, codec):
    with pytest.raises(PlanError, match=f"do not divide .*a group that divides (256|768), found {codec}"):
        polyquant.quantize(demo_model("llama"), tmp_path / "q", to="gptq", codec=codec)
    assert not list(tmp_path.iterdir())
