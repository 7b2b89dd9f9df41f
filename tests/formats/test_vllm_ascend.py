"""`validate --target vllm-ascend` against vllm-ascend's own parser and parameter tables, and the types it supports.

The parser runs if the variable VLLM_ASCEND names a checkout of vllm-ascend; torch is needed, an NPU is not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import polyquant as pq
from formats.msmodelslim_folders import MSMODELSLIM, description, edit_json
from polyquant.formats.msmodelslim.consumers import TARGETS

CHECKOUT = Path(os.environ.get("VLLM_ASCEND", "/nowhere"))
CHILD = Path(__file__).parent / "vllm_ascend_child.py"
SAME = {"ASC071", "ASC072", "ASC074", "ASC076"}
"""Findings for folders that the parser rejects, or loads into parameters of a different shape or type."""
checkout = pytest.mark.skipif(
    not (CHECKOUT / "vllm_ascend" / "quantization").is_dir(), reason="VLLM_ASCEND names no checkout of vllm-ascend"
)
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
GENUINE = sorted(
    p.relative_to(MSMODELSLIM).as_posix() for p in MSMODELSLIM.glob("v?/*/*") if "sharded" not in p.name and p.is_dir()
)
MOE = Path(__file__).parents[1] / "vectors" / "architectures" / "qwen3_moe"


def prepared(name, folder):
    """A copy with the names and the config.json that vllm-ascend expects."""
    shutil.copytree(MSMODELSLIM / name, folder, copy_function=shutil.copyfile)
    for file in folder.glob("*.safetensors"):
        if not file.name.startswith("quant_model_weight"):
            file.unlink()  # activations that the tool recorded
    found = description(folder)
    if found.name != "quant_model_description.json":
        found.rename(folder / "quant_model_description.json")
    if not (folder / "config.json").exists():
        model = "qwen2_fp16" if "fp16" in name else "qwen2_bf16"
        shutil.copyfile(MSMODELSLIM / "models" / model / "config.json", folder / "config.json")
    return folder


def asked(*folders):
    """Return folder -> layer -> the parser's problems with it."""
    done = subprocess.run(
        [sys.executable, CHILD, CHECKOUT, *folders], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def rejected(layers):
    return {name: text for name, text in layers.items() if text not in ("", "FLOAT")}


def codes(folder):
    return {f.code for f in pq.validate(folder, target="vllm-ascend")}


@checkout
@needs_torch
@pytest.mark.slow
def test_genuine_folders(tmp_path):
    folders = {str(prepared(name, tmp_path / name)): name for name in GENUINE}
    wrong = []
    for folder, layers in asked(*folders).items():
        if bool(rejected(layers)) != bool(codes(folder) & SAME):
            wrong.append((folders[folder], list(rejected(layers).items())[:1], codes(folder)))
    assert len(folders) > 20 and not wrong


@checkout
@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("codec", ["w8a16", "w8a8.dynamic", "w4a8.dynamic"])
def test_folders_that_we_write(tmp_path, codec):
    pq.quantize(MSMODELSLIM / "models" / "qwen3_bf16", tmp_path / "m", to="msmodelslim", codec=codec)
    (layers,) = asked(tmp_path / "m").values()
    assert len(layers) >= 8 and set(layers.values()) > {"FLOAT"}
    assert bool(rejected(layers)) == bool(codes(tmp_path / "m") & SAME) == (codec == "w4a8.dynamic")


@checkout
@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("codec", ["w8a8.dynamic", "w8a16"])
def test_experts_that_we_write(tmp_path, codec):
    pq.quantize(MOE, tmp_path / "m", to="msmodelslim", codec=codec)
    edit_json(tmp_path / "m" / "config.json", lambda c: c.update(torch_dtype="bfloat16"))
    (layers,) = asked(tmp_path / "m").values()
    experts = {name: text for name, text in layers.items() if name.endswith(".experts")}
    assert experts and bool(rejected(experts)) == ("ASC071" in codes(tmp_path / "m")) == (codec == "w8a16")


@checkout
@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize(("types", "code"), [(["W8A16", "FLOAT"], "ASC076"), (["W8A8S", "W8A8S"], "ASC071")])
def test_changed_descriptions(tmp_path, types, code):
    folder = prepared("v1/bf16/w8a16", tmp_path / "m")
    names = [f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up")]
    edit_json(description(folder), lambda d: d.update(zip(names, types, strict=True)))
    (layers,) = asked(folder).values()
    assert set(rejected(layers)) == {"model.layers.0.mlp.gate_up_proj"} and code in codes(folder)


@checkout
def test_supported_types_are_those_of_the_registry():
    schemes = {"linear": set(), "moe": set()}
    for file in (CHECKOUT / "vllm_ascend" / "quantization" / "methods").glob("*.py"):
        for kind, layer in re.findall(r'^@register_scheme\("(\w+)", "(\w+)"\)', file.read_text(), re.M):
            schemes.setdefault(layer, set()).add(kind)
    known = TARGETS["vllm-ascend"]
    assert known.layers == schemes["linear"]
    assert known.experts == schemes["moe"] - {"W4A16"}  # of compressed-tensors only: int32 words


def test_the_documented_types_are_the_checked_ones():
    page = (Path(__file__).parents[2] / "docs" / "formats" / "msmodelslim.md").read_text()
    rows = re.findall(r"^\| (W\w+) \| (.+?) \| (.+?) \|$", page, re.M)
    known = TARGETS["vllm-ascend"]
    assert {kind for kind, layers, _ in rows if layers.startswith("from")} == known.layers
    assert {kind for kind, _, experts in rows if experts.startswith("from")} == known.experts
    until = {(kind, experts): words for kind, *both in rows for experts, words in enumerate(both) if " to " in words}
    assert {(kind, bool(experts)): words for (kind, experts), words in until.items()} == dict(known.former)


def test_a_type_that_only_releases_support_names_them(tmp_path):
    folder = prepared("v1/bf16/w4a8_dynamic", tmp_path / "m")
    found = [f.message for f in pq.validate(folder, target="vllm-ascend") if f.code == "ASC071"]
    assert found and all(m.endswith("layers outside experts (its releases 0.13 to 0.26 do)") for m in found)
