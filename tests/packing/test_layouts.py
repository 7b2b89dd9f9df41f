"""OCI image layouts.

Sources: image-layout.md and manifest.md of opencontainers/image-spec; docs/spec.md and schema/config-schema.json of
modelpack/model-spec d78bf32; pkg/distribution/types/config.go of docker/model-runner 642c721.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import polyquant as pq
from golden import VECTORS

FOLDER = VECTORS / "models/tiny-llama-untied/hf"
CNCF, DOCKER = "application/vnd.cncf.model.", "application/vnd.docker.ai."
CONFIG_KEYS = {
    "descriptor": {"name", "version", "family"},
    "config": {"format", "paramSize", "quantization"},
    "modelfs": {"type", "diffIds"},
}
"""Of config-schema.json, whose objects allow no others than those it lists."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    pq.convert(FOLDER, folder / "m.gguf")
    pq.convert(FOLDER, folder / "s.gguf", shard_bytes=400_000)
    return folder


def checked(layout: Path, tag: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest and the config of a tag; every digest, size and name is computed independently."""
    assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((layout / "index.json").read_text())
    assert index["schemaVersion"] == 2 and index["mediaType"] == "application/vnd.oci.image.index.v1+json"
    (entry,) = [m for m in index["manifests"] if m["annotations"]["org.opencontainers.image.ref.name"] == tag]

    def content(descriptor: dict[str, Any]) -> bytes:
        algorithm, digits = descriptor["digest"].split(":")
        data = (layout / "blobs" / algorithm / digits).read_bytes()
        assert (algorithm, hashlib.sha256(data).hexdigest(), len(data)) == ("sha256", digits, descriptor["size"])
        return data

    assert entry["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    manifest = json.loads(content(entry))
    assert manifest["mediaType"] == entry["mediaType"] and manifest["schemaVersion"] == 2
    for layer in manifest["layers"]:
        content(layer)
    return manifest, json.loads(content(manifest["config"]))


def named(manifest: dict[str, Any]) -> dict[str, str]:
    return {layer["annotations"]["org.cncf.model.filepath"]: layer["mediaType"] for layer in manifest["layers"]}


def test_gguf(models, tmp_path):
    done = pq.pack(models / "m.gguf", oci=tmp_path / "l", name="tiny:q1")
    manifest, config = checked(tmp_path / "l", "q1")
    assert manifest["artifactType"] == CNCF + "manifest.v1+json"
    assert manifest["config"]["mediaType"] == CNCF + "config.v1+json"
    assert named(manifest) == {"m.gguf": CNCF + "weight.v1.raw"}
    assert {key: set(value) for key, value in config.items()} == CONFIG_KEYS
    assert config["modelfs"] == {"type": "layers", "diffIds": [manifest["layers"][0]["digest"]]}
    assert config["config"] == {"format": "gguf", "paramSize": "1M", "quantization": "BF16"}
    assert re.fullmatch(r"\d+(\.\d)?[QTBMK]", config["config"]["paramSize"])
    assert done.reference == f"oci:{tmp_path / 'l'}:q1"
    opened = pq.open(done.reference)
    assert str(opened.path) == f"oci:{tmp_path / 'l'}:q1/m.gguf" and opened.path.name == "m.gguf"
    assert pq.inspect(f"oci:{tmp_path / 'l'}").store["tag"] == "q1"


def test_split_model_stays_split(models, tmp_path):
    pq.pack(models / "s-00001-of-00006.gguf", oci=tmp_path / "l", name="tiny")
    manifest, _ = checked(tmp_path / "l", "latest")
    assert list(named(manifest)) == [f"s-0000{i}-of-00006.gguf" for i in range(1, 7)]
    pq.convert(f"oci:{tmp_path / 'l'}", tmp_path / "joined.gguf")
    assert (tmp_path / "joined.gguf").read_bytes() == (models / "m.gguf").read_bytes()
    pq.pack(f"oci:{tmp_path / 'l'}:latest", ollama=tmp_path / "o", name="tiny", host="h")
    pq.pack(models / "m.gguf", ollama=tmp_path / "o", name="whole")
    assert len([p for p in (tmp_path / "o/blobs").iterdir() if p.stat().st_size > 10_000]) == 1


@pytest.mark.parametrize("types", ["cncf", "docker"])
def test_folder(models, tmp_path, types):
    pq.pack(FOLDER, oci=tmp_path / "l", name="tiny", media_types=types)
    manifest, config = checked(tmp_path / "l", "latest")
    assert set(named(manifest)) == {p.name for p in FOLDER.iterdir()}
    kinds = named(manifest)
    if types == "cncf":
        assert kinds["model.safetensors"] == CNCF + "weight.v1.raw"
        assert kinds["tokenizer.json"] == CNCF + "weight.config.v1.raw"
        assert config["config"]["format"] == "safetensors" and config["descriptor"]["family"] == "llama"
    else:
        assert "artifactType" not in manifest
        assert manifest["config"]["mediaType"] == DOCKER + "model.config.v0.2+json"
        assert kinds["model.safetensors"] == DOCKER + "safetensors" and kinds["config.json"] == DOCKER + "model.file"
        assert config["rootfs"]["type"] == "rootfs" and config["config"]["architecture"] == "llama"
    packed, source = pq.open(f"oci:{tmp_path / 'l'}"), pq.open(FOLDER)
    assert packed.config == source.config and list(packed) == list(source)
    assert pq.checksum(f"oci:{tmp_path / 'l'}").content == pq.checksum(FOLDER).content
    assert pq.checksum(f"oci:{tmp_path / 'l'}").files == pq.checksum(FOLDER).files
    assert not pq.validate(f"oci:{tmp_path / 'l'}")
    logits = [pq.load(p).logits([1, 2, 3]) for p in (FOLDER, f"oci:{tmp_path / 'l'}:latest")]
    assert (logits[0] == logits[1]).all()


def test_names_of_docker_gguf_and_of_documents(models, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in FOLDER.iterdir():
        shutil.copyfile(path, folder / path.name)
    (folder / "README.md").write_text("read")
    (folder / "LICENSE").write_text("MIT")
    (folder / ".hidden").write_text("x")
    (folder / "extra").mkdir()
    (folder / "extra/notes.json").write_text("{}")
    pq.pack(folder, oci=tmp_path / "l", name="a", media_types="docker")
    kinds = named(checked(tmp_path / "l", "latest")[0])
    assert kinds["LICENSE"] == DOCKER + "license" and kinds["extra/notes.json"] == DOCKER + "model.file"
    assert ".hidden" not in kinds
    pq.pack(folder, oci=tmp_path / "l", name="a:cncf")
    assert named(checked(tmp_path / "l", "cncf")[0])["README.md"] == CNCF + "doc.v1.raw"
    pq.pack(models / "m.gguf", oci=tmp_path / "l", name="b:gguf", media_types="docker")
    manifest, config = checked(tmp_path / "l", "gguf")
    assert named(manifest) == {"m.gguf": DOCKER + "gguf.v3"}
    assert manifest["config"]["mediaType"] == DOCKER + "model.config.v0.1+json"
    assert config["config"]["quantization"] == "BF16"
    (folder / "passwd.json").symlink_to("/etc/passwd")
    with pytest.raises(pq.InputError, match="is a link that leaves the folder"):
        pq.pack(folder, oci=tmp_path / "l", name="a:link")
    assert [s.name for s in pq.stored(oci=tmp_path / "l")] == ["latest", "cncf", "gguf"]


def test_tags(models, tmp_path):
    layout = tmp_path / "l"
    pq.pack(models / "m.gguf", oci=layout, name="tiny:a")
    index = json.loads((layout / "index.json").read_text())
    index["annotations"] = {"kept": "yes"}
    (layout / "index.json").write_text(json.dumps(index))
    with pytest.raises(pq.PlanError, match="has a model with the tag a"):
        pq.pack(FOLDER, oci=layout, name="tiny:a")
    pq.pack(FOLDER, oci=layout, name="tiny:b")
    pq.pack(FOLDER, oci=layout, name="tiny:a", overwrite=True)
    index = json.loads((layout / "index.json").read_text())
    assert index["annotations"] == {"kept": "yes"} and len(index["manifests"]) == 2
    with pytest.raises(pq.InputError, match="the layout has several models"):
        pq.open(f"oci:{layout}")
    with pytest.raises(pq.InputError, match="no model has the tag 'c'"):
        pq.open(f"oci:{layout}:c")
    with pytest.raises(pq.InputError, match="is not an OCI image layout"):
        pq.open(f"oci:{tmp_path}")
    with pytest.raises(pq.PlanError, match="system applies to Ollama's store only"):
        pq.pack(FOLDER, oci=layout, name="x", system="x")
    with pytest.raises(pq.PlanError, match="has no host and no namespace"):
        pq.pack(FOLDER, oci=layout, name="me/x")
    with pytest.raises(pq.PlanError, match="is not an OCI image layout"):
        pq.pack(FOLDER, oci=models, name="x")
    with pytest.raises(pq.PlanError, match="exactly one store is needed"):
        pq.pack(FOLDER, name="x")
