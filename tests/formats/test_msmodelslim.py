"""msModelSlim folders as the tool wrote them: every dialect opens, every layer decodes, and no finding is reported."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import polyquant
from format_modules import msmodelslim
from formats.msmodelslim_folders import FOLDERS, MSMODELSLIM, copy, description, edit_json, edit_tensors, load, shards
from polyquant.codecs.msmodelslim import MsModelSlim
from polyquant.errors import InputError
from polyquant.formats.msmodelslim import static
from polyquant.formats.msmodelslim.description import parse
from polyquant.formats.msmodelslim.infer import Facts, codec_for
from polyquant.ops import int8
from polyquant.types import Severity

DOWN = "model.layers.1.mlp.down_proj.weight"
CODECS = {
    "chatglm2/msmodelslim_from_int4": "w8a16.f16", "v0/bf16/w8a16_asym": "w8a16.bf16", "v0/fp16/w8a16_g32": "w8a16.g32",
    "v0/fp16/w4a16_g32": "w4a16.g32", "v0/fp16/ascendv1_w4a16_packed": "w4a16.f16.pack_k",
    "v0/fp16/ascendv1_w4a16_g32_packed": "w4a16.g32.pack_n", "v0/fp16/ascendv1_w8a8_mix": "w8a8.mix.f16.i64",
    "v0/fp16/w8a8_per_tensor": "w8a8.tensor.f16.i64.scales", "v0/fp16/w8a8s": "w8a8s.f16.i64",
    "v0/bf16/w8a8s": "w8a8s.bf16",
    "v0/fp16/w8a8_c8_sharded": "w8a8.f16.i64.scales", "v1/bf16/w8a8_static": "w8a8", "v1/bf16/w8a16": "w8a16",
    "v1/fp32/w8a8_smoothasym_c8": "w8a8.i64", "v0/bf16/w8a8_dynamic": "w8a8.dynamic.bf16",
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_genuine_folders_open_and_every_byte_is_used(name):
    folder = MSMODELSLIM / name
    found, tensors = polyquant.open(folder), load(folder)
    types = json.loads(description(folder).read_text())
    seen = {}
    for w in found.values():
        layer = w.name.removesuffix(".weight")
        quantized = isinstance(w.codec, MsModelSlim)
        seen |= {f"{layer}.{part}": a for part, a in w.parts.items()} if quantized else {w.name: w.parts["blocks"]}
        assert types[w.name] == w.codec.word if quantized else w.codec.name in ("f32", "f16", "bf16")
    assert seen.keys() == tensors.keys()
    for tensor, array in tensors.items():
        assert np.array_equal(np.asarray(seen[tensor]).view(np.uint8).ravel(), array.view(np.uint8).ravel())
    assert found.format == "msmodelslim"
    assert found.metadata["types"] == {k: v for k, v in types.items() if k in tensors}
    assert {k: v for k, v in found.metadata.items() if k != "types"} == {
        k: v for k, v in types.items() if k not in tensors
    }


@pytest.mark.parametrize("name", FOLDERS)
def test_output_of_the_tool_has_no_findings(name):
    found = polyquant.validate(MSMODELSLIM / name)
    assert [str(f) for f in found if f.severity is not Severity.NOTE] == []
    assert {f.code for f in found} <= {"ASC001", "ASC017"}  # no config.json, no tokenizer


@pytest.mark.parametrize("name", [n for n in FOLDERS if re.search("w8a8(?!_dynamic)", n)])
def test_static_layers_are_recomputed_exactly(name):
    found = polyquant.open(MSMODELSLIM / name)
    layers = [w for w in found.values() if isinstance(w.codec, MsModelSlim) and w.codec.static]
    assert layers
    for w in layers:
        codes = w.codec.unpack(w.parts, w.shape)
        act, bias = codes.activation, found.get(w.name.replace(".weight", ".bias"))
        if "weight_scale" in w.parts:
            scale = np.asarray(w.parts["weight_scale"], np.float32).reshape(-1)
            assert np.array_equal(static.closest_deq_scale(act.scale, scale, act.deq_scale), act.deq_scale)
        sums = codes.codes.sum(1, dtype=np.int64)
        own = bias.dequantize() if bias is not None else None
        assert np.array_equal(int8.quant_bias(own, act.deq_scale, act.offset, sums), act.quant_bias)


@pytest.mark.parametrize(("name", "codec"), CODECS.items())
def test_codecs_follow_from_shapes(name, codec):
    found = {w.codec.name for w in polyquant.open(MSMODELSLIM / name).values() if isinstance(w.codec, MsModelSlim)}
    assert found == {codec}


@pytest.mark.parametrize("name", FOLDERS)
def test_dialects(name):
    dialect = polyquant.open(MSMODELSLIM / name).dialect
    assert dialect.name == ("v1" if name.startswith("v1") else "ascendv1" if "ascendv1" in name else "v0")
    assert dialect.why


def test_notes_list_float_layers_cache_and_smoothing():
    notes = "; ".join(polyquant.open(MSMODELSLIM / "v1/fp32/w8a8_smoothasym_c8").notes)
    assert "1 linear layer left float: model.layers.1.mlp.down_proj" in notes
    assert "(C8) in 2 layers" in notes
    assert "4 norms have a bias" in notes
    assert "5 with a copy norm.module" in "; ".join(polyquant.open(MSMODELSLIM / "v0/fp16/w8a8_m1").notes)


def test_unknown_types_are_kept_and_reported(tmp_path):
    folder = copy("v0/fp16/w8a16", tmp_path)
    ours = [f"{DOWN}{end}" for end in ("", "_scale", "_offset")]
    edit_json(description(folder), lambda d: d.update(dict.fromkeys(ours, "W3A5_NEXT")))
    found = polyquant.open(folder)
    assert [str(found[n].codec) for n in ours] == ["i8", "f16", "f16"]
    assert any("unknown type 'W3A5_NEXT': 3 tensors" in n for n in found.notes)
    assert [f.code for f in polyquant.validate(folder) if f.severity is Severity.WARNING] == ["ASC015"]


def test_the_documents_example_parses_without_its_comments():
    seed = Path(__file__).with_name("msmodelslim_document.txt").read_text()
    clean = re.sub(r"^(#|//|\.\.\.).*$|#.*$", "", seed, flags=re.M)
    found = parse(re.sub(r",\s*}", "}", clean).encode())
    assert found.general == {"model_quant_type": "W8A16", "kv_cache_type": "C8"}
    assert found.types["transformer.encoder.layers.0.self_attention.query_key_value.k_proj.kv_cache_scale"] == "W8A16"
    with pytest.raises(InputError, match="not valid JSON"):
        parse(seed.encode())


def document_folder(tmp_path: Path) -> Path:
    """The form of the specification: its file names, the layer's type on norms and cache, scales [n] in float32."""
    folder = copy("chatglm2/msmodelslim_from_int8", tmp_path)
    shards(folder)[0].rename(folder / "quant_model_weight.safetensors")
    description(folder).rename(folder / "quant_model_description.json")
    said = {}

    def change(tensors):
        for n in list(tensors):
            if n.endswith(("weight_scale", "weight_offset")):
                tensors[n] = tensors[n].astype(np.float32)[:, 0]
        for i in (0, 1):
            base = f"transformer.encoder.layers.{i}."
            said[f"{base}input_layernorm.weight"] = "W8A16"
            for side in "kv":
                for part, fill in (("scale", 0.1), ("offset", 0)):
                    name = f"{base}self_attention.query_key_value.{side}_proj.kv_cache_{part}"
                    tensors[name], said[name] = np.full(32, fill, np.float32), "W8A16"

    edit_tensors(folder, change)
    edit_json(description(folder), lambda d: d.update(said, kv_cache_type="C8"))
    return folder


def test_a_folder_of_the_document(tmp_path):
    folder = document_folder(tmp_path)
    found = polyquant.open(folder)
    assert {w.codec.name for w in found.values() if isinstance(w.codec, MsModelSlim)} == {"w8a16.flat"}
    assert found["transformer.encoder.layers.0.input_layernorm.weight"].codec.name == "f16"
    assert [str(f) for f in polyquant.validate(folder) if f.severity is not Severity.NOTE] == []


def test_weights_under_a_different_name(tmp_path):
    folder = copy("v1/bf16/w8a16", tmp_path)
    shards(folder)[0].rename(folder / "model.safetensors")
    assert "the weights are named model.safetensors" in polyquant.open(folder).notes


def test_group_size_of_packed_codes():
    def shape(*size, dtype="I8"):
        return Facts(dtype, size)

    parts = {
        "weight": shape(8, 16),
        "weight_scale": shape(8, 2, dtype="F32"),
        "weight_offset": shape(8, 2, dtype="F32"),
    }
    assert codec_for("w4a16", parts, group_size=16)[0].name == "w4a16.g16.pack_k"
    assert codec_for("w4a16", parts, group_size=8)[0].name == "w4a16.g8"
    assert codec_for("w4a16", parts, packed=True)[0].name == "w4a16.g16.pack_k"
    assert codec_for("w4a16", {**parts, "weight": shape(4, 16)})[1] == (8, 16)


def test_a_folder_is_recognised_before_other_formats():
    evidence = msmodelslim.sniff(MSMODELSLIM / "v1/bf16/w8a16")
    assert evidence.why == "folder with quant_model_description.json"
    assert msmodelslim.sniff(MSMODELSLIM / "models/qwen2_fp16") is None


def test_inspect_has_a_table_of_types():
    found = polyquant.inspect(MSMODELSLIM / "v0/fp16/w8a8_m4_fallback")
    assert found.layers.columns == ("q", "k", "v", "o", "gate", "up", "down")
    assert found.layers.rows == (("0", ("W8A8",) * 7), ("1", ("W8A8",) * 6 + ("FLOAT",)))
    assert found.to_json()["layers"][1]["down"] == "FLOAT"


def test_compare_with_the_float_model():
    figures = polyquant.compare(MSMODELSLIM / "models/qwen2_fp16", MSMODELSLIM / "v0/fp16/w8a16")
    assert not figures.only_a
    assert not figures.only_b
    assert 50 < figures.error.snr < 60
