"""The layout of a Trellis v3 folder: names, sizes, shards, metadata, and the slots for the errors."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyquant as pq
from polyquant.errors import PlanError
from polyquant.formats.trellis.config import MSE_BYTES, Origin, mse_text
from polyquant.formats.trellis.layout import lay_out
from polyquant.storage.safetensors import read_header
from polyquant.storage.source import Source
from polyquant.types import Layout, TensorSpec

CONFIG = {"config.json": b'{"model_type": "llama"}'}


def spec(name: str, shape: tuple[int, ...], codec: str = "trellis.3") -> TensorSpec:
    return TensorSpec(name, shape, pq.codec(codec))


def laid(tensors: list[TensorSpec], **options: object) -> Layout:
    origins = {t.name: Origin(2 * math.prod(t.shape), "bf16") for t in tensors if t.codec.name.startswith("trellis")}
    return lay_out(tensors, CONFIG, **{"origins": origins, **options})  # type: ignore[arg-type]


def content(layout: Layout, name: str) -> bytes:
    """A file of a layout with no payload: zeros where it would be, mse as 7."""
    plan = next(f for f in layout.files if f.name == name)
    image = bytearray(plan.size)
    for offset, data in plan.pieces:
        image[offset : offset + len(data)] = data
    for (_, part), slot in layout.slots.items():
        if part == "mse" and slot.file == name:
            image[slot.offset : slot.offset + MSE_BYTES] = mse_text(7)
    return bytes(image)


def read(layout: Layout, name: str) -> dict[str, object]:
    return json.loads(content(layout, name))


MODEL = [
    spec("model.embed_tokens.weight", (40, 32), "bf16"),
    spec("model.layers.0.mlp.up_proj.weight", (64, 32)),
    spec("model.layers.0.mlp.down_proj.weight", (32, 64), "trellis.4.mul1.16"),
    spec("model.layers.1.mlp.up_proj.weight", (17, 33)),
    spec("model.norm.weight", (32,), "f32"),
]


def test_every_field_of_the_metadata():
    found = read(laid(MODEL), "quantization_config.json")
    components = {
        "up": 2 * 4 * 96 + 4 * (64 + 32 + 64), "down": 4 * 2 * 128 + 4 * (32 + 64 + 32),
        "odd": 3 * 2 * 96 + 4 * (17 + 33 + 17),
    }  # fmt: skip
    average = 8 * sum(components.values()) / (2 * 64 * 32 + 17 * 33)
    assert found == {
        "quantization_version": "trellis_v3",
        "quantization_method": "trellis_viterbi",
        "global_config": {
            "average_bits_per_weight": round(average, 6),
            "target_bits": 3,
            "hadamard_transform": True,
            "tile_size": 16,
            "codebook_size": 16384,
            "scale_groups": "per_tensor",
            "codebook": {"type": "mul1", "window_bits": 14, "tile_order": "row_major"},
        },
        "tensor_metadata": {
            "model.layers.0.mlp.up_proj.weight": {
                "bits": 3, "shape": [32, 64], "mse": 7.0, "original_bytes": 4096, "original_dtype": "bf16",
                "compressed_bytes": components["up"], "compression_ratio": round(4096 / components["up"], 4),
                "hadamard": [32, 64],
            },
            "model.layers.0.mlp.down_proj.weight": {
                "bits": 4, "shape": [64, 32], "mse": 7.0, "original_bytes": 4096, "original_dtype": "bf16",
                "compressed_bytes": components["down"], "compression_ratio": round(4096 / components["down"], 4),
                "hadamard": [64, 32],
                "codebook": {"type": "mul1", "window_bits": 16, "tile_order": "row_major"},
            },
            "model.layers.1.mlp.up_proj.weight": {
                "bits": 3, "shape": [33, 17], "mse": 7.0, "original_bytes": 1122, "original_dtype": "bf16",
                "compressed_bytes": components["odd"], "compression_ratio": round(1122 / components["odd"], 4),
                "hadamard": [1, 1],
            },
        },
        "layer_allocation": {"0": {"mlp.up_proj": 3, "mlp.down_proj": 4}, "1": {"mlp.up_proj": 3}},
    }  # fmt: skip


def test_index_and_config():
    layout = laid(MODEL)
    index = read(layout, "model.safetensors.index.json")
    total = sum(s.spec.nbytes for (_, part), s in layout.slots.items() if part != "mse")
    assert index["metadata"]["total_size"] == total
    assert index["metadata"]["format"] == "trellis_v3"
    assert set(index["metadata"]["quantization"]) == {"bits_per_weight", "method", "hadamard_transform"}
    assert index["weight_map"]["model.layers.0.mlp.up_proj.weight.su"] == "model-00001-of-00001.safetensors"
    assert len(index["weight_map"]) == 2 + 3 * 4
    config = read(layout, "config.json")
    assert config["model_type"] == "llama"
    assert config["quantization_config"]["quant_method"] == "polyquant_trellis"


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90), st.sampled_from(["trellis.2", "trellis.8.grid", "f32"])),
        min_size=1, max_size=12),
    st.integers(1, 40_000),
)  # fmt: skip
def test_no_shard_exceeds_the_limit_unless_one_component_does(tmp_path_factory, shapes, limit):
    tensors = [spec(f"model.layers.{i}.up.weight", (n, k), c) for i, (n, k, c) in enumerate(shapes)]
    tensors.append(spec("model.layers.99.up.weight", (16, 16)))
    layout = laid(tensors, shard_bytes=limit)
    shards = [f for f in layout.files if f.name.endswith(".safetensors")]
    weight_map = read(layout, "model.safetensors.index.json")["weight_map"]
    assert [f.name for f in shards] == [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    folder = tmp_path_factory.mktemp("shards")
    for f in shards:
        (folder / f.name).write_bytes(content(layout, f.name))
        entries = read_header(Source(folder / f.name)).entries
        assert {n for n, home in weight_map.items() if home == f.name} == set(entries)
        assert f.size <= limit or len(entries) == 1
    for t in tensors:
        homes = {weight_map[n] for n in weight_map if n.startswith(f"{t.name}.") or n == t.name}
        stored = sum(s.nbytes for s in t.codec.specs(t.shape).values())
        assert len(homes) == 1 or stored + 1024 > limit


@pytest.mark.parametrize("mse", [0, 1e-300, 1.23456789e-4, 3.0, 1e38, 9.999999999e-5])
def test_errors_are_json_numbers_of_fixed_width(mse):
    text = mse_text(mse)
    assert len(text) == MSE_BYTES
    assert json.loads(text) == pytest.approx(mse, rel=1e-8, abs=1e-98)


def test_known_errors_are_written_and_others_reserved():
    origins = {t.name: Origin(64, "bf16", 0.25 if "down" in t.name else None) for t in MODEL}
    layout = laid(MODEL, origins=origins)
    assert sorted(t for t, part in layout.slots if part == "mse") == [MODEL[1].name, MODEL[3].name]
    entries = read(layout, "quantization_config.json")["tensor_metadata"]
    assert [entries[MODEL[i].name]["mse"] for i in (1, 2, 3)] == [7.0, 0.25, 7.0]


@pytest.mark.parametrize(
    "tensors, what",
    [
        ([spec("a.weight", (32, 32), "bf16")], "no weight would be quantized"),
        ([spec("a.weight", (32, 32)), spec("a.weight.su", (4,), "f32")], "have the same name"),
        ([spec("a.weight", (32, 32)), spec("b.weight", (32, 256), "q4_k")], "cannot store q4_k"),
    ],
)
def test_unsupported_tensors_are_refused(tensors, what):
    with pytest.raises(PlanError, match=what):
        laid(tensors)


def test_two_stacks_of_layers_share_the_allocation():
    names = ["model.layers.0.fc.weight", "vision.layers.0.fc.weight", "model.layers.10.fc.weight", "other.weight"]
    found = read(laid([spec(n, (16, 16), f"trellis.{i + 2}") for i, n in enumerate(names)]), "quantization_config.json")
    assert found["layer_allocation"] == {"0": {"fc": 2, "vision.layers.0.fc.weight": 3}, "10": {"fc": 4}}


def test_the_same_input_gives_the_same_bytes():
    assert laid(MODEL, shard_bytes=5000) == laid(MODEL, shard_bytes=5000)


def test_names_that_look_like_an_error_placeholder_are_safe():
    name = 'model.layers.0."mse": 10000000000001.weight'
    layout = laid([spec(name, (16, 16)), spec("b.weight", (16, 16))])
    entries = read(layout, "quantization_config.json")["tensor_metadata"]
    assert [e["mse"] for e in entries.values()] == [7.0, 7.0]
    assert np.all([e["original_bytes"] == 512 for e in entries.values()])
