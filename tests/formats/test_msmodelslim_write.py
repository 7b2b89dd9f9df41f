"""Layouts of msModelSlim folders: original headers, description and index from the tensors, byte for byte."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from formats.msmodelslim_folders import MSMODELSLIM
from polyquant.errors import PlanError
from polyquant.formats.msmodelslim.layout import lay_out
from polyquant.formats.msmodelslim.open import open as open_folder
from polyquant.registry import codec
from polyquant.types import Checkpoint, Layout, TensorSpec

FOLDERS = sorted(p.relative_to(MSMODELSLIM).as_posix() for p in MSMODELSLIM.glob("v[01]/*/*"))
CONFIG = {"config.json": b'{"torch_dtype": "bfloat16"}'}


def specs(checkpoint: Checkpoint) -> list[TensorSpec]:
    found = [TensorSpec(w.name, w.shape, w.codec) for w in checkpoint.values()]
    random.Random(7).shuffle(found)  # the order comes from the names
    return found


def first_bytes(layout: Layout) -> dict[str, bytes]:
    """The first bytes of each file, which are known before any payload."""
    return {f.name: f.pieces[0][1] for f in layout.files}


def said(layout: Layout, name: str = "quant_model_description.json") -> dict[str, object]:
    return json.loads(first_bytes(layout)[name])


@pytest.mark.parametrize("name", FOLDERS)
def test_headers_description_and_index_equal_genuine_ones(name):
    folder = MSMODELSLIM / name
    dialect = "v1" if name.startswith("v1") else "ascendv1" if "ascendv1" in name else "v0"
    sharded = 96 << 10 if "sharded" in name else 4_000_000_000
    layout = lay_out(specs(open_folder(folder)), {}, dialect=dialect, shard_bytes=sharded)
    genuine = {p.name: p.read_bytes() for p in folder.glob("quant_model_*")}
    found = first_bytes(layout)
    assert set(found) == set(genuine)
    for file, content in genuine.items():
        header = 8 + int.from_bytes(content[:8], "little") if file.endswith(".safetensors") else len(content)
        assert found[file] == content[:header], file
    assert {f.name: f.size for f in layout.files} == {n: len(b) for n, b in genuine.items()}


@pytest.mark.parametrize(
    "dialect, weights, description",
    [
        ("v1", "quant_model_weights.safetensors", "quant_model_description.json"),
        ("ascendv1", "quant_model_weight.safetensors", "quant_model_description.json"),
        ("v0", "quant_model_weight_w8a8_dynamic.safetensors", "quant_model_description_w8a8_dynamic.json"),
    ],
)
def test_names_of_files(dialect, weights, description):
    layout = lay_out([TensorSpec("a.q_proj.weight", (4, 8), codec("w8a8.dynamic"))], CONFIG, dialect=dialect)
    assert [f.name for f in layout.files] == [weights, "config.json", description]


def test_model_quant_type_is_the_highest_ranked_type():
    kinds = ("w8a16", "w8a8.dynamic", "w8a8", "f16")
    mixed = [TensorSpec(f"layers.{i}.q_proj.weight", (4, 8), codec(k)) for i, k in enumerate(kinds)]
    assert said(lay_out(mixed, {}))["model_quant_type"] == "W8A8"
    assert said(lay_out(mixed[3:], {}))["model_quant_type"] == "FLOAT"


def test_the_group_size_is_written_by_dialect():
    weight = [TensorSpec("a.weight", (4, 64), codec("w8a16.g32"))]
    assert said(lay_out(weight, {}))["group_size"] == 32
    assert said(lay_out(weight, {}, dialect="ascendv1"))["group_size"] == 32
    v0 = lay_out(weight, {}, dialect="v0")
    assert "group_size" not in said(v0, "quant_model_description_w8a16.json")


def test_layers_are_in_numerical_order():
    layout = lay_out(
        [TensorSpec(f"model.layers.{i}.mlp.up_proj.weight", (4, 8), codec("bf16")) for i in (10, 9, 2)], {}
    )
    assert [n for n in said(layout) if "." in n] == [f"model.layers.{i}.mlp.up_proj.weight" for i in (2, 9, 10)]


def test_unknown_types_and_global_keys_are_kept():
    layout = lay_out(
        [TensorSpec("a.weight", (4, 8), codec("i8")), TensorSpec("b.weight", (4, 8), codec("w8a16"))],
        {},
        words={"a.weight": "W2A2_SOON"},
        carried={"metadata": {"quarot": 1}, "fa_quant_type": "FAQuant", "version": "0.1", "model_quant_type": "W8A8"},
    )
    found = said(layout)
    assert found["a.weight"] == "W2A2_SOON" and found["metadata"] == {"quarot": 1}
    assert found["fa_quant_type"] == "FAQuant" and found["version"] == "1.0.0" and found["model_quant_type"] == "W8A16"


def test_a_cache_may_be_declared_without_scales():
    layout = lay_out([TensorSpec("a.weight", (4, 8), codec("w8a16"))], {}, kv=True)
    assert said(layout)["kv_cache_type"] == said(layout)["kv_quant_type"] == "C8"


def test_config_has_no_quantization():
    config = {
        "hidden_size": 8,
        "quantization_config": {"bits": 4},
        "transformers_weights": "x",
        "text_config": {"vocab_size": 3, "quantization_config": {}},
    }
    layout = lay_out([TensorSpec("a.weight", (4, 8), codec("w8a16"))], {"config.json": json.dumps(config).encode()})
    assert said(layout, "config.json") == {"hidden_size": 8, "text_config": {"vocab_size": 3}}


def test_a_config_without_quantization_is_unchanged():
    layout = lay_out([TensorSpec("a.weight", (4, 8), codec("w8a16"))], CONFIG)
    assert first_bytes(layout)["config.json"] == CONFIG["config.json"]


@pytest.mark.parametrize(
    "tensors, files, options, what",
    [
        ([("a.weight", "w8a16")], {}, {"dialect": "v2"}, "unknown dialect"),
        ([("a.weight", "q8_0")], {}, {}, "cannot store q8_0"),
        ([("a.matrix", "w8a16")], {}, {}, r"only tensors named \*.weight"),
        ([("a.weight", "w8a16"), ("a.weight_scale", "f32")], {}, {}, "have the same name"),
        ([("a.weight", "w8a16")], {"quant_model_description.json": b"{}"}, {}, "unique name"),
        ([("a.weight", "w8a16")], {"../config": b"{}"}, {}, "plain, unique name"),
    ],
)
def test_unsupported_tensors_are_refused(tensors, files, options, what):
    with pytest.raises(PlanError, match=what):
        lay_out([TensorSpec(n, (32, 32), codec(c)) for n, c in tensors], files, **options)


def test_shards_stay_below_the_limit():
    many = [TensorSpec(f"layers.{i}.weight", (16, 64), codec("w8a16")) for i in range(20)]
    layout = lay_out(many, {}, shard_bytes=5000)
    shards = [Path(f.name).name for f in layout.files if f.name.endswith(".safetensors")]
    assert shards[0] == f"quant_model_weights-00001-of-{len(shards):05}.safetensors" and len(shards) > 4
    index = said(layout, "quant_model_weights.safetensors.index.json")
    assert set(index["weight_map"]) == {n for n in said(layout) if "." in n}
    used = dict.fromkeys(shards, 0)
    for slot in layout.slots.values():
        used[slot.file] += slot.spec.nbytes
    assert max(used.values()) < 5000
