"""Models in Ollama's store.

The digests of BLOBS are those that Ollama's own tests expect for the same requests (server/routes_create_test.go at the
parent of 5a173ed, the last version whose configs have rootfs), so every byte of every blob is compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyquant as pq
from golden import VECTORS
from polyquant.formats.gguf.joined import joined
from polyquant.packing import go_json
from polyquant.packing.facts import counted
from polyquant.storage.stores import ollama as stores

HOST = "registry.test"
KEY = b"general.architecture"
BARE = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(KEY)) + KEY + struct.pack("<IQ", 8, 4) + b"test"
"""The file of createBinFile in that test: one key, no tensors."""
MODEL = "89a2116c3a82d6a97f59f748d86ed4417214353fd178ee54df418fde32495fad"
TALK = [("assistant", "What is my purpose?"), ("user", "You run tests."), ("assistant", "Oh, my god.")]
AGAIN = [
    ("assistant", "You're a test, Harry."),
    ("user", "I-I'm a what?"),
    ("assistant", "A test. And a thumping good one at that, I'd wager."),
]
PARAMS = {"temperature": 1, "top_k": 10, "stop": ["USER:", "ASSISTANT:"]}

BLOBS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "TestCreateFromBin": ([{}], ["6bcdb8859d417753645538d7bbfbd7ca91a3f0c191aef5379c53c05e86b669dd"]),
    "TestCreateRemovesLayers": (
        [{"template": "{{ .Prompt }}"}],
        [
            "b507b9c2f6ca642bffcd06665ea7c91f235fd32daeefdf875a0f938db05fb315",
            "f6e7e4b28e0b1d0c635f2d465bd248c5387c3e75b61a48c4374192b26d832a56",
        ],
    ),
    "TestCreateUnsetsSystem": (
        [{"system": "Say hi!"}],
        [
            "0a666d113e8e0a3d27e9c7bd136a0bdfb6241037db50729d81568451ebfdbde8",
            "f29e82a8284dbdf5910b1555580ff60b04238b8da9d5e51159ada67a4d0d5851",
        ],
    ),
    "TestCreateMergeParameters": (
        [{"parameters": PARAMS}, {"parameters": {"temperature": 0.6, "top_p": 0.7}}],
        [
            "1d0ad71299d48c2fb7ae2b98e683643e771f8a5b72be34942af90d97a91c1e37",
            "6d6e36c1f90fc7deefc33a7300aa21ad4b67c506e33ecdeddfafa98147e60bbf",
            "bbdce269dabe013033632238b4b2d1e02fac2f97787c5e895f4da84e09cccd5d",
            "e29a7b3c47287a2489c895d21fe413c20f859a85d20e749492f52a838e36e1ba",
        ],
    ),
    "TestCreateMergeParameters, slices are replaced": (
        [{"parameters": PARAMS}, {"parameters": {"temperature": 0.6, "top_p": 0.7, "stop": ["<|endoftext|>"]}}],
        [
            "12f58bb75cb3042d69a7e013ab87fb3c3c7088f50ddc62f0c77bd332f0d44d35",
            "1d0ad71299d48c2fb7ae2b98e683643e771f8a5b72be34942af90d97a91c1e37",
            "6d6e36c1f90fc7deefc33a7300aa21ad4b67c506e33ecdeddfafa98147e60bbf",
            "9443591d14be23c1e33d101934d76ad03bdb0715fe0879e8b0d1819e7bb063dd",
        ],
    ),
    "TestCreateReplacesMessages": (
        [{"messages": TALK}, {"messages": AGAIN}],
        [
            "09cfac3e6a637e25cb41aa85c24c110dc17ba89634de7df141b564dd2da4168b",
            "298baeaf6928a60cf666d88d64a1ba606feb43a2865687c39e40652e407bffc4",
            "a60ecc9da299ec7ede453f99236e5577fd125e143689b646d9f0ddc9971bf4db",
            "c84aee28f2af350596f674de51d2a802ea782653ef2930a21d48bd43d5cd5317",
        ],
    ),
    "TestCreateTemplateSystem": (
        [{"template": "{{ .System }} {{ .Prompt }}", "system": "Say bye!"}],
        [
            "0a04d979734167da3b80811a1874d734697f366a689f3912589b99d2e86e7ad1",
            "4c5f51faac758fecaff8db42f0b7382891a4d0c0bb885f7b86be88c814a7cc86",
            "fe7ac77b725cda2ccad03f88a880ecdfd7a33192d6cae08fce2c0ee1455991ed",
        ],
    ),
    "TestCreateLicenses": (
        [{"licenses": ["MIT", "Apache-2.0"]}],
        [
            "2af71558e438db0b73a20beab92dc278a94e1bbe974c00c1a33e3ab62d53a608",
            "a762f214df0d96c9a7b82f96da98d99ceb2776c88e3ea7ffa09d1e5835516ec6",
            "e5dcffe836b6ec8a58e492419b550e65fb8cbdc308503979e5dacb33ac7ea3b7",
        ],
    ),
}


def bare(folder: Path) -> Path:
    path = folder / "test.gguf"
    path.write_bytes(BARE)
    return path


def modelfile(path: Path, first: str, options: dict[str, Any]) -> Path:
    """The Modelfile of a request."""
    lines = [f"FROM {first}", *(f"MESSAGE {role} {text}" for role, text in options.get("messages", ()))]
    lines += [f'LICENSE """{text}"""' for text in options.get("licenses", ())]
    lines += [f"{k.upper()} {options[k]}" for k in ("template", "system") if k in options]
    for key, value in options.get("parameters", {}).items():
        lines += [f'PARAMETER {key} "{v}"' for v in (value if isinstance(value, list) else [value])]
    path.write_text("\n".join(lines) + "\n")
    return path


def blobs(store: Path) -> set[str]:
    names = {p.name for p in (store / "blobs").iterdir()}
    for name in names:  # the rule of manifest/layer.go, computed independently
        assert name == "sha256-" + hashlib.sha256((store / "blobs" / name).read_bytes()).hexdigest()
    return {name.removeprefix("sha256-") for name in names}


@pytest.mark.parametrize("case", BLOBS)
def test_blobs_as_ollamas_own_tests_expect_them(tmp_path, case):
    requests, digests = BLOBS[case]
    store = tmp_path / "store"
    first = str(bare(tmp_path))
    for i, options in enumerate(requests):
        name = "test" if i == 0 else f"test{i + 1}"
        done = pq.pack(
            modelfile=modelfile(tmp_path / f"Modelfile{i}", first, options), ollama=store, name=name, host=HOST
        )
        assert done.path == store / "manifests" / HOST / "library" / name / "latest"
        first = "test"
    assert blobs(store) == {MODEL, *digests}


def test_manifest(tmp_path):
    """Bytes of WriteManifest in manifest/manifest.go; the config of 0.32.10 is the same without rootfs."""
    done = pq.pack(bare(tmp_path), ollama=tmp_path / "s", name="test:v1", host=HOST, system="Say hi!")
    config = "0a666d113e8e0a3d27e9c7bd136a0bdfb6241037db50729d81568451ebfdbde8"
    system = "f29e82a8284dbdf5910b1555580ff60b04238b8da9d5e51159ada67a4d0d5851"
    size = (tmp_path / "s/blobs" / f"sha256-{config}").stat().st_size
    expected = (
        '{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json",'
        f'"config":{{"mediaType":"application/vnd.docker.container.image.v1+json","digest":"sha256:{config}",'
        f'"size":{size}}},"layers":['
        f'{{"mediaType":"application/vnd.ollama.image.model","digest":"sha256:{MODEL}","size":68}},'
        f'{{"mediaType":"application/vnd.ollama.image.system","digest":"sha256:{system}","size":7}}]}}\n'
    )
    assert done.path.read_text() == expected
    assert done.digest == "sha256:" + hashlib.sha256(expected.encode()).hexdigest()
    kept = json.loads((tmp_path / "s/blobs" / f"sha256-{config}").read_text())
    assert kept.pop("rootfs") == {"type": "layers", "diff_ids": [f"sha256:{MODEL}", f"sha256:{system}"]}
    newer = hashlib.sha256(go_json.encode(kept)).hexdigest()
    assert newer == "99759ad5b91e723db0393d698ffbb448b1b7df5ff6377a108c49254583b1bc8c"  # TestCreateUnsetsSystem there


NUMBERS = {
    "a": ("a", '"a"'),
    "escaped": ('<b> & "c"\u2028\n\x01é', '"\\u003cb\\u003e \\u0026 \\"c\\"\\u2028\\n\\u0001é"'),
    "integer": (4096, "4096"),
    "double": (0.6, "0.6"),
    "integral": (1.0, "1"),
    "small": (1e-6, "0.000001"),
    "smaller": (1e-7, "1e-7"),
    "large": (1e20, "100000000000000000000"),
    "larger": (1e21, "1e+21"),
    "nested": ({"b": [1, True], "a": "x"}, '{"b":[1,true],"a":"x"}'),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_json_as_go_writes_it(case):
    value, text = NUMBERS[case]
    assert go_json.encode(value) == f"{text}\n".encode()


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0"), (999, "999"), (54_321, "54K"), (1_000_000, "1M"), (134_515_008, "134.52M"), (8 * 10**9, "8B"),
     (1_235_814_432, "1.2B")],
)  # fmt: skip
def test_parameters_as_ollama_counts_them(n, text):
    assert counted(n) == text


# ---------------------------------------------------------------- weights


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model as one file and split into 21."""
    folder = tmp_path_factory.mktemp("models")
    pq.convert(VECTORS / "models/tiny-llama-untied/hf", folder / "m.gguf")
    pq.convert(VECTORS / "models/tiny-llama-untied/hf", folder / "s.gguf", shard_bytes=60_000)
    return folder


def test_split_model_becomes_the_single_file(models, tmp_path, monkeypatch):
    whole = pq.pack(models / "m.gguf", ollama=tmp_path, name="whole", host=HOST)
    for shard in ("s-00001-of-00021.gguf", "s-00007-of-00021.gguf"):
        split = pq.pack(models / shard, ollama=tmp_path, name="split", overwrite=True)
        assert split.layers[0].digest == whole.layers[0].digest
        assert [x.how for x in split.layers] == ["reused"] * 2
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    packed, source = pq.open("ollama:split"), pq.open(models / "m.gguf")
    assert dict(packed.metadata) == dict(source.metadata)
    for name, weight in source.items():
        assert np.array_equal(packed[name].parts["blocks"].view(), weight.parts["blocks"].view())


def test_split_packed_converted_and_split_again(models, tmp_path):
    """Shards of any size, renamed together, join to the same bytes."""
    pq.convert(models / "s-00001-of-00021.gguf", tmp_path / "again.gguf", shard_bytes=200_000)
    shards = sorted(tmp_path.glob("again-*"))
    assert len(shards) < 21
    for i, path in enumerate(shards, 1):
        path.rename(tmp_path / f"other-{i:05}-of-{len(shards):05}.gguf")
    done = pq.pack(next(iter(tmp_path.glob("other-00001*"))), ollama=tmp_path / "store", name="a", host=HOST)
    assert done.layers[0].digest.endswith(hashlib.sha256((models / "m.gguf").read_bytes()).hexdigest())


def test_joined_pieces_of_other_byte_order_and_alignment(tmp_path):
    """Files of other converters: big-endian shards with alignment 64, the last tensor without padding."""
    paths = [tmp_path / f"x-0000{i}-of-00002.gguf" for i in (1, 2)]
    for no, path in enumerate(paths):
        path.write_bytes(foreign_shard(no, f"t{no}", np.arange(5 + no, dtype=">f4")))
    raw = b"".join(p if isinstance(p, bytes) else p.source.pread(p.start, p.nbytes).tobytes() for p in joined(paths[0]))
    (tmp_path / "one.gguf").write_bytes(raw)
    opened = pq.open(tmp_path / "one.gguf")
    assert list(opened.metadata) == ["general.architecture", "general.alignment"]
    for no in range(2):
        assert np.array_equal(opened[f"t{no}"].dequantize(), np.arange(5 + no, dtype=np.float32))
    assert len(raw) % 64 == 0


def foreign_shard(no: int, name: str, data: np.ndarray) -> bytes:
    def key(k: str, kind: int, value: bytes) -> bytes:
        return struct.pack(">Q", len(k)) + k.encode() + struct.pack(">I", kind) + value

    keys = [key("general.architecture", 8, struct.pack(">Q4s", 4, b"test"))] if no == 0 else []
    keys += [key("general.alignment", 4, struct.pack(">I", 64)), key("split.no", 2, struct.pack(">H", no)),
             key("split.count", 2, struct.pack(">H", 2))]  # fmt: skip
    head = b"GGUF" + struct.pack(">IQQ", 3, 1, len(keys)) + b"".join(keys)
    head += struct.pack(">Q", len(name)) + name.encode() + struct.pack(">IQIQ", 1, len(data), 0, 0)
    return head + bytes(-len(head) % 64) + data.tobytes()


@pytest.mark.parametrize("system", ["hard link", "clone", "copy"])
def test_link(models, tmp_path, monkeypatch, system):
    """A clone shares bytes until one file changes; without it a hard link; on another file system a copy."""
    from polyquant.storage.stores import blobs as module

    source = tmp_path / "m.gguf"
    source.write_bytes((models / "m.gguf").read_bytes())
    if system == "clone":

        def clone(fd: int, request: int, other: int) -> int:
            assert request == 0x40049409
            return os.write(fd, os.pread(other, 1 << 30, 0)) * 0

        monkeypatch.setattr(module.fcntl, "ioctl", clone)
    if system == "copy":
        monkeypatch.setattr(module.os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(18, "cross-device")))
    done = pq.pack(source, ollama=tmp_path / "s", name="a", host=HOST, link=True)
    blob = tmp_path / "s/blobs" / done.layers[0].digest.replace(":", "-")
    assert done.layers[0].how == {"hard link": "linked", "clone": "cloned", "copy": "copied"}[system]
    assert blob.samefile(source) == (system == "hard link")
    assert blobs(tmp_path / "s")
    assert pq.edit(source, set={"general.name": "other"}).how == "rewritten" or system != "hard link"
    assert blobs(tmp_path / "s")  # an edit of ours does not reach a linked blob


def test_name_without_host_and_reuse(models, tmp_path):
    first = pq.pack(models / "m.gguf", ollama=tmp_path, name="a", host=HOST)
    before = {p: p.stat().st_ino for p in (tmp_path / "blobs").iterdir()}
    second = pq.pack(models / "m.gguf", ollama=tmp_path, name="me/b:v2")
    assert second.path == tmp_path / "manifests" / HOST / "me/b/v2"
    assert {p: p.stat().st_ino for p in (tmp_path / "blobs").iterdir()} == before
    assert [x.how for x in second.layers] == ["reused"] * 2 and [x.how for x in first.layers] == ["copied"] * 2
    listed = {s.name: s.problem for s in pq.stored(ollama=tmp_path)}
    assert listed == {"a:latest": "", "me/b:v2": ""}


REFUSED = {
    "no host": ({"name": "a"}, "pass --host NAME"),
    "not valid": ({"name": "../a", "host": HOST}, "the namespace of the name '../a' is not valid"),
    "a path": ({"name": "/etc/passwd", "host": HOST}, "is not valid"),
    "many parts": ({"name": "a/b/c/d", "host": HOST}, "is not valid"),
    "a tag": ({"name": "a:..", "host": HOST}, "the tag of the name 'a:..' is not valid"),
    "a host": ({"name": "a", "host": ".."}, "the host of the name '..' is not valid"),
    "too long": ({"name": "a" * 81, "host": HOST}, "the model of the name"),
    "empty": ({"name": "", "host": HOST}, "is not valid"),
    "parameter": ({"name": "a", "host": HOST, "parameters": {"num_ctxt": 1}}, "did you mean num_ctx"),
    "number": ({"name": "a", "host": HOST, "parameters": {"num_ctx": "1_0"}}, "expected an integer"),
    "infinite": ({"name": "a", "host": HOST, "parameters": {"top_p": "inf"}}, "expected a number"),
    "media types": ({"name": "a", "host": HOST, "media_types": "docker"}, "applies to OCI layouts only"),
    "projector": ({"name": "a", "host": HOST, "projector": __file__}, "the projector is not a GGUF file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_requests_write_nothing(tmp_path, case):
    options, message = REFUSED[case]
    with pytest.raises(pq.PolyquantError, match=re.escape(message)):
        pq.pack(bare(tmp_path), ollama=tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_existing_names_and_foreign_folders(tmp_path):
    source, store = bare(tmp_path), tmp_path / "store"
    pq.pack(source, ollama=store, name="Test", host=HOST)
    for name, message in (("Test", "target exists"), ("test", "other letter case"), ("Test:LATEST", "other letter")):
        with pytest.raises(pq.PlanError, match=message):
            pq.pack(source, ollama=store, name=name)
    again = pq.pack(source, ollama=store, name="Test", system="x", overwrite=True)
    assert json.loads(again.path.read_text())["layers"][1]["size"] == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    with pytest.raises(pq.PlanError, match="is not an Ollama model store"):
        pq.pack(source, ollama=tmp_path / "other", name="a", host=HOST)
    with pytest.raises(pq.PlanError, match="is not a folder"):
        pq.pack(source, ollama=source, name="a", host=HOST)
    with pytest.raises(pq.UnsupportedError, match="polyquant convert"):
        pq.pack(VECTORS / "models/tiny-llama-untied/hf", ollama=store, name="a")


def test_damaged_blob_is_named_and_kept(models, tmp_path):
    done = pq.pack(models / "m.gguf", ollama=tmp_path, name="a", host=HOST)
    blob = stores.blob_path(tmp_path, stores.read(tmp_path, pq_name("a")).manifest.layers[0])
    raw = bytearray(blob.read_bytes())
    raw[-1] ^= 1
    blob.write_bytes(raw)
    with pytest.raises(pq.InputError, match=r"does not have the digest of its name.*other bytes"):
        pq.pack(models / "m.gguf", ollama=tmp_path, name="b")
    assert blob.read_bytes() == raw and done.path.exists()
    assert not any(".polyquant-" in p.name for p in tmp_path.rglob("*"))


def pq_name(model: str):
    from polyquant.storage.stores.names import parse_name

    return parse_name(model).at(HOST)


def test_source_that_changes_is_refused(models, tmp_path, monkeypatch):
    from polyquant.storage import pieces

    source = tmp_path / "m.gguf"
    source.write_bytes((models / "m.gguf").read_bytes())
    monkeypatch.setattr(pieces, "_AT_ONCE", 1 << 16)
    changed = []

    def tell(event: pq.Progress) -> None:
        if not changed:
            changed.append(os.utime(source))

    with pytest.raises(pq.InputError, match="changed while it was read"):
        pq.pack(source, ollama=tmp_path / "s", name="a", host=HOST, on_progress=tell)
    assert [p.name for p in (tmp_path / "s").rglob("*")] == ["blobs"]


def test_commands_take_a_model_of_a_store(models, tmp_path, monkeypatch):
    """Each reads the blob; none writes into the store."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "s"))
    done = pq.pack(models / "m.gguf", ollama=tmp_path / "s", name="a", host=HOST, system="Hi\x1b[2J", link=True)
    before = sorted(p.name for p in (tmp_path / "s").rglob("*"))
    for path in ("ollama:a", "ollama:a:latest", f"ollama:{HOST}/library/a", str(done.path)):
        inspection = pq.inspect(path)
        assert inspection.path == path and inspection.store["system"] == "Hi\\x1b[2J"
        assert inspection.store["name"] == f"{HOST}/library/a:latest"
    assert not pq.inspect(models / "m.gguf").store
    assert pq.checksum("ollama:a").content == pq.checksum(models / "m.gguf").content
    assert not pq.validate("ollama:a")
    with pytest.raises(pq.PlanError, match="cannot be edited in place"):
        pq.edit("ollama:a", set={"general.name": "x"})
    with pytest.raises(pq.PlanError, match="takes no other files"):
        pq.checksum("ollama:a").write()
    assert [x.reference for x in pq.stored()] == ["ollama:a:latest"]
    pq.convert("ollama:a", tmp_path / "q.gguf", codec="q8_0")
    assert sorted(p.name for p in (tmp_path / "s").rglob("*")) == before
