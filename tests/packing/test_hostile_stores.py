"""Stores that anyone may have made: one line, no traceback, no file outside the store is opened."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest

import polyquant as pq
from polyquant.storage.stores.names import parse_name

KEY = b"general.architecture"
MODEL = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(KEY)) + KEY + struct.pack("<IQ", 8, 4) + b"test"
DIGEST = "sha256:" + hashlib.sha256(MODEL).hexdigest()
LAYER = {"mediaType": "application/vnd.ollama.image.model", "digest": DIGEST, "size": len(MODEL)}
CONFIG = {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": DIGEST, "size": len(MODEL)}
MANIFEST = {"schemaVersion": 2, "mediaType": "", "config": CONFIG, "layers": [LAYER]}


def store(folder: Path, manifest: bytes, name: str = "h/library/a/latest") -> Path:
    path = folder / "manifests" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(manifest)
    (folder / "blobs").mkdir()
    (folder / "blobs" / DIGEST.replace(":", "-")).write_bytes(MODEL)
    return path


def layer(**changes: Any) -> bytes:
    return json.dumps({**MANIFEST, "layers": [{**LAYER, **changes}]}).encode()


MANIFESTS = {
    "traversal": (layer(digest="sha256:../../../../etc/passwd"), "the digest of layer 0 is not valid"),
    "traversal of the right length": (layer(digest="sha256:" + "../" * 21 + "x"), "the digest of layer 0 is not valid"),
    "line end": (layer(digest=DIGEST + "\n"), "the digest of layer 0 is not valid"),
    "upper case": (layer(digest=DIGEST.upper()), "the digest of layer 0 is not valid"),
    "another algorithm": (layer(digest="md5:" + "0" * 32), "the digest of layer 0 is not valid"),
    "other size": (layer(size=7), "another size than in its manifest"),
    "negative size": (layer(size=-1), "the size of layer 0 is not valid"),
    "true size": (layer(size=True), "the size of layer 0 is not valid"),
    "huge size": (layer(size=1 << 62), "the size of layer 0 is not valid"),
    "float size": (layer(size=68.0), "the size of layer 0 is not valid"),
    "missing blob": (layer(digest="sha256:" + "0" * 64), "a blob of the model cannot be opened"),
    "no weights": (json.dumps({**MANIFEST, "layers": []}).encode(), "the model has no weights"),
    "two weights": (json.dumps({**MANIFEST, "layers": [LAYER, LAYER]}).encode(), "several layers of weights"),
    "tensors": (layer(mediaType="application/vnd.ollama.image.tensor"), "one blob per tensor"),
    "layers": (json.dumps({**MANIFEST, "layers": "x"}).encode(), "layers has the wrong type"),
    "layer": (json.dumps({**MANIFEST, "layers": [1]}).encode(), "layer 0 has the wrong type"),
    "config": (json.dumps({**MANIFEST, "config": None}).encode(), "config has the wrong type"),
    "version": (json.dumps({**MANIFEST, "schemaVersion": 1}).encode(), "is not a manifest"),
    "annotation": (layer(annotations={"a": 1}), "annotation 'a' of layer 0 has the wrong type"),
    "not JSON": (b"{", "not valid JSON"),
    "empty": (b"", "not valid JSON"),
    "deep": (b"[" * 100 + b"]" * 100, "JSON is nested too deep"),
    "many": (b"[" + b"1," * 200_001 + b"1]", "JSON has too many values"),
    "twice": (b'{"a":1,"a":2}', "twice"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifests(tmp_path, monkeypatch, case):
    text, message = MANIFESTS[case]
    path = store(tmp_path, text)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    for name in ("ollama:a", str(path)):
        with pytest.raises(pq.PolyquantError, match=re.escape(message)) as error:
            pq.open(name)
        assert "\n" not in str(error.value)
    (listed,) = pq.stored(ollama=tmp_path)
    assert message in listed.problem


def test_large_manifest_is_not_read(tmp_path, monkeypatch):
    path = store(tmp_path, b"")
    os.truncate(path, 100_000_000)  # a hole
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    with pytest.raises(pq.InputError, match=r"JSON file is too large.*4000000"):
        pq.open("ollama:a")


def test_links_and_folders_in_place_of_blobs(tmp_path, monkeypatch):
    store(tmp_path, layer())
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    assert pq.open("ollama:a").path.name == DIGEST.replace(":", "-")
    blob = tmp_path / "blobs" / DIGEST.replace(":", "-")
    blob.rename(tmp_path / "elsewhere")
    blob.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(pq.InputError, match="found a symbolic link"):
        pq.open("ollama:a")
    blob.unlink()
    os.mkfifo(blob)
    with pytest.raises(pq.InputError, match="must be a regular file"):
        pq.open("ollama:a")
    blob.unlink()
    blob.mkdir()
    with pytest.raises(pq.InputError, match="must be a regular file"):
        pq.open("ollama:a")


def test_other_layers_are_checked_before_they_are_shown(tmp_path, monkeypatch):
    system = {"mediaType": "application/vnd.ollama.image.system", "digest": DIGEST, "size": len(MODEL)}
    path = store(tmp_path, json.dumps({**MANIFEST, "layers": [LAYER, system]}).encode())
    assert pq.inspect(path).store["system"].startswith("GGUF\\x03")
    (tmp_path / "blobs" / ("sha256-" + "0" * 64)).write_text("other bytes")
    wrong = {**system, "digest": "sha256:" + "0" * 64, "size": 11}
    path.write_text(json.dumps({**MANIFEST, "layers": [LAYER, wrong]}))
    with pytest.raises(pq.InputError, match="does not have the digest of its name"):
        pq.inspect(path)
    with (tmp_path / "blobs" / ("sha256-" + "0" * 64)).open("r+b") as f:
        f.truncate(100_000_000)
    path.write_text(json.dumps({**MANIFEST, "layers": [LAYER, {**wrong, "size": 100_000_000}]}))
    with pytest.raises(pq.InputError, match="is too large"):
        pq.inspect(path)


def test_names(tmp_path, monkeypatch):
    store(tmp_path, layer())
    store(tmp_path / "x", layer(), "h/library/.hidden/latest")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    for name in ("../a", "a:../../x", "/etc/passwd", "a/../../b", "", ":", "a:", "é", "a\0b", "a b", "h/library/../a"):
        with pytest.raises(pq.PlanError, match="is not valid"):
            pq.open(f"ollama:{name}")
    with pytest.raises(pq.InputError, match=r"no model 'b:latest' in this store.*library/a:latest"):
        pq.open("ollama:b")
    assert pq.stored(ollama=tmp_path / "x") == []
    with pytest.raises(pq.InputError, match="is not an Ollama model store"):
        pq.stored(ollama=tmp_path / "blobs")
    assert str(parse_name("h:5000/me/a.b:Q4_K-M")) == "h:5000/me/a.b:Q4_K-M"


def test_two_hosts(tmp_path, monkeypatch):
    """The host of short names is that with the namespace 'library'; two of them need a full name."""
    store(tmp_path, layer())
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    for name in ("other/me/a/latest", "other/me/b/latest"):
        path = tmp_path / "manifests" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(layer())
    for name in ("a", "me/b", "other/me/a"):
        assert pq.open(f"ollama:{name}").path.name == DIGEST.replace(":", "-")
    path = tmp_path / "manifests/third/library/a/latest"
    path.parent.mkdir(parents=True)
    path.write_bytes(layer())
    with pytest.raises(pq.InputError, match="several models are called 'a:latest'"):
        pq.open("ollama:a")
    with pytest.raises(pq.PlanError, match="pass --host NAME"):
        pq.pack(tmp_path / "blobs" / DIGEST.replace(":", "-"), ollama=tmp_path, name="c")


# ---------------------------------------------------------------- OCI image layouts


def layout(folder: Path, manifest: Any, **index: Any) -> str:
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)
    (blobs / DIGEST[7:]).write_bytes(MODEL)
    raw = json.dumps(manifest).encode()
    digest = hashlib.sha256(raw).hexdigest()
    (blobs / digest).write_bytes(raw)
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    kind = "application/vnd.oci.image.manifest.v1+json"
    entry = {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(raw)}
    (folder / "index.json").write_text(json.dumps({"manifests": [{**entry, **index}]}))
    return f"oci:{folder}"


def file(name: str, **changes: Any) -> dict[str, Any]:
    kind = "application/vnd.cncf.model.weight.v1.raw"
    return {**LAYER, "mediaType": kind, "annotations": {"org.cncf.model.filepath": name}, **changes}


LAYOUTS: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "absolute": ([file("/etc/passwd")], {}, "the name of layer 0 is not valid"),
    "above": ([file("../m.gguf")], {}, "the name of layer 0 is not valid"),
    "not plain": ([file("a/./m.gguf")], {}, "the name of layer 0 is not valid"),
    "empty": ([file("")], {}, "the name of layer 0 is not valid"),
    "zero": ([file("m\0.gguf")], {}, "the name of layer 0 is not valid"),
    "twice": ([file("m.gguf"), file("m.gguf")], {}, "the name of layer 1 is not valid"),
    "file as folder": ([file("m"), file("m/x.gguf")], {}, "the name of layer 1 is not valid"),
    "folder as file": ([file("m/x.gguf"), file("m")], {}, "the name of layer 1 is not valid"),
    "archive": ([file("m.tar", mediaType="application/vnd.cncf.model.weight.v1.tar")], {}, "a layer is an archive"),
    "no names": ([LAYER, LAYER], {}, "the image has no files with names"),
    "size": ([file("m.gguf", size=1)], {}, "another size than in its manifest"),
    "index": ([file("m.gguf")], {"digest": "sha256:../x"}, "the digest of manifest 0 is not valid"),
    "manifest": ([file("m.gguf")], {"digest": DIGEST, "size": len(MODEL)}, "not valid JSON"),
    "nested": ([file("m.gguf")], {"mediaType": "application/vnd.oci.image.index.v1+json"}, "not the manifest of one"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(tmp_path, case):
    layers, index, message = LAYOUTS[case]
    reference = layout(tmp_path, {**MANIFEST, "layers": layers}, **index)
    with pytest.raises(pq.PolyquantError, match=re.escape(message)) as error:
        pq.open(reference)
    assert "\n" not in str(error.value)


def test_layout_that_is_sound(tmp_path):
    """Names by the annotation of ORAS; a single layer without a name is a GGUF file."""
    titled = {**LAYER, "annotations": {"org.opencontainers.image.title": "dir/m.gguf"}}
    assert pq.open(layout(tmp_path / "a", {**MANIFEST, "layers": [titled]})).path.name == "m.gguf"
    assert pq.open(layout(tmp_path / "b", {**MANIFEST, "layers": [LAYER]})).path.name == "model.gguf"
    (tmp_path / "b/oci-layout").write_text('{"imageLayoutVersion": "2"}')
    with pytest.raises(pq.InputError, match="is another version of the layout"):
        pq.open(f"oci:{tmp_path / 'b'}")
