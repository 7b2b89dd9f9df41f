"""Embedding models: pooling converts in both directions; names of checkpoints with a head, or of early versions."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import polyquant
from architectures.golden_models import Golden
from polyquant.analysis.validate import validate
from polyquant.errors import PolyquantError
from polyquant.opening import open_checkpoint
from polyquant.types import Severity


@pytest.fixture
def bert(tmp_path):
    shutil.copytree(Golden("bert").folder, tmp_path / "bert")
    return tmp_path / "bert"


def pooled(folder, said):
    (folder / "1_Pooling/config.json").write_text(json.dumps(said))
    return folder


def gguf_of(folder):
    made = folder.parent / "model.gguf"
    polyquant.convert(folder, made, to="gguf", codec="f32", overwrite=True)
    return open_checkpoint(made)


@pytest.mark.parametrize(
    ("said", "number", "mode"),
    [
        ({"pooling_mode_mean_tokens": True}, 1, "mean_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, 2, "cls_token"),
        ({"pooling_mode": "lasttoken"}, 3, "lasttoken"),
    ],
)
def test_pooling_round_trips(bert, said, number, mode):
    assert gguf_of(pooled(bert, said)).metadata["bert.pooling_type"] == number
    back = bert.parent / "back"
    polyquant.convert(bert.parent / "model.gguf", back, to="hf")
    settings = json.loads((back / "1_Pooling/config.json").read_text())
    assert [k for k, v in settings.items() if v is True] == [f"pooling_mode_{mode}"]
    assert settings["word_embedding_dimension"] == 64
    assert [step["path"] for step in json.loads((back / "modules.json").read_text())] == ["", "1_Pooling"]
    assert not [f for f in validate(back) if f.severity is Severity.ERROR]
    assert gguf_of(back).metadata["bert.pooling_type"] == number


@pytest.mark.parametrize(
    "said",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
        {"pooling_mode": "max"},
        {},
        [],
    ],
)
def test_unsupported_pooling_is_refused(bert, said):
    with pytest.raises(PolyquantError, match="pooling"):
        gguf_of(pooled(bert, said))


def test_without_the_files_there_is_no_pooling(bert):
    (bert / "modules.json").unlink()
    found = gguf_of(bert)
    assert "bert.pooling_type" not in found.metadata and found.metadata["tokenizer.ggml.token_type_count"] == 2
    polyquant.convert(bert.parent / "model.gguf", bert.parent / "back", to="hf")
    assert not (bert.parent / "back/modules.json").exists()


def test_pooling_files_are_copied_and_removed_when_the_folder_is_replaced(bert):
    made = bert.parent / "made"
    polyquant.convert(bert, made, to="hf", codec="bf16")
    assert (made / "1_Pooling/config.json").read_bytes() == (bert / "1_Pooling/config.json").read_bytes()
    polyquant.convert(bert.parent / "bert", made, to="hf", codec="f32", overwrite=True)
    (bert / "modules.json").unlink()
    polyquant.convert(bert, made, to="hf", codec="f32", overwrite=True)
    assert not (made / "1_Pooling").exists()


def test_prefixed_and_legacy_tensor_names(bert):
    wanted = gguf_of(bert)
    tensors = load_file(bert / "model.safetensors")
    old = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    named = {}
    for name, values in tensors.items():
        for new, before in old.items():
            name = name.replace(new, before)
        named[f"bert.{name}"] = values
    named["cls.predictions.bias"] = np.zeros(4, np.float32)
    named["bert.embeddings.position_ids"] = np.arange(128)[None]
    save_file(named, bert / "model.safetensors", {"format": "pt"})
    found = gguf_of(bert)
    assert set(found) == set(wanted) and "pooler.dense.weight" in tensors
    for name in wanted:
        np.testing.assert_array_equal(found[name].dequantize(), wanted[name].dequantize(), err_msg=name)


def test_the_pooler_is_dropped_with_a_reason_in_both_directions(bert):
    there = polyquant.plan(bert, to="gguf", codec="f32")
    assert any("pooler" in line for line in str(there).splitlines())
    gguf_of(bert)
    back = polyquant.plan(bert.parent / "model.gguf", to="hf")
    assert any("add_pooling_layer=False" in w for w in back.warnings)
