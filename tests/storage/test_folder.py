"""Names inside folders, and the files of embedding models."""

import json

import pytest

from polyquant.errors import InputError
from polyquant.storage.folder import LeavesFolderError, inner_name, pooling_files


@pytest.mark.parametrize("name", ["model.safetensors", "1_Pooling/config.json"])
def test_valid_names(name):
    assert inner_name(name)


@pytest.mark.parametrize("name", ["", "/", "/etc", "a/", "../a", "a/..", "a/b/c", "a\\b", "C:a", "a\nb", None, 3])
def test_invalid_names(name):
    assert not inner_name(name)


def modules(folder, *paths):
    steps = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (path, kind) in enumerate(paths)
    ]
    (folder / "modules.json").write_text(json.dumps(steps))


def test_the_pooling_of_an_embedding_model_is_found(tmp_path):
    assert pooling_files(tmp_path) == {}
    modules(tmp_path, ("", "Transformer"), ("2_Mean", "Pooling"))
    (tmp_path / "2_Mean").mkdir()
    assert set(pooling_files(tmp_path)) == {"modules.json"}
    (tmp_path / "2_Mean/config.json").write_text("{}")
    assert pooling_files(tmp_path)["2_Mean/config.json"] == tmp_path / "2_Mean/config.json"
    modules(tmp_path, ("", "Transformer"))
    assert set(pooling_files(tmp_path)) == {"modules.json"}


@pytest.mark.parametrize("path", ["../other", "/etc", "a/b", ".."])
def test_a_pooling_outside_the_folder_is_refused(tmp_path, path):
    modules(tmp_path, (path, "Pooling"))
    with pytest.raises(LeavesFolderError):
        pooling_files(tmp_path)


@pytest.mark.parametrize(
    "content", ["{}", '[{"type": "Pooling", "path": 3}]', '[{"type": "Pooling", "path": "none"}]', "["]
)
def test_an_invalid_modules_json_is_refused(tmp_path, content):
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(InputError):
        pooling_files(tmp_path)
